"""How our commands speak: results on stdout, the rest on stderr, errors as one line and a hint, fixed exit codes.

0 good, 1 a finding or a failed run, 2 bad usage or configuration, 3 cannot decide.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import click

from security.errors import ToolkitError

INTERRUPTED = 130


def run_command(command: click.Command, program: str) -> NoReturn:
    """Run a click command as a console script, and exit."""
    try:
        command.main(prog_name=program, standalone_mode=False)
    except ToolkitError as error:
        _complain(program, str(error), error.hint)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        _complain(program, "interrupted", None)
        sys.exit(INTERRUPTED)
    except OSError as error:
        # A full disk, a read-only folder: the user's to mend, so no traceback.
        where = f"{error.filename}: " if error.filename else ""
        _complain(program, f"{where}{(error.strerror or str(error)).lower()}", None)
        sys.exit(1)
    sys.exit(0)


def _complain(program: str, message: str, hint: str | None) -> None:
    click.echo(f"{program}: error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)


def say(message: str) -> None:
    """A remark for people, on stderr."""
    click.echo(message, err=True)


def emit(value: dict[str, Any]) -> None:
    """The one JSON object of `--json`, on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
