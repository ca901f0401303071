"""Options that several commands of `coordinator` take."""

from __future__ import annotations

from pathlib import Path

import click

DEFAULT_CONFIG = Path("coordinator.toml")


def _or_the_groups(context: click.Context, _: click.Parameter, value: Path | None) -> Path:
    """`--config` may stand before or after the name of a subcommand."""
    return value or context.obj or DEFAULT_CONFIG


config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    callback=_or_the_groups,
    help=f"Default: {DEFAULT_CONFIG}.",
)
