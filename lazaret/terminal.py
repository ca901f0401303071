"""Output of all commands: results on stdout, the rest on stderr, errors as one line and a hint, fixed exit codes.

0 good, 1 a finding or a failed run, 2 bad usage or configuration, 3 cannot decide. Logs, progress and questions are
here too, so that all commands are alike: text for people, JSON lines on request, bars on a terminal only.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import click

from lazaret.errors import ConfigError, ToolkitError
from lazaret.files import DISK_HINTS

INTERRUPTED = 130
SECONDS_BETWEEN_LINES: Final = 10.0
TEXT_TIME: Final = "%Y-%m-%d %H:%M:%S%z"  # a service runs for months, in a zone that the reader may not know
Command = TypeVar("Command", bound=Callable[..., Any])


class LateCommands(MutableMapping[str, click.Command]):
    """The commands of a group; one that is named by its place is imported when it is asked for."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._known: dict[str, click.Command | str] = dict(places)

    def __getitem__(self, name: str) -> click.Command:
        found = self._known[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = self._known[name] = getattr(import_module(module), attribute)
        return found

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def late_group(modules: Mapping[str, Mapping[str, str]]) -> type[click.Group]:
    """A group whose commands are imported when they are run, so that `--help` is quick.

    :param modules: by module, the commands in it and their lines in the list; a command `log-note` is `log_note` there.
    """
    places = {name: f"{module}:{name.replace('-', '_')}" for module, named in modules.items() for name in named}

    class LateGroup(click.Group):
        texts: ClassVar = {name: text for named in modules.values() for name, text in named.items()}

        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, **more)
            self.commands = LateCommands(places)

        def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
            with formatter.section("Commands"):
                formatter.write_dl(sorted(self.texts.items()))

    return LateGroup


def run_command(command: click.Command, program: str, *, interrupted: str = "interrupted") -> NoReturn:
    """Run a click command as a console script, and exit."""
    code = _exit_code(command, program, interrupted)
    # An error's traceback holds what was open, such as a connection whose thread Python waits for before it ends.
    gc.collect()
    sys.exit(code)


def _exit_code(command: click.Command, program: str, interrupted: str) -> int:
    try:
        command.main(prog_name=program, standalone_mode=False)
    except ToolkitError as error:
        _complain(program, str(error), error.hint, code=error.code)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        _complain(program, interrupted, None)
        return INTERRUPTED
    except OSError as error:
        # A full disk, a read-only folder: the user's to mend, so no traceback.
        where = f"{error.filename}: " if error.filename else ""
        _complain(program, f"{where}{(error.strerror or str(error)).lower()}", DISK_HINTS.get(error.errno or 0))
        return 1
    except ModuleNotFoundError:
        raise  # `lazaret.commands` names the extra that is missing
    except Exception:
        traceback.print_exc()  # a bug: it is shown whole
        return 1
    return 0


def _complain(program: str, message: str, hint: str | None, *, code: str = "") -> None:
    if _json_lines:
        say(_json_line(time.time(), "error", program, message, code=code, hint=hint or ""))
        return
    priority = f"<{_PRIORITIES[logging.ERROR]}>" if _to_journal() else ""
    click.echo(f"{priority}{program}: error: {message}", err=True)
    if hint:
        click.echo(f"{priority}hint: {hint}", err=True)


def say(message: str) -> None:
    """A remark for people, on stderr."""
    click.echo(message, err=True)


def emit(value: dict[str, Any]) -> None:
    """The one JSON object of `--json`, on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


# Logs of services.

_json_lines = False


def _json_line(seconds: float, level: str, program: str, message: str, **more: str) -> str:
    when = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    record = {"time": when, "level": level, "program": program, "message": message, **more}
    return json.dumps(record, ensure_ascii=False)


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, program, message."""

    def format(self, record: logging.LogRecord) -> str:
        return _json_line(record.created, record.levelname.lower(), record.name, record.getMessage())


# Numbers of syslog, which the journal takes from the beginning of a line (sd-daemon(3)).
_PRIORITIES: Final = {logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}


class JournalLines(logging.Formatter):
    """For the journal of systemd: it has the time itself, and tells warnings and errors from the rest by a number."""

    def format(self, record: logging.LogRecord) -> str:
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{record.getMessage()}"


def _to_journal() -> bool:
    """Whether stderr is the journal: the variable names the file that it was then, and a pipe may be there now."""
    try:
        there = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


def _text_lines() -> logging.Formatter:
    return JournalLines() if _to_journal() else logging.Formatter("%(asctime)s %(message)s", TEXT_TIME)


def log_option(command: Command) -> Command:
    """`--log-format`, before a sub-command; left out, the configuration decides."""
    text = "Format of the log lines on stderr."
    return click.option("--log-format", type=click.Choice(["text", "json"]), help=text)(command)


def config_option(default: Path, what: str) -> Callable[[Command], Command]:
    """`--config FILE`, as `config_path`: before or behind the name of a subcommand, for which the group keeps it."""

    def found(context: click.Context, _: click.Parameter, value: Path | None) -> Path:
        return value or context.obj or default

    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=found,
        help=f"{what} Default: {default}.",
    )


def log_to_stderr(program: str, log_format: str | None, *, json_lines: bool) -> None:
    """From here on the program's own log goes to stderr, and nothing of the libraries' does; errors are alike.

    :param log_format: what `--log-format` says.
    :param json_lines: what the configuration says, where the flag is left out.
    """
    global _json_lines
    _json_lines = json_lines = json_lines if log_format is None else log_format == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else _text_lines())
    logger = logging.getLogger(program)
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    # A library (absl, which the accountant imports) may put a handler of its own on the root logger: it would repeat
    # every line in a second form.
    logger.propagate = False


def remark(program: str, message: str) -> None:
    """A line in the form that was asked for, of a program that keeps no log."""
    say(_json_line(time.time(), "info", program, message) if _json_lines else message)


def bars_fit() -> bool:
    """On a terminal, unless every line is to be JSON."""
    return sys.stderr.isatty() and not _json_lines


# Long work.

Tell = Callable[[int, int], None]
_progress_shown = False


def show_progress() -> None:
    """Commands that people watch call this, so that inner code may show its progress; libraries print nothing."""
    global _progress_shown
    _progress_shown = True


@contextmanager
def progress(what: str, *, quiet: bool | None = None) -> Iterator[Tell]:
    """Yields a function of (done, of how many): a bar on a terminal, a line now and then elsewhere, all on stderr.

    :param quiet: if left out, nothing is shown unless the command has asked for it by `show_progress`.
    """
    if quiet or (quiet is None and not _progress_shown):
        yield lambda *_: None
    elif bars_fit():
        with _bar(what) as tell:
            yield tell
    else:
        yield _lines(what)


@contextmanager
def _bar(what: str) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Tell:
    """Nothing for work that is short."""
    due = time.monotonic() + SECONDS_BETWEEN_LINES

    def tell(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + SECONDS_BETWEEN_LINES
            remark("progress", f"{what}: {done} of {total}")

    return tell


# Questions.


def can_ask() -> bool:
    """Only a person at a terminal is asked; a script gets an error instead of waiting for ever."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(value: str | None, flag: str, question: str, *, default: str | None = None) -> str:
    """What a flag says; without it, what the user answers.

    :param default: what Enter means, and what a script gets that leaves the flag out; None where there is none.
    :raises ConfigError: where nobody can be asked and there is no default.
    """
    if value is not None:
        return value
    if can_ask():
        answer = click.prompt(question, default=default, err=True, type=str)
        return str(answer).strip()
    if default is not None:
        return default
    raise ConfigError(f"{flag} is missing", hint=f"{question}? Give {flag}, or run this on a terminal to be asked")


def as_range(count: int) -> str:
    """1 to 9, 10 to 19, 20 to 49, 50 to 99, 100 to 199 ...: a size, and not a number to compare from day to day."""
    if count < 10:
        return "no" if count == 0 else "1 to 9"
    power: int = 10 ** (len(str(count)) - 1)
    low, high = next((low, high) for low, high in ((1, 2), (2, 5), (5, 10)) if count < high * power)
    return f"{low * power} to {high * power - 1}"
