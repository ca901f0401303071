"""The `check` commands: lines with a verdict and what to do, checks of disk and memory, and the report.

A check is a function from a context to lines. Checks do not stop each other. One that cannot run raises `Unchecked`,
which is shown and never counts as good; an error that a check meets is its finding.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar, overload

import click

from lazaret.errors import LocalProtocolError, ToolkitError
from lazaret.terminal import emit, say

Context = TypeVar("Context")
Value = TypeVar("Value")


class CheckVerdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One finding.

    :param check: the name of the check that it comes from; `run` fills it in.
    """

    verdict: CheckVerdict
    what: str
    hint: str = ""
    check: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Unchecked(Exception):
    """A check that cannot be made here and now; the text says why."""


class Shared(Generic[Value]):
    """A property that several checks need, made once.

    The first check that needs it gets the error if it cannot be made: that is the finding. Later checks get `why`
    instead, so that one fault is one line.
    """

    def __init__(self, why: str, make: Callable[[Any], Value]) -> None:
        self._why = why
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_shared_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Value | Self:
        if instance is None:
            return self
        held = vars(instance)
        if self._name not in held:
            held[self._name] = None
            held[self._name] = (self._make(instance),)
        if held[self._name] is None:
            raise Unchecked(self._why)
        made: Value = held[self._name][0]
        return made


def shared(why: str) -> Callable[[Callable[[Any], Value]], Shared[Value]]:
    """Make a method such a property."""
    return lambda make: Shared(why, make)


def ok(what: str) -> Line:
    return Line(verdict=CheckVerdict.OK, what=what)


def warning(what: str, hint: str) -> Line:
    return Line(verdict=CheckVerdict.WARNING, what=what, hint=hint)


def problem(what: str, hint: str) -> Line:
    return Line(verdict=CheckVerdict.PROBLEM, what=what, hint=hint)


def unchecked(why: str) -> Line:
    return Line(verdict=CheckVerdict.UNCHECKED, what=f"not checked: {why}")


def found(error: ToolkitError) -> Line:
    """An error as a line. Every problem says what to do, so there is a last resort."""
    return problem(str(error), error.hint or "correct what this line names, and check again")


def tried(what: str, attempt: Callable[[], object]) -> Line:
    """`what` is so, unless trying it raises."""
    try:
        attempt()
    except ToolkitError as error:
        return found(error)
    return ok(what)


Check = Callable[[Context], Iterator[Line]]


class CheckList(Mapping[str, Check[Context]]):
    """The checks of one command, in the order of their names. Each function adds itself, under its own name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._checks: dict[str, Check[Context]] = {}

    def add(self, check: Check[Context]) -> Check[Context]:
        """For use as a decorator.

        :raises LocalProtocolError: if there is no such name, or it has its function already: a fault of the program.
        """
        name = check.__name__
        if name not in self._names or name in self._checks:
            raise LocalProtocolError(f"{name} is not the name of one check", where=check.__module__)
        self._checks[name] = check
        return check

    def __getitem__(self, name: str) -> Check[Context]:
        return self._checks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def run(checks: Mapping[str, Check[Context]], context: Context, *, skip: Collection[str] = ()) -> Iterator[Line]:
    """All lines of all checks, in order, as they come."""
    for name, check in checks.items():
        made = _of(name, check, context) if name not in skip else iter([unchecked("skipped, as requested")])
        yield from (replace(line, check=name) for line in made)


def _of(name: str, check: Check[Context], context: Context) -> Iterator[Line]:
    try:
        yield from check(context)
    except Unchecked as why:
        yield unchecked(str(why))
    except ToolkitError as error:
        yield found(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        yield problem(
            f"{where}{(error.strerror or str(error)).lower()}", "is the path right, and may this user read it?"
        )
    except Exception as error:
        # Its text is not ours and might name anything, a patient's file for instance.
        yield problem(
            f"ended with {type(error).__name__}",
            f"too little memory, or a bug: report it; --skip {name} leaves this out",
        )


def counts(lines: Iterable[Line]) -> dict[str, int]:
    """How many lines of each verdict there are; all four, in the order of the enum."""
    numbers = dict.fromkeys((verdict.value for verdict in CheckVerdict), 0)
    for line in lines:
        numbers[line.verdict.value] += 1
    return numbers


# Disk and memory of this machine, as numbers and as lines. What is needed comes from the caller.


def free_bytes(folder: Path) -> int:
    """What this user may still write where `folder` is or will be."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    return shutil.disk_usage(there).free


def used_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


def available_memory(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that a process could still take: of the machine, or of its control group if that allows less."""
    bounds = []
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        bounds.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        limit = int((cgroup / "memory.max").read_text())
        bounds.append(max(0, limit - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        pass  # no control group of its own, or "max"
    return min(bounds, default=None)


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def disk(folder: Path, *, free: int, least: int, whole: int) -> Line:
    """Space for one round is required, space for the whole run is recommended.

    :param least: bytes that the next round may add to what is there.
    :param whole: bytes that the rest of the run may add.
    """
    room = f"{size(free)} free for {folder}"
    if free < least:
        return problem(
            f"{room}, and one round needs {size(least)}", "free disk space, or move the state folder to a larger disk"
        )
    if free < whole:
        return warning(f"{room}, and the whole run may need {size(whole)}", "free disk space before it is needed")
    return ok(f"{room}; one round needs {size(least)}, the whole run {size(whole)}")


def memory(*, available: int, needed: int, what: str) -> Line:
    needs = f"{what} takes about {size(needed)}, {size(available)} are available"
    if needed > available:
        return problem(needs, "use a machine with more memory, or end other programs")
    if needed > 0.8 * available:
        return warning(needs, "the margin is small: end other programs before training")
    return ok(needs)


# The report: lines on a terminal, or one JSON object.

Command = TypeVar("Command", bound=Callable[..., Any])

_COLOURS: Final = {
    CheckVerdict.OK: "green",
    CheckVerdict.WARNING: "yellow",
    CheckVerdict.PROBLEM: "red",
    CheckVerdict.UNCHECKED: "bright_black",
}
_WIDTH: Final = max(len(verdict) for verdict in CheckVerdict)


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
    numbers = counts(shown)
    if as_json:
        emit({"checks": [line.to_json() for line in shown], "summary": numbers, "good": numbers["problem"] == 0})
    else:
        say(summary(numbers))
    return 1 if numbers["problem"] else 0


def _text(line: Line) -> str:
    verdict = click.style(f"{line.verdict:<{_WIDTH}}", fg=_COLOURS[line.verdict])
    return f"{verdict}  {line.check}: {line.what}" + (f"\n{' ' * _WIDTH}  -> {line.hint}" if line.hint else "")


def summary(numbers: dict[str, int]) -> str:
    """In one line; what was not checked is not called good."""
    several = {"warning": "warnings", "problem": "problems"}
    found = [(name, number) for name, number in numbers.items() if number]
    parts = [f"{number} {several.get(name, name) if number > 1 else name}" for name, number in found]
    if numbers["problem"]:
        ending = "not ready"
    elif numbers["unchecked"]:
        ending = "nothing wrong found in what was checked"
    else:
        ending = "ready"
    return f"{', '.join(parts)}: {ending}"
