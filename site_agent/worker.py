"""`site-agent worker`: one of several processes or machines that train together. It has no keys and sends nothing."""

from __future__ import annotations

from pathlib import Path

import click

from security.errors import ConfigError
from security.terminal import log_to_stderr
from site_agent.config import SiteConfig
from site_agent.options import also_config
from site_agent.ranks import Place


@click.command()
@also_config
@click.pass_obj
def worker(config_path: Path, own_config: Path | None) -> None:
    """Train with the agent on another machine of this hospital (docs/site-agent.md, several processes)."""
    config, place = SiteConfig.read(own_config or config_path), Place.read()
    if place is None or place.rank == 0:
        raise ConfigError(
            "a worker cannot be the first process: that is the agent",
            where="RANK",
            hint="start through torchrun with --node-rank 1 or higher, and `site-agent` itself on the first machine",
        )
    log_to_stderr("site-agent", None, json_lines=config.logging.json_lines)
    help_agent(config, place)


def help_agent(config: SiteConfig, place: Place) -> None:
    """Work for the agent until it is gone."""
    from site_agent.crew import work

    work(place, config.data, seconds=float(config.site.worker_wait), threads=config.site.threads)
