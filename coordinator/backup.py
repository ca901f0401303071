"""`coordinator backup`, `restore`, `recover` and `state`: copies of a coordinator that offer no attempt a second time.

A *backup* has neither keys nor the database: what `restore` makes of it is a coordinator under another name, which
takes the run up from what a site hands over (`coordinator recover`). A *move* has everything and ends this folder. The
commands of a site (site_agent/backup.py) are of the same kind; what both share is in
security/identity/member_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import click

from coordinator import database
from coordinator.cli import with_config
from coordinator.commands import open_for_people
from coordinator.config import CoordinatorConfig
from coordinator.storage import Storage
from lazaret import archive, control, software
from lazaret.archive import ArchiveContents
from lazaret.control import BACKUP, EVERYTHING, MOVE, NEITHER, CopyTable
from lazaret.errors import ConfigError
from lazaret.terminal import emit, say
from security.clock import Clock, SystemClock
from security.identity import member_copies
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentRequest
from security.identity.member_copies import RestoreOptions, restore_options
from security.identity.membership import aggregation_policy
from security.identity.pki import Role
from security.identity.tls_probe import names_of
from security.log.events import OperatorAction
from security.secagg.handover import Handover

# What is not listed is in a move only.
STATE: Final = {
    "queue": (BACKUP, "runs that wait"),
    "initial": (BACKUP, "the initial model of a run that was queued"),
    "log": (BACKUP, "the privacy log; restored for reading only"),
    database.FILE: (MOVE, "rounds and results: an older copy would offer attempts again"),
    "spool": (MOVE, "masked vectors and sums"),
    "models": (MOVE, "models of the newest rounds; `coordinator export` writes one"),
    "runs": (MOVE, "files of finished runs; `coordinator runs --archive` packs one"),
    control.SET_BACK: (MOVE, "that others have seen a later state of this coordinator"),
    "now.json": (NEITHER, "what the service says of itself"),
    ".lock": (NEITHER, "the lock of the service"),
    f"{database.FILE}-shm": (NEITHER, "shared memory of the database"),
    archive.MOVED: (NEITHER, "that this coordinator has moved to another machine"),
}
IDENTITY: Final = {
    "root.pem": (BACKUP, "the consortium's root"),
    "manifest.json": (BACKUP, "the manifest in force"),
    "keys": (MOVE, "private keys"),
}


def _places(config: CoordinatorConfig, base: Path) -> dict[str, tuple[Path, CopyTable]]:
    return {"identity": (base / config.identity, IDENTITY), "state": (base / config.state, STATE)}


def _sources(path: Path, kinds: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    config, base = CoordinatorConfig.read(path)
    yield "coordinator.toml", path
    if (model := base / config.initial_model).exists():
        yield "initial.safetensors", model
    yield from control.copied_files(_places(config, base), kinds)


def back_up(path: Path, target: Path, *, now_ms: int) -> ArchiveContents:
    """A copy without keys; the service may be running."""
    config, base = CoordinatorConfig.read(path)
    archive.refuse_moved(base / config.state)
    return archive.write(target, _sources(path, (BACKUP,)), kind="backup", **_statement(base / config.identity, now_ms))


def move_away(path: Path, target: Path, *, now_ms: int) -> ArchiveContents:
    """The coordinator itself; the service must not run. Afterwards nothing can act here."""
    config, base = CoordinatorConfig.read(path)
    state, identity = base / config.state, base / config.identity
    with ExitStack() as held:
        if not (state / archive.MOVED).exists():
            storage = Storage(state)  # with its lock
            held.callback(storage.close)
            storage.settle()
            if (state / "log" / "FORMAT").exists():
                log = held.enter_context(closing(open_for_people(path)))  # until all is packed
                action = OperatorAction(command="backup --move: to another machine", role="operator")
                log.append(action, actor=software.account())
                log.checkpoint()
        return archive.move(
            state,
            target,
            lambda: _sources(path, EVERYTHING),
            control.keys_in(identity),
            lambda: _statement(identity, now_ms),
        )


def _statement(folder: Path, now_ms: int) -> dict[str, Any]:
    identity = Identity(folder=folder)
    return member_copies.statement_of(identity, now_ms, hosts=list(names_of(identity.tls_certificate())))


def restore_coordinator(
    source: Path, folder: Path, options: RestoreOptions
) -> tuple[ArchiveContents, EnrolmentRequest | None]:
    """Make a coordinator's folder of an archive: all of it, or none.

    :returns: what the archive said, and the request for the new member's certificates.
    """
    with member_copies.unpacked(source, folder, Role.COORDINATOR, options) as (staging, contents):
        control.place_here(staging / "coordinator.toml")
        config, base = CoordinatorConfig.read(staging / "coordinator.toml")
        control.check_places({"identity": base / config.identity, "state": base / config.state}, staging)
        if contents.kind == "move":
            return contents, None
        hosts = tuple(contents.about["hosts"])
        return contents, member_copies.new_member(staging, contents, Role.COORDINATOR, options, hosts=hosts)


# A coordinator whose disk is lost.


def take_up(
    config_path: Path, file: Path, *, completed: int | None = None, clock: Clock | None = None
) -> dict[str, Any]:
    """Put a handover into the state folder, which must not have a result yet. docs/operators.md, "Losing the
    coordinator".

    The newest covered result becomes the only link of the chain: sites that have it continue from there, and sites that
    are behind get it as a whole state. Strikes and exclusions, and the sums of older rounds, are gone.

    :param completed: how many models the run has published, if the file's count is wrong.
    """
    from coordinator.assembly import read_manifest  # here: the other commands of this file need no assembly

    clock = clock or SystemClock()
    config, base = CoordinatorConfig.read(config_path)
    manifest = read_manifest(Identity(folder=base / config.identity), clock)
    found = Handover.read(file, aggregation_policy(manifest, now_ms=clock.now_ms()))
    done = found.completed if completed is None else completed
    if not 0 < done <= found.round:
        raise ConfigError(f"round {found.round} cannot be the model number {done}", where="--completed")
    storage = Storage(base / config.state, keep_models=config.storage.keep_models)
    try:
        if storage.history.links():
            raise ConfigError(
                "this coordinator has results of its own", where=str(storage.folder), hint="recover is for a lost state"
            )
        storage.belongs_to(manifest.federation, manifest.run)
        storage.recover(found, completed=done, now_ms=clock.now_ms())
    finally:
        storage.close()
    state_hash = found.covered.result.state_hash.hex()
    return {"run": manifest.run, "round": found.round, "completed": done, "state_hash": state_hash}


# The commands.


@click.command()
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--move", is_flag=True, help="Copy everything, with keys; then nothing can start from this folder.")
@with_config
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def backup(config_path: Path, target: Path, move: bool, as_json: bool) -> None:
    """Write a copy of this coordinator to TARGET: a backup without keys, also while it runs; or all of it (--move)."""
    now = SystemClock().now_ms()
    contents = move_away(config_path, target, now_ms=now) if move else back_up(config_path, target, now_ms=now)
    control.say_copied(contents, target, program="coordinator", as_json=as_json)


@click.command()
@restore_options
def restore(source: Path, folder: Path, as_json: bool, **options: str | None) -> None:
    """Restore the copy SOURCE into FOLDER: a coordinator that has moved, or a new one in the place of a lost one."""
    contents, request = restore_coordinator(source, folder, RestoreOptions(**options))
    moved = f"delete {source} and its copies, and start it under the same host name"
    enrolled = "`coordinator join`;\nthen `coordinator recover` takes the run up, with a file of `site-agent handover`"
    member_copies.say_restored(contents, folder, request, as_json=as_json, moved=moved, enrolled=enrolled)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@with_config
@click.option("--completed", type=click.IntRange(1), help="Models published so far, if not what the file says.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def recover(file: Path, config_path: Path, completed: int | None, as_json: bool) -> None:
    """Continue a run after the state folder was lost, from a FILE that a site wrote with `site-agent handover`."""
    found = take_up(config_path, file, completed=completed)
    if as_json:
        emit(found)
        return
    say(f"run {found['run']} continues after round {found['round']}, with {found['completed']} models published")


def _rows(config_path: Path) -> Iterator[dict[str, Any]]:
    yield from control.file_rows(_places(*CoordinatorConfig.read(config_path)))


state = control.state_command(_rows, with_config, "this coordinator")
