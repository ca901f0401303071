"""The command `site-agent`: joins a federation and trains; around it what comes before and what comes of it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from lazaret import software
from lazaret.control import pause_commands
from lazaret.terminal import emit, log_option, log_to_stderr, run_command, say
from security.clock import SystemClock
from security.identity import enrolment
from security.identity.enrolment import Identity
from security.rng import SystemRandomness
from site_agent.config import SiteConfig
from site_agent.model_commands import evaluate, export, help_agent, predict, worker
from site_agent.options import json_option, with_config
from site_agent.privacy import status_line
from site_agent.setup_commands import check, handover, init, ledger, log_commands, permit, renew
from site_agent.trainer.process import own_process
from site_agent.trainer.ranks import RankPlace

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@with_config
@log_option
@click.pass_context
def cli(context: click.Context, config_path: Path, log_format: str | None) -> None:
    """Join the federation and train, until it is stopped (SIGTERM or Ctrl-C)."""
    context.obj = config_path
    if log_format is not None:
        # At once: errors in the configuration are logged in the requested format too.
        log_to_stderr("site-agent", log_format, json_lines=False)
    if context.invoked_subcommand is None:
        run(config_path, log_format=log_format)


def run(config_path: Path, agent_type: type[Any] | None = None, *, log_format: str | None = None) -> None:
    """Assemble and serve.

    :param agent_type: the class that carries out effects; `Agent` if not given.
    :param log_format: `text` or `json`; the configuration's if not given.
    """
    config = SiteConfig.read(config_path)
    log_to_stderr("site-agent", log_format, json_lines=config.logging.json_lines)
    logging.getLogger("site-agent").info("version %s starts with %s", software.version(), config_path)
    # Behind the first line: these take seconds.
    from site_agent.assembly import assemble
    from site_agent.client import serve
    from site_agent.metrics import open_metrics
    from site_agent.run import Agent
    from site_agent.status import AgentPresence
    from site_agent.supervisor import start_trainer

    place = RankPlace.read()
    if place is not None and place.rank > 0:
        help_agent(config, place)
        return
    with ending_well():
        agent = assemble(
            config,
            clock=SystemClock(),
            rng=SystemRandomness(),
            make_learner=partial(start_trainer, log_format=log_format),
            agent_type=agent_type or Agent,
        )
        seen = AgentPresence(config, agent)
        with open_metrics(config, agent):
            asyncio.run(serve(agent, config.coordinator, until=stop_on_signals, watch=seen.look, ended=seen.stop))


@contextmanager
def ending_well() -> Iterator[None]:
    """A signal in here ends the process with 0: at once before `stop_on_signals`, and in good order after it.

    What is on disk is complete at every moment. Afterwards signals wait for ever: the process is ending already.
    """

    def leave(number: int, frame: object) -> NoReturn:
        del number, frame
        raise SystemExit(0)

    for number in ENDING:
        signal.signal(number, leave)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def stop_on_signals(stopped: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop(number: int, frame: object) -> None:
        del number, frame
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(stopped.set)

    for number in ENDING:
        signal.signal(number, stop)


@cli.command()
@click.argument("answer", type=click.Path(path_type=Path), required=False)
@click.option("--root-fingerprint", help="Fingerprint of the consortium's root, received over another channel.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Also (or only) install this signed manifest.")
@with_config
def join(
    config_path: Path,
    answer: Path | None,
    root_fingerprint: str | None,
    manifest: Path | None,
) -> None:
    """Install the consortium's ANSWER and its manifest."""
    identity, now = Identity(folder=SiteConfig.read(config_path).identity), SystemClock().now_ms()
    lines = enrolment.join(identity, answer=answer, root_fingerprint=root_fingerprint, manifest=manifest, now_ms=now)
    for line in lines:
        say(line)


@cli.command()
@click.option("--web", is_flag=True, help="Show it as a page to a browser on this machine, until Ctrl-C.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Where the page is; port 0 takes a free one.")
@with_config
@json_option
def status(config_path: Path, as_json: bool, web: bool, listen: str) -> None:
    """Show what this site has done so far, from its state folder; the agent may be running."""
    from site_agent.status import lines, overview

    if web:
        from site_agent.page.content import show_page

        show_page(SiteConfig.read(config_path), listen)
        return
    found = overview(SiteConfig.read(config_path))
    if as_json:
        emit(found)
        return
    for line in lines(found, SystemClock().now_ms()):
        click.echo(line)
    if found["privacy"]:
        click.echo(status_line(found["privacy"]))
    for row in found["metrics"]:
        figures = row.get("test") or row.get("validation") or {}
        shown = "not known" if figures.get("bacc") is None else f"{figures['bacc']:.3f}"
        click.echo(f"  round {row['round']:>4}  balanced accuracy {shown}")


pausing = pause_commands(lambda path: SiteConfig.read(path).state, with_config, "this site's training")
for command in (
    init,
    renew,
    permit,
    check,
    *pausing,
    handover,
    ledger,
    evaluate,
    predict,
    export,
    worker,
    *log_commands,
):
    cli.add_command(command)


def main() -> None:
    """The console script: a process of its own, in which commands that see images isolate themselves."""
    with own_process():
        run_command(cli, "site-agent")


if __name__ == "__main__":
    main()
