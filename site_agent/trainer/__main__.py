"""The trainer's process: isolated first, then torch, images and the orders of the agent (`orders`).

`python -m site_agent.trainer` is started by the agent (`site_agent.supervisor`) with one end of a channel. Nothing is
imported here that starts a thread or reads an image before the process is isolated.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import Final

import click

from lazaret.errors import ToolkitError
from lazaret.terminal import log_to_stderr, run_command, show_progress
from site_agent.config import SiteConfig
from site_agent.trainer import isolation, kernel
from site_agent.trainer.file_access import cache_folder, data_path, image_folders, made
from site_agent.trainer.isolation import Isolation
from site_agent.trainer.ranks import RANKS, RankPlace

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def isolate(config: SiteConfig, connection: socket.socket, scratch: Path) -> Isolation:
    """Put up the walls and try them. The trainer reads images and the initial model, and writes its own folders."""
    source = data_path(config.data.source)
    images = image_folders(source) if source is not None else ()
    ours = [config.state / "memory", config.state / "models", config.sides]
    write = made(*ours, *([cache_folder()] if source is not None else ()))
    return isolation.enter(
        config.site.isolation,
        read=[config.initial_model, *images],
        write=[*write, scratch],
        deny=[config.identity],
        keep=[connection.fileno()],
        exception=RANKS if RankPlace.read() is not None else "",
    )


def serve(config: SiteConfig, connection: socket.socket) -> None:
    """Isolate this process, say what holds, and work for the agent until it is gone."""
    try:
        found, problem = isolate(config, connection, Path(tempfile.gettempdir())), None
    except ToolkitError as error:
        problem = error
    # Only now: numpy starts threads when it is loaded.
    from site_agent.trainer.channel import RECEIVED_BY_TRAINER, Channel, IsolationReport, failed

    channel = Channel(connection, RECEIVED_BY_TRAINER)
    if problem is not None:
        channel.send(failed(problem))
        raise problem
    channel.send(IsolationReport(**found.to_json()))
    from site_agent.trainer.orders import OrderLoop

    orders = OrderLoop(config, channel)
    if not found.exception:
        orders.report_attempts()
    orders.run()


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True)
@click.option("--channel", "descriptor", type=int, required=True)
@click.option("--log-format", type=click.Choice(["text", "json"]))
def command(path: Path, descriptor: int, log_format: str | None) -> None:
    """The agent starts this, and gives it one end of a channel."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    parent = os.getppid()
    kernel.die_with_parent(signal.SIGKILL)  # also where this process hangs and does not see the end of the channel
    if os.getppid() != parent:
        return
    config = SiteConfig.read(path)
    log_to_stderr("site-agent", log_format, json_lines=config.logging.json_lines)
    show_progress()
    serve(config, socket.socket(fileno=descriptor))


if __name__ == "__main__":
    run_command(command, "site-agent trainer")
