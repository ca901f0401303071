"""The command `site-agent`: joins a federation and trains; init, join, check, status and evaluate around it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import click

from security.clock import SystemClock
from security.consortium import enrolment
from security.consortium.enrolment import Identity
from security.errors import ConfigError
from security.keystore import write_atomically
from security.pki import Role, Subject
from security.rng import SystemRandomness
from security.terminal import emit, run_command, say
from site_agent.config import SiteConfig
from site_agent.template import site_toml

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("site.toml"),
    show_default=True,
    help="This site's configuration.",
)
# Behind a subcommand it may stand as well as before it.
also_config = click.option(
    "--config", "own_config", type=click.Path(path_type=Path, dir_okay=False), help="This site's configuration."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@config_option
@click.pass_context
def cli(context: click.Context, config_path: Path) -> None:
    """Join the federation and train, until told to stop (SIGTERM or Ctrl-C)."""
    context.obj = config_path
    if context.invoked_subcommand is None:
        run(config_path)


def run(config_path: Path, agent_type: type[Any] | None = None) -> None:
    """Assemble and serve.

    :param agent_type: the class that carries out effects; `Agent` if not given.
    """
    from site_agent.agent import Agent
    from site_agent.assembly import assemble
    from site_agent.client import serve
    from site_agent.learning import make_trainer

    config = SiteConfig.read(config_path)
    log_to_stderr()
    agent = assemble(
        config,
        clock=SystemClock(),
        rng=SystemRandomness(),
        make_learner=make_trainer,
        agent_type=agent_type or Agent,
    )
    asyncio.run(serve(agent, config.coordinator, until=stop_on_signals))


def stop_on_signals(stopped: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("site-agent")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--federation", required=True, help="Name of the federation, as the consortium calls it.")
@click.option("--name", required=True, help="Name of this hospital in the roster.")
@click.option("--address", required=True, help="The coordinator's host:port.")
@click.option("--data", "source", required=True, help="csv:FILE, folders:DIR, dicom:DIR, npz:PATH or generated.")
@click.option("--initial-model", default="initial.safetensors", show_default=True, help="The consortium's model file.")
@json_option
def init(
    folder: Path, federation: str, name: str, address: str, source: str, initial_model: str, as_json: bool
) -> None:
    """Make keys, a request for the consortium and a commented site.toml in FOLDER."""
    config = folder / "site.toml"
    if config.exists():
        raise ConfigError("a configuration is here already", where=str(config), hint="choose another folder")
    subject = Subject(federation=federation, role=Role.SITE, member=name)
    identity = Identity(folder=folder / "identity")
    request = identity.create(subject)
    text = site_toml(identity="identity", state="state", initial_model=initial_model, address=address, source=source)
    write_atomically(config, text.encode(), mode=0o600)
    SiteConfig.read(config)
    if as_json:
        emit({"config": str(config), "request": str(identity.request_path), "fingerprint": request.fingerprint})
        return
    say(f"keys and request are in {identity.folder}, the configuration is {config}")
    say(f"send {identity.request_path} to the consortium and read them this fingerprint out:")
    click.echo(request.fingerprint)


@cli.command()
@click.argument("answer", type=click.Path(path_type=Path), required=False)
@click.option("--root-fingerprint", help="The consortium's root, as told over another channel.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Also (or only) install this signed manifest.")
@also_config
@click.pass_obj
def join(
    config_path: Path,
    own_config: Path | None,
    answer: Path | None,
    root_fingerprint: str | None,
    manifest: Path | None,
) -> None:
    """Install the consortium's ANSWER and its manifest."""
    identity, now = Identity(folder=SiteConfig.read(own_config or config_path).identity), SystemClock().now_ms()
    told = enrolment.join(identity, answer=answer, root_fingerprint=root_fingerprint, manifest=manifest, now_ms=now)
    for line in told:
        say(line)


@cli.command()
@also_config
@json_option
@click.pass_obj
def check(config_path: Path, own_config: Path | None, as_json: bool) -> None:
    """Look at configuration, keys, manifest, initial model, data and policy; start and send nothing."""
    from site_agent.preflight import look

    lines = look(own_config or config_path)
    if as_json:
        emit({"checks": [line.to_json() for line in lines]})
    else:
        for line in lines:
            click.echo(f"{line.verdict:8} {line.what}" + (f"  -> {line.hint}" if line.hint else ""))
    if any(line.verdict == "problem" for line in lines):
        sys.exit(1)


@cli.command()
@also_config
@json_option
@click.pass_obj
def status(config_path: Path, own_config: Path | None, as_json: bool) -> None:
    """What this site has done so far, from its state directory; the agent may be running."""
    from site_agent.overview import overview

    told = overview(SiteConfig.read(own_config or config_path))
    if as_json:
        emit(told)
        return
    click.echo(f"site {told['site']}, run {told['run']}: round {told['round']} accepted, model {told['model'][:16]}")
    if told["stopped"]:
        click.echo(f"stopped for its operator: {told['stopped']}")
    for row in told["metrics"]:
        figures = row.get("test") or row.get("validation") or {}
        click.echo(f"  round {row['round']:>4}  balanced accuracy {figures.get('bacc')}")


@cli.command()
@click.option("--model", type=click.Choice(["newest", "best"]), default="newest", show_default=True)
@also_config
@json_option
@click.pass_obj
def evaluate(config_path: Path, own_config: Path | None, model: str, as_json: bool) -> None:
    """Evaluate this site's model on its own test images. Nothing leaves."""
    from site_agent.evaluation import evaluate_site

    told = evaluate_site(SiteConfig.read(own_config or config_path), model=model)
    if as_json:
        emit(told)
        return
    for side in ("validation", "test"):
        if side in told:
            figures = told[side]
            click.echo(f"{side:<10} bacc {figures['bacc']}  bauc {figures['bauc']}  ({figures['images']} images)")


def main() -> None:
    run_command(cli, "site-agent")


if __name__ == "__main__":
    main()
