"""The trainer's process: isolated first, then torch, images and the orders of the agent (`orders`).

`python -m site_agent.trainer --config site.toml` is a process of its own in four forms: started by the agent, with one
end of a channel (`--channel`); as a service, which connects to the agent's socket file and then isolates itself; as one
of several processes that train together (`--worker`); and for `site-agent check`, which keeps nothing (`--check`).

Nothing is imported here that starts a thread or reads an image before the process is isolated.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final, NoReturn

import click

from lazaret.errors import ConfigError, ToolkitError
from lazaret.process import block_signals, end, end_on_signals, leave_on_signals
from lazaret.terminal import log_to_stderr, run_command, show_progress
from site_agent.config import INITIAL, SiteConfig
from site_agent.trainer import isolation, kernel
from site_agent.trainer.isolation import Isolation, cache_folder, card_files, data_folders, made
from site_agent.trainer.ranks import RANKS, RankPlace

if TYPE_CHECKING:
    from site_agent.trainer.channel import Channel

CONNECT_SECONDS: Final = 60.0
ALIVE_SECONDS: Final = 5.0


def isolate(
    config: SiteConfig,
    connection: socket.socket | None,
    scratch: Path,
    *,
    keeps: bool = True,
    closed: Sequence[Path] = (),
) -> Isolation:
    """Isolate this process, and try from inside what holds. A trainer reads images, initial model and plugins, and
    writes its own folders.

    :param connection: to the agent; None for a process without one.
    :param keeps: whether it keeps anything from round to round.
    :param closed: further secrets that the agent knows of.
    """
    images = data_folders(config.data.source)
    given = [config.initial_model, config.state / INITIAL, config.plugins]
    kept = [config.state / "memory", config.state / "models", config.sides]
    write = made(*(kept if keeps else ()), *([cache_folder()] if images else ()))
    return isolation.enter(
        config.site.isolation,
        read=[*(path for path in (*given, *kept) if path.exists()), *images],
        write=[*write, scratch],
        deny=[config.identity, *config.secret_files, *closed],
        keep=[connection.fileno()] if connection is not None else [],
        card=card_files(config.site.device),
        exception=RANKS if RankPlace.read() is not None else "",
    )


def serve(config: SiteConfig, connection: socket.socket, *, check: bool = False, closed: Sequence[Path] = ()) -> None:
    """Isolate this process, say what holds, and work for the agent until it is gone."""
    try:
        scratch = Path(tempfile.gettempdir())
        found, problem = isolate(config, connection, scratch, keeps=not check, closed=closed), None
    except ToolkitError as error:
        problem = error
    end_on_signals()
    # Only now: numpy starts threads when it is loaded.
    from site_agent.trainer.channel import RECEIVED_BY_TRAINER, Channel, IsolationReport, failed

    channel = Channel(connection, RECEIVED_BY_TRAINER)
    if problem is not None:
        channel.send(failed(problem))
        raise problem
    channel.send(IsolationReport(**found.to_json()))
    say_alive(channel)  # loading takes minutes on a machine that has much to do
    if check:
        from site_agent.trainer.data_checks import answer_checks

        answer_checks(config, channel)
        return
    from site_agent.trainer.orders import OrderLoop

    orders = OrderLoop(config, channel)
    if not found.exception:
        orders.report_attempts()
    orders.run()


def say_alive(channel: Channel) -> None:
    """Every few seconds, from a thread of its own."""
    from site_agent.trainer.channel import TrainerAlive

    def run() -> None:
        while True:
            time.sleep(ALIVE_SECONDS)
            try:
                channel.send(TrainerAlive(processor_ms=int(1000 * time.process_time())))
            except ToolkitError:
                end(0)

    Thread(target=run, name="alive", daemon=True).start()


def attach(config: SiteConfig) -> socket.socket:
    """Connect to the agent, which may still be starting.

    :raises ConfigError: if there is none.
    """
    path = config.trainer_socket
    if path is None:
        raise ConfigError(
            "the agent starts its trainer itself",
            where="[site] trainer_socket",
            hint="name a socket file to have two services",
        )
    patience, connection = time.monotonic() + CONNECT_SECONDS, socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(str(path))
            return connection
        except OSError as error:
            if time.monotonic() > patience:
                reason = (error.strerror or str(error)).lower()
                raise ToolkitError(f"no agent answers: {reason}", where=str(path), hint="is it running?") from error
        time.sleep(0.5)


def work_with_others(config: SiteConfig, place: RankPlace, closed: Sequence[Path]) -> NoReturn:
    """Take orders of the first process of this training until it is gone. Files are closed, the network is not."""
    isolate(config, None, Path(tempfile.gettempdir()), keeps=False, closed=closed)
    end_on_signals()
    from site_agent.trainer.workers import work

    work(place, config)
    raise SystemExit(0)


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True)
@click.option("--channel", "descriptor", type=int, help="One end of the channel, from the agent.")
@click.option("--worker", is_flag=True, help="Train together with others.")
@click.option("--required", is_flag=True, help="Begin only where no connection is possible, whatever site.toml says.")
@click.option("--check", is_flag=True, help="Check the data for `site-agent check`, and keep nothing.")
@click.option("--closed", type=click.Path(path_type=Path), multiple=True, help="A file with a secret, from the agent.")
@click.option("--log-format", type=click.Choice(["text", "json"]))
def command(
    path: Path,
    descriptor: int | None,
    worker: bool,
    required: bool,
    check: bool,
    closed: tuple[Path, ...],
    log_format: str | None,
) -> None:
    """The process that sees images."""
    if descriptor is None and not worker:
        leave_on_signals()  # as long as there is no agent
    config = SiteConfig.read(path)
    if required:
        config = config.model_copy(update={"site": config.site.model_copy(update={"isolation": "required"})})
    log_to_stderr("site-agent", log_format, json_lines=config.logging.json_lines)
    if not check:
        show_progress()
    place = RankPlace.read()
    if worker and place is not None:
        block_signals()
        work_with_others(config, place, closed)
    if descriptor is None:
        connection = attach(config)
    else:
        connection = socket.socket(fileno=descriptor)
        parent = os.getppid()
        kernel.die_with_parent(signal.SIGKILL)  # also where this process hangs and does not see the channel's end
        if os.getppid() != parent:
            return
    block_signals()
    serve(config, connection, check=check, closed=closed)


if __name__ == "__main__":
    run_command(command, "site-agent trainer")
