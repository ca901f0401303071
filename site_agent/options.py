"""Options that several commands of `site-agent` take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

import click

from lazaret.terminal import config_option

with_config = config_option(Path("site.toml"), "This site's configuration.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
OWN_PROCESS: Final[ContextVar[bool]] = ContextVar("own_process", default=False)


@contextmanager
def own_process() -> Iterator[None]:
    """Commands in here may start a child and isolate it: nothing runs in this process but one command.

    The console script says so. A program that calls a command as a function does not, and is never isolated by it.
    """
    token = OWN_PROCESS.set(True)
    try:
        yield
    finally:
        OWN_PROCESS.reset(token)
