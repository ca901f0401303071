"""The commands of `coordinator` beside the service itself: init, join, renew, check, status, export and others."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Final

import click

from coordinator.cli import with_config
from coordinator.config import CHECK_NAMES, HIGHEST_PORT, TEMPLATE, CoordinatorConfig
from coordinator.run_queue import RunQueue, StopFile
from lazaret import archive, files
from lazaret.checks import report, skip_option
from lazaret.control import NowFile, pause_commands, running_option, runs_command, say_running
from lazaret.errors import ConfigError
from lazaret.terminal import ask, emit, say
from security.clock import SystemClock
from security.identity import enrolment
from security.identity.acceptance import unseal
from security.identity.enrolment import Identity, ml_dsa_option
from security.identity.enrolment_files import compared_root, kit_in, read_file
from security.identity.manifest import Manifest
from security.identity.pki import Role, Subject, phrase
from security.identity.token import named_token, token_option
from security.log.log_commands import log_commands
from security.log.opening import continue_own_log
from security.log.roster import audit_roster
from security.log.writer import AuditLog
from security.rng import SystemRandomness

# `log-export`, `log-note`, `log-erase`, `log-archive`: what people do with the privacy log. The log records it.


def open_for_people(config_path: Path) -> AuditLog:
    """This coordinator's log, if no coordinator holds it."""
    from coordinator.assembly import read_manifest

    config, base = CoordinatorConfig.read(config_path)
    archive.refuse_moved(base / config.state)
    clock, identity = SystemClock(), Identity(folder=base / config.identity)
    manifest = read_manifest(identity, clock)
    folder, member = base / config.state / "log", manifest.coordinator.id
    roster = audit_roster(manifest)
    return continue_own_log(folder, identity, member, roster=roster, clock=clock, rng=SystemRandomness())


log_export, log_note, log_erase, log_archive = log_commands(open_for_people, with_config)


def state_folder(config_path: Path) -> Path:
    config, base = CoordinatorConfig.read(config_path)
    return base / config.state


pause, resume = pause_commands(state_folder, with_config, "the run")
runs = runs_command(state_folder, with_config)


# `queue` and `end-run`: what comes after the run in force, and when.


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path), required=False)
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("--remove", metavar="RUN", help="Take this run out of the queue.")
@with_config
def queue(config_path: Path, manifest: Path | None, model: Path | None, remove: str | None) -> None:
    """Queue the run of a signed MANIFEST with its initial MODEL. It begins when the run in force is over; no restart is
    needed. Without arguments, list the queue."""
    config, base = CoordinatorConfig.read(config_path)
    waiting = RunQueue(base / config.state)
    if remove is not None:
        waiting.remove(remove)
        say(f"run {remove} is removed")
    elif manifest is not None and model is not None:
        identity = Identity(folder=base / config.identity)
        queued = waiting.add(manifest, model, identity, now_ms=SystemClock().now_ms())
        say(f"run {queued.run} (manifest version {queued.version}) begins when the run in force is over")
    elif manifest is not None:
        raise click.UsageError("a run is a manifest and its initial model")
    else:
        for one in waiting.runs():
            click.echo(f"{one.manifest.run:<32} manifest version {one.manifest.version}")


@click.command("end-run")
@click.argument("run")
@click.option("--reason", required=True, help="Why; shown in status and log.")
@with_config
def end_run(config_path: Path, run: str, reason: str) -> None:
    """End RUN, the run in force, before its last round. This cannot be undone. The newest model stays, the sites get a
    message that the coordinator has signed, and the next queued run begins."""
    config, base = CoordinatorConfig.read(config_path)
    manifest = Identity(folder=base / config.identity).manifest(now_ms=SystemClock().now_ms())
    if manifest is None or manifest.run != run:
        there = "none" if manifest is None else manifest.run
        raise ConfigError(f"run {run} is not in force", where=str(config_path), hint=f"in force: {there}")
    StopFile(base / config.state).set(run, reason)
    say(f"run {run} ends: no round begins any more")


# `renew`: new keys. The old ones stay in force until the answer of the consortium is installed.


@click.command()
@with_config
@click.option("--host", "hosts", multiple=True, help="Name or address that sites connect to; if not given, unchanged.")
@token_option
@ml_dsa_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def renew(config_path: Path, hosts: tuple[str, ...], place: str | None, ml_dsa: bool, as_json: bool) -> None:
    """Make new TLS and signing keys and a request for the consortium, signed with the key it replaces."""
    config, base = CoordinatorConfig.read(config_path)
    identity = Identity(folder=base / config.identity)
    request = enrolment.renew(identity, Role.COORDINATOR, hosts=hosts, place=named_token(place), ml_dsa=ml_dsa)
    if as_json:
        emit({"request": str(identity.request_path), "fingerprint": request.fingerprint})
        return
    say(f"new keys and their request are in {identity.folder}; the old ones stay valid until the answer is installed")
    say(f"send {identity.request_path} to the consortium (`consortium renew {request.member} --request request.json`),")
    say(f"then `coordinator join {request.member}.json --manifest manifest.json` and restart")


# `init` and `check`.

LISTEN: Final = "0.0.0.0:7443"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("."))
@click.option("--federation", help="Name of the federation, as the consortium calls it.")
@click.option("--name", help="Name of this coordinator in the roster.")
@click.option("--host", "hosts", multiple=True, help="Name or address that sites connect to; may be repeated.")
@click.option("--listen", help=f"Address and port to listen on; {LISTEN} if left out.")
@token_option
@ml_dsa_option
def init(
    folder: Path,
    federation: str | None,
    name: str | None,
    hosts: tuple[str, ...],
    listen: str | None,
    place: str | None,
    ml_dsa: bool,
) -> None:
    """Make keys, a request for the consortium and a commented coordinator.toml in FOLDER; asks for what is missing."""
    config = folder / "coordinator.toml"
    if config.exists():
        raise ConfigError("there is already a configuration", where=str(config), hint="choose another folder")
    subject = Subject(
        federation=ask(federation, "--federation", "Name of the federation, as the consortium calls it"),
        role=Role.COORDINATOR,
        member=ask(name, "--name", "Name of this coordinator in the roster"),
    )
    dialled = hosts or _listed(ask(None, "--host", f"Names and addresses for sites, such as {socket.getfqdn()}"))
    address = ask(listen, "--listen", "Address and port to listen on", default=LISTEN)
    if not re.fullmatch(r"\S+:[0-9]{1,5}", address) or int(address.rpartition(":")[2]) > HIGHEST_PORT:
        raise ConfigError("is not of the form host:port", where="--listen", hint=f"for example {LISTEN}")
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity(folder=folder / "identity")
    request = identity.create(subject, hosts=dialled, place=named_token(place), ml_dsa=ml_dsa)
    text = TEMPLATE.format(identity="identity", state="state", listen=address, initial="initial.safetensors")
    config.write_text(text, "utf-8")
    say(f"keys and request are in {identity.folder}; configuration in {config}")
    say(f"send {identity.request_path} to the consortium, and read these words (or digits) out to them")
    say(phrase(request.fingerprint))
    say(request.fingerprint)


def _listed(answer: str) -> tuple[str, ...]:
    return tuple(filter(None, re.split(r"[\s,]+", answer)))


@click.command()
@skip_option(CHECK_NAMES)
@with_config
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def check(skipped: tuple[str, ...], config_path: Path, as_json: bool) -> None:
    """Check everything that a start needs, and say what to do. Starts nothing."""
    config, base = CoordinatorConfig.read(config_path)
    archive.refuse_moved(base / config.state)
    from coordinator.checks import look

    sys.exit(report(look(config_path, skip=skipped), as_json=as_json))


@click.command()
@click.argument("answer", metavar="[KIT|ANSWER]", type=click.Path(path_type=Path), required=False)
@click.option("--root-fingerprint", help="Fingerprint of the consortium's root, received over another channel.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Also (or only) install this signed manifest.")
@click.option("--unchecked", is_flag=True, help="Also while the newest sum is not checked: the run may then stall.")
@with_config
def join(
    answer: Path | None, root_fingerprint: str | None, manifest: Path | None, unchecked: bool, config_path: Path
) -> None:
    """Install what the consortium has sent: a kit, or its ANSWER and its manifest."""
    config, base = CoordinatorConfig.read(config_path)
    identity, now = Identity(folder=base / config.identity), SystemClock().now_ms()
    kit = kit_in(answer)
    offered = kit.manifest if kit else read_file(manifest) if manifest else None
    known = identity.manifest_path.read_bytes() if identity.manifest_path.exists() else None
    if offered not in (None, known) and not unchecked:
        _refuse_unchecked(base / config.state, now)
    if kit:
        root = compared_root(kit, identity, root_fingerprint)
        lines = kit.install(identity, base / config.initial_model, root_fingerprint=root, now_ms=now)
    else:
        lines = enrolment.join(
            identity, answer=answer, root_fingerprint=root_fingerprint, manifest=manifest, now_ms=now
        )
    for line in lines:
        say(line)
    if offered is not None and unchecked and (base / config.state).is_dir():
        _accept_unchecked(base / config.state, unseal(offered, str(manifest or answer))[0])


def _accept_unchecked(state: Path, manifest: Manifest) -> None:
    """The next start finds that the operator knows of it."""
    from coordinator.assembly import ACCEPTED_UNCHECKED

    files.write_atomically(state / ACCEPTED_UNCHECKED, manifest.digest.hex().encode(), mode=0o600)


def _refuse_unchecked(state: Path, now_ms: int) -> None:
    """A sum belongs to the manifest it was made under: a site that has not received it cannot take it under another
    one, and without their checks no further round begins. A coordinator that runs has it checked before it stops; if
    it is killed instead, its next start refuses (`assembly.refuse_unchecked_sum`).
    """
    from coordinator.database import FILE
    from coordinator.round_history import ReadOnlyHistory

    if not (state / FILE).exists() or NowFile(state).read(now_ms=now_ms)["running"]:
        return
    with ReadOnlyHistory(state / FILE) as history:
        found = history.unchecked_sum()
    if found is not None:
        raise ConfigError(
            f"the sum of round {found.round} is not checked yet; under another manifest it may never be",
            where=str(state),
            hint="start the coordinator and stop it when the sum is checked (`coordinator status`); or --unchecked",
        )


@click.command()
@running_option
@with_config
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def status(config_path: Path, as_json: bool, running: bool) -> None:
    """Show the rounds so far, from the database of a coordinator that is running or stopped."""
    if running:
        config, base = CoordinatorConfig.read(config_path)
        say_running(base / config.state, now_ms=SystemClock().now_ms())
    from coordinator.status import lines, overview

    found = overview(config_path)
    if as_json:
        emit(found)
        return
    for line in lines(found, SystemClock().now_ms()):
        click.echo(line)


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@with_config
@click.option("--round", "number", type=int, help="The model after this round; the newest if not given.")
@click.option("--best", is_flag=True, help="The model of the best round by the hospitals' scores.")
@click.option("--onnx", is_flag=True, help="Also write an ONNX file, and check it: extra [export].")
@click.option("--format", "form", type=click.Choice(["files", "monai-bundle"]), default="files", show_default=True,
              help="monai-bundle: TARGET is a new folder, with the network as ONNX.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def export(
    target: Path, config_path: Path, number: int | None, best: bool, onnx: bool, form: str, as_json: bool
) -> None:
    """Write the global model as safetensors, tensor by tensor, to TARGET, and its description beside it."""
    from coordinator.export import export_model

    if best and number is not None:
        raise ConfigError("--best and --round exclude each other", where="command line")
    bundle = form == "monai-bundle"
    written = export_model(config_path, target, number, best=best, onnx=onnx, bundle=bundle)
    if as_json:
        emit(written)
        return
    say(f"model after round {written['round']} written to {target} (state {written['state_hash'][:16]}...)")
    if onnx or bundle:
        found = written["checked"]["onnx"]
        say(f"ONNX Runtime and torch agree within {found['absolute_difference']:.1e} on {found['images']} drawn images")
