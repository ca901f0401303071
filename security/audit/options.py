"""What the commands of an auditor share: arguments, options, and how they end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

LOG = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
TARGET = click.Path(dir_okay=False, path_type=Path)

root_key = click.option("--root-key", type=FILE, help="The consortium's root certificate (PEM); pins every key.")
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
lost = click.option("--lost", multiple=True, metavar="NAME", help="A party whose log is known to be lost; repeatable.")
logs = click.argument("logs", nargs=-1, required=True, type=LOG)
one_log = click.argument("log", type=LOG)


def emit(data: dict[str, Any]) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def finish(code: int, *, quiet: bool = False) -> None:
    from security.audit.text import VERDICTS

    if not quiet:
        click.echo(f"verdict: {VERDICTS[code]}")
    context = click.get_current_context()
    if code and context.obj is not None:  # a configuration whose [alerts] are told
        from lazaret.alerts import tell_once

        tell_once(context.obj, "audit-finding", f"privacy-audit {context.info_name}: {VERDICTS[code]}")
    sys.exit(code)
