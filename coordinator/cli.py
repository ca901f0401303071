"""The command `coordinator`: runs the service; init, join, check, status and export around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from coordinator.config import CoordinatorConfig
from coordinator.log_commands import log_commands
from coordinator.options import config_option
from coordinator.renewal import renew
from coordinator.setup_commands import check, init
from security.clock import SystemClock
from security.consortium import enrolment
from security.consortium.enrolment import Identity
from security.terminal import emit, log_option, log_to_stderr, run_command, say


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@config_option
@log_option
@click.pass_context
def cli(context: click.Context, config_path: Path, log_format: str | None) -> None:
    """Run a coordinator, until it is told to stop (SIGTERM or Ctrl-C)."""
    context.obj = config_path
    if log_format is not None:
        # Before anything is read: an error in the configuration itself is told in the same form.
        log_to_stderr("coordinator", log_format, json_lines=False)
    if context.invoked_subcommand is None:
        run(config_path, log_format=log_format)


def run(config_path: Path, *, log_format: str | None = None) -> None:
    """Assemble and serve.

    :param log_format: `text` or `json`; the configuration's if not given.
    """
    from coordinator.service import run_until_stopped

    config, base = CoordinatorConfig.read(config_path)
    log_to_stderr("coordinator", log_format, json_lines=config.logging.json_lines)
    run_until_stopped(config, base)


@cli.command()
@click.argument("answer", type=click.Path(path_type=Path), required=False)
@click.option("--root-fingerprint", help="The consortium's root, as told over another channel.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Also (or only) install this signed manifest.")
@config_option
def join(answer: Path | None, root_fingerprint: str | None, manifest: Path | None, config_path: Path) -> None:
    """Install the consortium's ANSWER and its manifest."""
    config, base = CoordinatorConfig.read(config_path)
    identity, now = Identity(folder=base / config.identity), SystemClock().now_ms()
    told = enrolment.join(identity, answer=answer, root_fingerprint=root_fingerprint, manifest=manifest, now_ms=now)
    for line in told:
        say(line)


@cli.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def status(config_path: Path, as_json: bool) -> None:
    """Rounds so far, from the database of a coordinator that is running or stopped."""
    from coordinator.overview import overview, standstill

    told = overview(config_path)
    if as_json:
        emit(told)
        return
    click.echo(f"run {told['run']}: {told['completed']} of {told['rounds_planned']} rounds completed")
    line = standstill(told, SystemClock().now_ms())
    if line is not None:
        click.echo(line)
    for row in told["rounds"]:
        click.echo(f"  round {row['number']:>4}  {row['outcome'] or 'open'}")


@cli.command()
@click.argument("target", type=click.Path(path_type=Path))
@config_option
@click.option("--round", "number", type=int, help="After this round; the newest if not given.")
@click.option("--onnx", is_flag=True, help="Also write ONNX beside it, and check it: extra [export].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def export(target: Path, config_path: Path, number: int | None, onnx: bool, as_json: bool) -> None:
    """Write the global model as safetensors, tensor by tensor, to TARGET, and its description beside it."""
    from coordinator.export import export_model

    told = export_model(config_path, target, number, onnx=onnx)
    if as_json:
        emit(told)
        return
    say(f"model after round {told['round']} written to {target} (state {told['state_hash'][:16]}...)")
    if onnx:
        found = told["checked"]["onnx"]
        say(f"ONNX Runtime and torch agree within {found['relative_difference']:.1e} on {found['images']} drawn images")


for command in (init, renew, check, *log_commands):
    cli.add_command(command)


def main() -> Any:
    """Entry of the console script."""
    run_command(cli, "coordinator")
