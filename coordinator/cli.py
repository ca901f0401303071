"""The command `coordinator`: runs the service; init, join, check, status and export around it."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from coordinator.config import TEMPLATE, CoordinatorConfig
from security.clock import SystemClock
from security.consortium import enrolment
from security.consortium.enrolment import Identity
from security.errors import ConfigError
from security.pki import Role, Subject
from security.terminal import emit, run_command, say

DEFAULT_CONFIG = Path("coordinator.toml")


def _or_the_groups(context: click.Context, _: click.Parameter, value: Path | None) -> Path:
    """`--config` may stand before or after the name of a subcommand."""
    return value or context.obj or DEFAULT_CONFIG


_CONFIG = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    callback=_or_the_groups,
    help=f"Default: {DEFAULT_CONFIG}.",
)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {"time": self.formatTime(record), "level": record.levelname.lower(), "message": record.getMessage()}
        return json.dumps(told)


def _log_to_stderr(json_lines: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines() if json_lines else plain)
    logging.getLogger("coordinator").setLevel(logging.INFO)
    logging.getLogger("coordinator").handlers = [handler]


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@_CONFIG
@click.pass_context
def cli(context: click.Context, config_path: Path) -> None:
    """Run a coordinator, until it is told to stop (SIGTERM or Ctrl-C)."""
    context.obj = config_path
    if context.invoked_subcommand is None:
        run(config_path)


def run(config_path: Path) -> None:
    """Assemble and serve."""
    from coordinator.service import run_until_stopped

    config, base = CoordinatorConfig.read(config_path)
    _log_to_stderr(config.logging.json_lines)
    run_until_stopped(config, base)


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("."))
@click.option("--federation", required=True, help="Name of the federation, as the consortium calls it.")
@click.option("--name", required=True, help="Name of this coordinator in the roster.")
@click.option("--host", "hosts", multiple=True, required=True, help="Name or address that sites dial; may be repeated.")
@click.option("--listen", default="0.0.0.0:7443", show_default=True, help="Address and port to listen on.")
def init(folder: Path, federation: str, name: str, hosts: tuple[str, ...], listen: str) -> None:
    """Make keys, a request for the consortium and a commented coordinator.toml in FOLDER."""
    config = folder / "coordinator.toml"
    if config.exists():
        raise ConfigError("configuration is here already", where=str(config), hint="choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity(folder=folder / "identity")
    subject = Subject(federation=federation, role=Role.COORDINATOR, member=name)
    request = identity.create(subject, hosts=hosts)
    config.write_text(
        TEMPLATE.format(identity="identity", state="state", listen=listen, initial="initial.safetensors"), "utf-8"
    )
    say(f"keys and request are in {identity.folder}; configuration in {config}")
    say(f"give {identity.request_path} to the consortium and read them this fingerprint: {request.fingerprint}")


@cli.command()
@click.argument("answer", type=click.Path(path_type=Path), required=False)
@click.option("--root-fingerprint", help="The consortium's root, as told over another channel.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Also (or only) install this signed manifest.")
@_CONFIG
def join(answer: Path | None, root_fingerprint: str | None, manifest: Path | None, config_path: Path) -> None:
    """Install the consortium's ANSWER and its manifest."""
    config, base = CoordinatorConfig.read(config_path)
    identity, now = Identity(folder=base / config.identity), SystemClock().now_ms()
    told = enrolment.join(identity, answer=answer, root_fingerprint=root_fingerprint, manifest=manifest, now_ms=now)
    for line in told:
        say(line)


@cli.command()
@_CONFIG
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def check(config_path: Path, as_json: bool) -> None:
    """Look at configuration, certificates, manifest and initial model without starting anything."""
    from coordinator.preflight import look

    lines = look(config_path)
    if as_json:
        emit({"checks": [line._asdict() for line in lines]})
    else:
        for line in lines:
            click.echo(f"{line.verdict:8} {line.what}" + (f"  -> {line.hint}" if line.hint else ""))
    if any(line.verdict == "problem" for line in lines):
        sys.exit(1)


@cli.command()
@_CONFIG
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def status(config_path: Path, as_json: bool) -> None:
    """Rounds so far, from the database of a coordinator that is running or stopped."""
    from coordinator.overview import overview

    told = overview(config_path)
    if as_json:
        emit(told)
        return
    click.echo(f"run {told['run']}: {told['completed']} of {told['rounds_planned']} rounds completed")
    for row in told["rounds"]:
        click.echo(f"  round {row['number']:>4}  {row['outcome'] or 'open'}")


@cli.command()
@click.argument("target", type=click.Path(path_type=Path))
@_CONFIG
@click.option("--round", "number", type=int, help="After this round; the newest if not given.")
def export(target: Path, config_path: Path, number: int | None) -> None:
    """Write the global model as safetensors, tensor by tensor, to TARGET."""
    from coordinator.overview import export_model

    told = export_model(config_path, target, number)
    say(f"model after round {told['round']} written to {target} (state {told['state_hash'][:16]}...)")


def main() -> Any:
    """Entry of the console script."""
    run_command(cli, "coordinator")
