"""`privacy-audit`: what an auditor types. Works offline, on copies, with nothing but the consortium's root.

Exit codes: 0 clean, 1 a finding, 2 bad usage, 3 cannot decide. A finding outranks what cannot be decided. A command is
in the module of what it is about, or in `commands`, and imported when it is run, so that help answers at once. What
the commands share is here: arguments, options, and how they end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from lazaret.errors import CannotDecide, ToolkitError
from lazaret.terminal import late_group

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


class _Group(
    late_group(  # type: ignore[misc]  # mypy cannot follow a class that a function makes
        {
            "security.audit.commands": {
                "verify": "Check each log by itself.",
                "cross": "Check logs against each other.",
                "compare": "Check logs against each other.",
                "egress": "Add up what left.",
                "epsilon": "Recompute what privacy was spent.",
                "heads": "Show who cosigned which checkpoint, and when.",
                "prove": "Write one entry with the proof that it is in the log.",
                "check-proof": "Check a proof without the log.",
                "report": "Write one page: what was checked and found.",
                "bench": "Measure what logging and verifying cost.",
            },
            "security.audit.claim": {"claim": "Write one page about SUBJECT, with proofs."},
            "security.audit.drafts": {"draft": "Draft a document for authorities from logs."},
            "security.audit.export": {"export": "Write what left as a table, or a whole log."},
            "security.audit.forward": {"forward": "Send the entries of a log to a collector."},
            "security.audit.timestamps": {"timestamp": "Ask for and check time stamps (RFC 3161)."},
            "security.audit.visits": {
                "remember": "Compare logs with those of your last visit.",
                "witness-key": "Make the key of a witness NAME.",
                "cosign": "Sign that you saw the newest head of each log.",
            },
        }
    )
):
    """Turns our errors into a line, a hint and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ToolkitError as error:
            click.echo(f"privacy-audit: error: {error}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            # A copy with unreadable parts: neither good nor bad can be said.
            click.echo(f"privacy-audit: error: {error.filename}: {error.strerror}", err=True)
            ctx.exit(CannotDecide.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--alerts", type=FILE, help="Send a verdict with findings to the [alerts] of this configuration.")
@click.option("--segments", multiple=True, type=LOG, help="A folder with archived segments of a log; repeatable.")
@click.pass_context
def main(context: click.Context, alerts: Path | None, segments: Sequence[Path]) -> None:
    """Check privacy logs: what left each site, that it was masked, its epsilon, and that it was not changed."""
    from security.log.store import ARCHIVES

    context.obj = alerts
    context.call_on_close(partial(ARCHIVES.reset, ARCHIVES.set(tuple(segments))))
