"""Options that several commands of `site-agent` take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

import click

from lazaret.terminal import Command, config_option

with_config = config_option(Path("site.toml"), "This site's configuration.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def issuer_options(command: Command) -> Command:
    """An authority of the hospital's own for TLS certificates."""
    command = click.option("--tls-name", "own_name", help="The host name in its certificates for this agent.")(command)
    return click.option(
        "--tls-issuer",
        "issuer",
        type=click.Path(path_type=Path),
        help="The hospital's own authority issues TLS certificates too: its certificate (docs/keys.md).",
    )(command)


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
