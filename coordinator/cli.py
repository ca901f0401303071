"""The command `coordinator`: the service itself; its other commands are imported when they are run (`commands`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from lazaret import software
from lazaret.process import ending_well
from lazaret.terminal import config_option, late_group, log_option, log_to_stderr, run_command

with_config = config_option(Path("coordinator.toml"), "This coordinator's configuration.")
Group = late_group(
    {
        "coordinator.commands": {
            "init": "Make keys, a request for the consortium and a coordinator.toml.",
            "join": "Install the consortium's answer and its manifest.",
            "renew": "Make new keys and a request for the consortium.",
            "check": "Check everything that a start needs, and say what to do.",
            "status": "Show whether it runs, what it waits for, sites and rounds.",
            "pause": "Begin no new round until `resume`.",
            "resume": "End the pause.",
            "queue": "Queue the next run: a signed manifest and its initial model.",
            "end-run": "End the run in force before its last round.",
            "runs": "List, archive or remove the files of finished runs.",
            "export": "Write the global model as safetensors.",
            "log-export": "Copy the privacy log for an auditor.",
            "log-note": "Record an action of yours in the privacy log.",
            "log-erase": "Erase private annexes of entries of the privacy log.",
            "log-archive": "Move older segments of the privacy log to another folder.",
        },
        "coordinator.backup": {
            "backup": "Write a copy of this coordinator to a file, or move it to another machine.",
            "restore": "Restore a backup, or a moved one, into a new folder.",
            "recover": "Continue a run after the state folder was lost.",
            "state": "List this coordinator's files, and which of them may be copied.",
        },
    }
)


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@with_config
@log_option
@click.pass_context
def cli(context: click.Context, config_path: Path, log_format: str | None) -> None:
    """Run a coordinator, until it is stopped (SIGTERM, SIGHUP or Ctrl-C)."""
    context.obj = config_path
    if log_format is not None:
        # Before anything is read: an error in the configuration is logged in the same format.
        log_to_stderr("coordinator", log_format, json_lines=False)
    if context.invoked_subcommand is None:
        run(config_path, log_format=log_format)


def run(config_path: Path, *, log_format: str | None = None) -> None:
    """Assemble and serve.

    :param log_format: `text` or `json`; the configuration's if not given.
    """
    with ending_well():
        _serve(config_path, log_format)


def _serve(config_path: Path, log_format: str | None) -> None:
    from coordinator.config import CoordinatorConfig

    config, base = CoordinatorConfig.read(config_path)
    log_to_stderr("coordinator", log_format, json_lines=config.logging.json_lines)
    logging.getLogger("coordinator").info("version %s starts with %s", software.version(), config_path)
    # Behind the first line: it takes a while.
    from coordinator.service import run_until_stopped
    from lazaret.control import final_message

    with final_message(base / config.state):
        run_until_stopped(config, base)


def main() -> Any:
    """Entry of the console script."""
    run_command(cli, "coordinator")
