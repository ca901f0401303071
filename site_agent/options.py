"""Options that several commands of `site-agent` take."""

from __future__ import annotations

from pathlib import Path

import click

# Behind a subcommand it may stand as well as before it.
also_config = click.option(
    "--config", "own_config", type=click.Path(path_type=Path, dir_okay=False), help="This site's configuration."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
