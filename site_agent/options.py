"""Options that several commands of `site-agent` take."""

from __future__ import annotations

from pathlib import Path

import click

from lazaret.terminal import config_option

with_config = config_option(Path("site.toml"), "This site's configuration.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
