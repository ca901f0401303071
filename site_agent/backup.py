"""`site-agent backup`, `restore` and `state`: copies of a site that cannot lead to a mask that is used twice.

A site that has forgotten what it signed could answer one question in two ways, and two answers can reveal its masks.
So there are two kinds of copies; the tables below say which file is in which:

- A *backup* has no private key and no record of the protocol. Nobody can act as this site with it. What `restore` makes
  of it is a new member under another name, with keys of its own, which keeps what the hospital has learnt.
- A *move* has everything, and ends this folder: it is marked, its keys are erased, and so there is one site, not two.

A privacy ledger is in no backup: an older one would give back what was spent. A backup tells how far the ledger was.
Where `restore` finds no ledger, it leaves an anchor without one, and the budget counts as spent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import click

from lazaret import archive, copies, software
from lazaret.archive import ArchiveContents
from lazaret.copies import BACKUP, EVERYTHING, MOVE, NEITHER, CopyTable
from lazaret.errors import ConfigError, LedgerError
from lazaret.terminal import emit, say
from security.clock import SystemClock
from security.dp.ledger import LedgerAnchor
from security.identity.enrolment import Identity
from security.identity.fingerprints import phrase
from security.identity.pki import Role, Subject, subject_of
from security.log.events import OperatorAction
from site_agent.config import SiteConfig
from site_agent.options import json_option, with_config
from site_agent.privacy import ledger_files
from site_agent.state_commands import open_for_people
from site_agent.state_writer import WriteAheadLog

# What is not listed is in a move only.
STATE: Final = {
    "run": (BACKUP, "the run that these files belong to"),
    "rounds": (BACKUP, "how many rounds this site has trained"),
    "memory": (BACKUP, "personal head, prototypes and optimiser"),
    "models": (BACKUP, "the best personal model"),
    "metrics.jsonl": (BACKUP, "local evaluation"),
    "sides": (BACKUP, "which patients train"),
    "data.json": (BACKUP, "how many images of each class are here"),
    "initial": (BACKUP, "the initial model that came by wire"),
    "evidence": (BACKUP, "proof of lies of the coordinator"),
    "log": (BACKUP, "the privacy log; restored for reading only"),
    "runs": (MOVE, "files of finished runs; `site-agent runs --archive` packs one"),
    "wal": (MOVE, "what this site has signed: an older copy could sign something else"),
    "connections": (MOVE, "how often this site has connected: an older copy is refused"),
    "pending": (MOVE, "the sealed update of the round"),
    "states": (MOVE, "global models; the coordinator sends them again"),
    "covered": (MOVE, "the newest verified result"),
    "now.json": (NEITHER, "what the agent says of itself"),
    archive.MOVED: (NEITHER, "that this site has moved to another machine"),
}
_LEDGER, _ANCHOR = "moved-ledger", "moved-ledger-anchor"  # names that no folder of a site has
IDENTITY: Final = {
    "root.pem": (BACKUP, "the consortium's root"),
    "manifest.json": (BACKUP, "the manifest in force"),
    "keys": (MOVE, "private keys"),
}


def _places(config: SiteConfig) -> dict[str, tuple[Path, CopyTable]]:
    return {"identity": (config.identity, IDENTITY), "state": (config.state, STATE)}


def _sources(config: SiteConfig, kinds: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    yield "site.toml", config.path
    if config.initial_model.exists():
        yield "initial.safetensors", config.initial_model
    yield from copies.sources(_places(config), kinds)


def _ledger_sources(config: SiteConfig) -> Iterator[tuple[str, Path]]:
    if config.ledger.exists():
        yield _LEDGER, config.ledger
        yield _ANCHOR, config.ledger_anchor


def back_up(config: SiteConfig, target: Path, *, now_ms: int) -> ArchiveContents:
    """A copy without keys; the agent may be running."""
    archive.refuse_moved(config.state)
    return archive.write(target, _sources(config, (BACKUP,)), kind="backup", **_told(config, now_ms))


def move_away(config: SiteConfig, target: Path, *, now_ms: int) -> ArchiveContents:
    """The site itself; the agent must not run. Afterwards nothing can act here. Repeated after a kill, it goes on."""
    with ExitStack() as held:
        if not (config.state / archive.MOVED).exists():
            _hold(config, held)
        elif config.ledger.exists():
            held.enter_context(ledger_files(config)).lock()  # another study's agent may share it
        return archive.move(
            config.state,
            target,
            lambda: (*_sources(config, EVERYTHING), *_ledger_sources(config)),
            (*copies.keys_in(config.identity), (_LEDGER, config.ledger)),
            lambda: _told(config, now_ms),
        )


def _hold(config: SiteConfig, held: ExitStack) -> None:
    """Every lock that an agent takes, so that none runs; and the log says what is done."""
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    held.callback(WriteAheadLog(config.state / "wal").close)
    if config.ledger.exists():
        store = held.enter_context(ledger_files(config))
        store.load()
    if (config.state / "log" / "FORMAT").exists():
        with closing(open_for_people(config.path)) as log:
            action = OperatorAction(command="backup --move: to another machine", role="operator")
            log.append(action, actor=software.account())
            log.checkpoint()


def _told(config: SiteConfig, now_ms: int) -> dict[str, Any]:
    subject = _subject(config)
    state = ledger_files(config).peek()
    about: dict[str, Any] = {"federation": subject.federation, "member": subject.member, "ledger": None}
    if state is not None:
        about["ledger"] = {"population": config.privacy.population, "seq": state.head.seq, "digest": state.head.digest}
    return {"party": f"site {subject.member}", "made_ms": now_ms, "about": about}


def _subject(config: SiteConfig) -> Subject:
    identity = Identity(folder=config.identity)
    return subject_of(identity.tls_certificate(), str(identity.tls_path))


# Restoring.


def restore_site(source: Path, folder: Path, *, name: str | None) -> tuple[ArchiveContents, str | None]:
    """Make a site's folder of an archive: all of it, or none.

    :param name: of the new member, for a backup; a move keeps its own.
    :returns: what the archive said, and the fingerprint of the request for the new member's certificates.
    """
    with archive.unpacked(source, folder) as (staging, contents):
        copies.place_here(staging / "site.toml")
        config = SiteConfig.read(staging / "site.toml")
        copies.check_places({"identity": config.identity, "state": config.state}, staging)
        config = _placed(config, staging, folder)
        if contents.kind == "move":
            _bring_ledger(staging, config)
            return contents, None
        member = str(contents.about["member"])
        if name is None or name == member:
            raise ConfigError(
                f"a backup of {member} needs another name",
                where="--name",
                hint=f"the old name belongs to a log that others have seen more of; take one such as {member}-2",
            )
        _keep_spent(config, contents)
        subject = Subject(federation=str(contents.about["federation"]), role=Role.SITE, member=name)
        request = Identity(folder=staging / "identity").create(subject)
        if (log := staging / "state" / "log").exists():
            log.rename(_made(staging / "state" / "earlier" / member) / "log")
        return contents, request.fingerprint


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True)
    return path


def _placed(config: SiteConfig, staging: Path, folder: Path) -> SiteConfig:
    """With the ledger where it will be once the folder has its name. Until then what is inside it is in `staging`: a
    relative place is already, since both folders have the same parent; an absolute one is named so here.
    """

    def place(written: str) -> str:
        path = Path(written)
        inside = path.is_absolute() and path.is_relative_to(folder.resolve())
        return str(staging.resolve() / path.relative_to(folder.resolve())) if inside else written

    privacy = config.privacy.model_copy(
        update={"ledger": place(config.privacy.ledger), "anchor": place(config.privacy.anchor)}
    )
    return config.model_copy(update={"privacy": privacy})


def _keep_spent(config: SiteConfig, contents: ArchiveContents) -> None:
    """What was spent stays spent: the ledger that survived, or none for good.

    :raises LedgerError: if the ledger that is here is an older one than the backup knew.
    """
    told = contents.about["ledger"]
    if told is None:
        return
    known, store = LedgerAnchor(seq=int(told["seq"]), digest=str(told["digest"])), ledger_files(config)
    if not config.ledger.exists():
        # One more than was known, since a line may have been added after the backup.
        store.close_for_good(LedgerAnchor(seq=known.seq + 1, digest=known.digest))
        return
    state = store.peek()
    if state is None or not state.contains(known):
        raise LedgerError(
            "the privacy ledger here is older than this backup",
            where=str(config.ledger),
            hint="bring the newest ledger and anchor to where [privacy] says, and restore again",
        )


def _bring_ledger(staging: Path, config: SiteConfig) -> None:
    """A moved ledger goes to where `site.toml` has it."""
    ledger, anchor = staging / _LEDGER, staging / _ANCHOR
    if not ledger.exists() and not anchor.exists():
        return
    if not ledger.is_file() or not anchor.is_file():
        raise LedgerError("the archive has one file of the privacy ledger without the other", where=str(ledger))
    lines, head = ledger.read_bytes(), json.loads(anchor.read_bytes())
    ledger.unlink()
    anchor.unlink()
    ledger_files(config).take_over(lines, LedgerAnchor(seq=int(head["seq"]), digest=str(head["digest"])))


# The commands.


@click.command()
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--move", is_flag=True, help="With keys and all; this folder can do nothing afterwards.")
@with_config
@json_option
def backup(config_path: Path, target: Path, move: bool, as_json: bool) -> None:
    """Write a copy of this site to TARGET: without keys, of an agent that may run; or, with --move, the site itself."""
    config, now = SiteConfig.read(config_path), SystemClock().now_ms()
    contents = move_away(config, target, now_ms=now) if move else back_up(config, target, now_ms=now)
    copies.say_copied(contents, target, program="site-agent", as_json=as_json)


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", help="The new member's name, for a backup: the old one is never used again.")
@json_option
def restore(source: Path, folder: Path, name: str | None, as_json: bool) -> None:
    """Make FOLDER of the copy SOURCE: a site that has moved, or a new member with what a lost one had learnt."""
    contents, fingerprint = restore_site(source, folder, name=name)
    if as_json:
        emit({"folder": str(folder), "kind": contents.kind, "name": name, "fingerprint": fingerprint})
        return
    say(f"{contents.party} is in {folder}, as it was at its `{'backup --move' if fingerprint is None else 'backup'}`")
    if fingerprint is None:
        say(f"delete {source} and its copies, run `site-agent check --config {folder}/site.toml`, and start the agent")
        return
    say(f"send {folder}/identity/request.json to the consortium, and read these words (or digits) out to them;")
    say(f"they revoke {contents.about['member']}, enrol {name} and send a kit for `site-agent join`")
    say(phrase(fingerprint))
    click.echo(fingerprint)


def _rows(config_path: Path) -> Iterator[dict[str, Any]]:
    config = SiteConfig.read(config_path)
    yield from copies.rows(_places(config))
    if config.ledger.exists():
        size = config.ledger.stat().st_size
        yield {"file": str(config.ledger), "bytes": size, "copied": MOVE, "meaning": "the privacy ledger"}


state = copies.state_command(_rows, with_config, "this site")
