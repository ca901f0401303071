"""Lines on a terminal or as one JSON object, for the `check` of both commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import click

from security.preflight.lines import Line, Verdict, counts
from security.terminal import emit, say

Command = TypeVar("Command", bound=Callable[..., Any])

_COLOURS: Final = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.PROBLEM: "red",
    Verdict.UNCHECKED: "bright_black",
}
_WIDTH: Final = max(len(verdict) for verdict in Verdict)


def skip_option(names: Iterable[str]) -> Callable[[Command], Command]:
    """`--skip NAME`, for the checks of one command."""
    return click.option(
        "--skip", "skipped", multiple=True, type=click.Choice(list(names)), help="Leave a check out; may be repeated."
    )


def report(lines: Iterable[Line], *, as_json: bool) -> int:
    """Print every line as it comes and a summary; the exit code is 1 if there is a problem."""
    shown = []
    for line in lines:
        shown.append(line)
        if not as_json:
            click.echo(_text(line))
    told = counts(shown)
    if as_json:
        emit({"checks": [line.to_json() for line in shown], "summary": told, "good": told["problem"] == 0})
    else:
        say(summary(told))
    return 1 if told["problem"] else 0


def _text(line: Line) -> str:
    verdict = click.style(f"{line.verdict:<{_WIDTH}}", fg=_COLOURS[line.verdict])
    return f"{verdict}  {line.check}: {line.what}" + (f"\n{' ' * _WIDTH}  -> {line.hint}" if line.hint else "")


def summary(told: dict[str, int]) -> str:
    """In one line; what was not looked at is not called good."""
    several = {"warning": "warnings", "problem": "problems"}
    parts = [f"{number} {several.get(name, name) if number > 1 else name}" for name, number in told.items() if number]
    if told["problem"]:
        ending = "not ready"
    elif told["unchecked"]:
        ending = "nothing wrong found in what was checked"
    else:
        ending = "ready"
    return f"{', '.join(parts)}: {ending}"
