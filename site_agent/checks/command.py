"""The command `site-agent check`: it starts the process that looks at images first, then loads its own modules."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from lazaret.archive import refuse_moved
from lazaret.checks import report, skip_option
from site_agent.config import CHECK_NAMES, SiteConfig
from site_agent.options import json_option, with_config
from site_agent.trainer_process import CheckingTrainer

BY_TRAINER: Final = frozenset(("isolation", "data", "images", "code", "trial"))


@click.command()
@skip_option(CHECK_NAMES)
@with_config
@json_option
def check(config_path: Path, skipped: tuple[str, ...], as_json: bool) -> None:
    """Check everything that a start needs, and say what to do.

    Opens and closes one TLS connection to the coordinator; sends no message.
    """
    config, process = SiteConfig.read(config_path), None
    refuse_moved(config.state)
    if not set(skipped) >= BY_TRAINER:
        with suppress(OSError):  # the checks that need it try again, and report
            process = CheckingTrainer(config)
    from site_agent.checks.run import run_checks

    sys.exit(report(run_checks(config, skip=skipped, progress=not as_json, process=process), as_json=as_json))
