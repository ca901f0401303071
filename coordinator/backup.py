"""`coordinator backup`, `restore` and `state`: copies of a coordinator that offer no attempt a second time.

A *backup* has neither keys nor the database: what `restore` makes of it is a coordinator under another name, which
takes the run up from what a site hands over (`coordinator recover`). A *move* has everything and ends this folder. The
commands of a site (site_agent/backup.py) are of the same kind.
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
from lazaret import archive, copies, software
from lazaret.archive import ArchiveContents
from lazaret.copies import BACKUP, EVERYTHING, MOVE, NEITHER, CopyTable
from lazaret.errors import ConfigError
from lazaret.terminal import emit, say
from security.clock import SystemClock
from security.identity.enrolment import Identity
from security.identity.fingerprints import phrase
from security.identity.pki import Role, Subject, subject_of
from security.identity.tls_probe import names_of
from security.log.events import OperatorAction

# What is not listed is in a move only.
STATE: Final = {
    "queue": (BACKUP, "runs that wait"),
    "initial": (BACKUP, "the initial model of a run that was queued"),
    "log": (BACKUP, "the privacy log; restored for reading only"),
    database.FILE: (MOVE, "rounds and results: an older copy would offer attempts again"),
    "spool": (MOVE, "masked vectors and sums"),
    "models": (MOVE, "models of the newest rounds; `coordinator export` writes one"),
    "runs": (MOVE, "files of finished runs; `coordinator runs --archive` packs one"),
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
    yield from copies.sources(_places(config, base), kinds)


def back_up(path: Path, target: Path, *, now_ms: int) -> ArchiveContents:
    """A copy without keys; the service may be running."""
    config, base = CoordinatorConfig.read(path)
    archive.refuse_moved(base / config.state)
    return archive.write(target, _sources(path, (BACKUP,)), kind="backup", **_told(base / config.identity, now_ms))


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
                with closing(open_for_people(path)) as log:
                    action = OperatorAction(command="backup --move: to another machine", role="operator")
                    log.append(action, actor=software.account())
                    log.checkpoint()
        return archive.move(
            state,
            target,
            lambda: _sources(path, EVERYTHING),
            copies.keys_in(identity),
            lambda: _told(identity, now_ms),
        )


def _told(folder: Path, now_ms: int) -> dict[str, Any]:
    identity = Identity(folder=folder)
    certificate = identity.tls_certificate()
    subject = subject_of(certificate, str(identity.tls_path))
    about = {"federation": subject.federation, "member": subject.member, "hosts": list(names_of(certificate))}
    return {"party": f"coordinator {subject.member}", "made_ms": now_ms, "about": about}


def restore_coordinator(source: Path, folder: Path, *, name: str | None) -> tuple[ArchiveContents, str | None]:
    """Make a coordinator's folder of an archive: all of it, or none.

    :param name: of the new member, for a backup; a move keeps its own.
    :returns: what the archive said, and the fingerprint of the request for the new member's certificates.
    """
    with archive.unpacked(source, folder) as (staging, contents):
        copies.place_here(staging / "coordinator.toml")
        config, base = CoordinatorConfig.read(staging / "coordinator.toml")
        copies.check_places({"identity": base / config.identity, "state": base / config.state}, staging)
        if contents.kind == "move":
            return contents, None
        member = str(contents.about["member"])
        if name is None or name == member:
            raise ConfigError(
                f"a backup of {member} needs another name",
                where="--name",
                hint=f"sites hold more of the old name's log than this copy has; take one such as {member}-2",
            )
        subject = Subject(federation=str(contents.about["federation"]), role=Role.COORDINATOR, member=name)
        request = Identity(folder=staging / "identity").create(subject, hosts=tuple(contents.about["hosts"]))
        earlier = staging / "state" / "earlier" / member
        earlier.mkdir(mode=0o700, parents=True)
        if (log := staging / "state" / "log").exists():
            log.rename(earlier / "log")
        return contents, request.fingerprint


@click.command()
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--move", is_flag=True, help="With keys and all; this folder can do nothing afterwards.")
@with_config
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def backup(config_path: Path, target: Path, move: bool, as_json: bool) -> None:
    """Write a copy of this coordinator to TARGET: without keys, while it may run; or, with --move, all of it."""
    now = SystemClock().now_ms()
    contents = move_away(config_path, target, now_ms=now) if move else back_up(config_path, target, now_ms=now)
    copies.say_copied(contents, target, program="coordinator", as_json=as_json)


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", help="The new member's name, for a backup: the old one is never used again.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def restore(source: Path, folder: Path, name: str | None, as_json: bool) -> None:
    """Make FOLDER of the copy SOURCE: a coordinator that has moved, or a new one in the place of a lost one."""
    contents, fingerprint = restore_coordinator(source, folder, name=name)
    if as_json:
        emit({"folder": str(folder), "kind": contents.kind, "name": name, "fingerprint": fingerprint})
        return
    say(f"{contents.party} is in {folder}, as it was at its `{'backup --move' if fingerprint is None else 'backup'}`")
    if fingerprint is None:
        say(f"delete {source} and its copies, and start it under the same host name")
        return
    say(f"send {folder}/identity/request.json to the consortium, and read these words (or digits) out to them;")
    say(f"they revoke {contents.about['member']}, enrol {name} and send a kit for `coordinator join`;")
    say("then `coordinator recover FILE`, with a file from `site-agent handover`, takes the run up")
    say(phrase(fingerprint))
    click.echo(fingerprint)


def _rows(config_path: Path) -> Iterator[dict[str, Any]]:
    yield from copies.rows(_places(*CoordinatorConfig.read(config_path)))


state = copies.state_command(_rows, with_config, "this coordinator")
