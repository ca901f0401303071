"""`site-agent backup`, `restore` and `state`: copies of a site that cannot lead to a mask that is used twice.

A site that has forgotten what it signed could answer one question in two ways, and two answers can reveal its masks.
So there are two kinds of copies; the tables below say which file is in which:

- A *backup* has no private key and no record of the protocol. Nobody can act as this site with it. What `restore` makes
  of it is a new member under another name, with keys of its own, which keeps what the hospital has learnt.
- A *move* has everything, and ends this folder: it is marked, its keys are erased, and so there is one site, not two.

What they share with those of a coordinator is in security/identity/member_copies.py. Privacy ledgers come first here,
then the copies, then the commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import click

from lazaret import archive, control, software
from lazaret.archive import ArchiveContents
from lazaret.control import BACKUP, EVERYTHING, MOVE, NEITHER, CopyTable
from lazaret.errors import ConfigError, LedgerError
from lazaret.terminal import say
from security.clock import SystemClock
from security.dp.ledger import LedgerAnchor
from security.identity import member_copies
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentRequest
from security.identity.member_copies import RestoreOptions, restore_options
from security.identity.pki import Role
from security.log.events import OperatorAction
from site_agent.config import SiteConfig
from site_agent.options import json_option, with_config
from site_agent.privacy import ledger_files
from site_agent.state_commands import open_for_people
from site_agent.state_writer import WriteAheadLog

# The privacy ledgers of a site in its copies: what was spent stays spent, whatever is restored where.
#
# A ledger is in no backup: an older one would give back what was spent. A backup tells how far the ledger was. Where
# `restore` finds no ledger, it leaves an anchor without one, and the budget counts as spent. A ledger that was begun
# after the backup is not known to it: a restored site begins one only with `ledger --create --first`.
#
# A move takes every ledger inside the site's own folder along, and of a folder elsewhere only its own one: agents of
# other studies may use the others.

# Names in a move that no folder of a site has.
_LEDGERS, _ANCHORS = "moved-ledgers", "moved-ledger-anchors"


def of_population(config: SiteConfig, population: str) -> SiteConfig:
    """The same site, with the budget of other patients."""
    return config.model_copy(update={"privacy": config.privacy.model_copy(update={"population": population})})


def _populations(config: SiteConfig) -> set[str]:
    """All that have a ledger or an anchor where this site has its own."""
    found = {path.stem for path in config.ledger.parent.glob("*.jsonl")}
    return found | {path.stem for path in config.ledger_anchor.parent.glob("*.head")}


def _taken(config: SiteConfig) -> list[SiteConfig]:
    """Those that move with the site."""
    home = config.path.parent.resolve()
    own = config.ledger.is_relative_to(home) and config.ledger_anchor.is_relative_to(home)
    names = _populations(config) if own else _populations(config) & {config.privacy.population}
    return [of_population(config, name) for name in sorted(names)]


def left_behind(config: SiteConfig) -> list[str]:
    """Populations whose ledgers a move leaves where they are."""
    return sorted(_populations(config) - {one.privacy.population for one in _taken(config)})


def ledger_facts(config: SiteConfig) -> dict[str, Any]:
    """How far the ledger of this site is, for what an archive says of itself."""
    head = ledger_files(config).newest()
    known = head and {"population": config.privacy.population, "seq": head.seq, "digest": head.digest}
    return {"ledger": known, "left_behind": left_behind(config)}


def ledger_files_to_move(config: SiteConfig) -> Iterator[tuple[str, Path]]:
    """What moves: ledgers with their anchors; of a ledger that is lost or closed the anchor alone."""
    for one in _taken(config):
        for place, path in ((_LEDGERS, one.ledger), (_ANCHORS, one.ledger_anchor)):
            if path.exists():
                yield f"{place}/{one.privacy.population}", path


def ledgers_to_erase(config: SiteConfig) -> list[tuple[str, Path]]:
    """What is erased here after a move. Anchors stay: no ledger of these patients can be begun here again."""
    return [(name, path) for name, path in ledger_files_to_move(config) if name.startswith(f"{_LEDGERS}/")]


def hold_ledgers(config: SiteConfig, held: ExitStack, *, checked: bool) -> None:
    """Keep everybody else from booking in what moves.

    :param checked: and see that each is whole.
    """
    for one in _taken(config):
        if one.ledger.exists():
            store = held.enter_context(ledger_files(one))
            store.load() if checked else store.lock()


def restore_ledgers(
    config: SiteConfig, contents: ArchiveContents, staging: Path, *, outside: Sequence[Path] = ()
) -> None:
    """The last step of a restore, since it may write on another disk: everything else is good by now.

    :param outside: folders outside of the one that is restored in which a ledger or an anchor may be written.
    :raises ConfigError: if the configuration has them anywhere else.
    """
    permitted = [staging.resolve(), *(path.resolve() for path in outside)]
    if contents.kind == "move":
        _bring(config, staging, permitted)
    else:
        _keep_spent(config, contents, permitted)


def _check_places(config: SiteConfig, permitted: Sequence[Path]) -> None:
    for path in (config.ledger, config.ledger_anchor):
        if not any(path.is_relative_to(folder) for folder in permitted):
            raise ConfigError(
                "the privacy ledger of this copy is outside of the folder that is restored, and would be written there",
                where=str(path),
                hint=f"if that is right on this machine: --outside {path.parent}; nothing was restored",
            )


def _keep_spent(config: SiteConfig, contents: ArchiveContents, permitted: Sequence[Path]) -> None:
    """What was spent stays spent: the ledger that survived, or none for good.

    :raises LedgerError: if the ledger that is here is an older one than the backup knew.
    """
    known, store = contents.about["ledger"], ledger_files(config)
    if known is None:
        return
    head = LedgerAnchor(seq=int(known["seq"]), digest=str(known["digest"]))
    if not config.ledger.exists():
        _check_places(config, permitted)
        # One more than was known, since a line may have been added after the backup.
        store.close_for_good(LedgerAnchor(seq=head.seq + 1, digest=head.digest))
        return
    state = store.peek()
    if state is None or not state.contains(head):
        raise LedgerError(
            "the privacy ledger here is older than this backup",
            where=str(config.ledger),
            hint="bring the newest ledger and anchor to where [privacy] says, and restore again",
        )


def _bring(config: SiteConfig, staging: Path, permitted: Sequence[Path]) -> None:
    """Moved ledgers go to where `site.toml` has its own; of a closed one the anchor, under which none can be begun."""
    lines, heads = (_taken_out(staging / place) for place in (_LEDGERS, _ANCHORS))
    if lines.keys() - heads.keys():
        raise LedgerError("the archive has a privacy ledger without its anchor", where=_LEDGERS)
    if heads:
        _check_places(config, permitted)
    for population, data in heads.items():
        anchor, store = json.loads(data), ledger_files(of_population(config, population))
        head = LedgerAnchor(seq=int(anchor["seq"]), digest=str(anchor["digest"]))
        if population in lines:
            store.take_over(lines[population], head)
        else:
            store.close_for_good(head)


def _taken_out(folder: Path) -> dict[str, bytes]:
    """The files of a folder, which goes: it has no place in a site's."""
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}
    for name in found:
        (folder / name).unlink()
    if folder.exists():
        folder.rmdir()
    return found


# Which file is in which copy; what is not listed is in a move only.
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
    control.SET_BACK: (MOVE, "that others have seen a later state of this site"),
    "now.json": (NEITHER, "what the agent says of itself"),
    archive.MOVED: (NEITHER, "that this site has moved to another machine"),
}
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
    if config.plugins.exists():
        yield "plugins", config.plugins
    yield from control.copied_files(_places(config), kinds)


def back_up(config: SiteConfig, target: Path, *, now_ms: int) -> ArchiveContents:
    """A copy without keys; the agent may be running."""
    archive.refuse_moved(config.state)
    return archive.write(target, _sources(config, (BACKUP,)), kind="backup", **_facts(config, now_ms))


def move_away(config: SiteConfig, target: Path, *, now_ms: int) -> ArchiveContents:
    """The site itself; the agent must not run. Afterwards nothing can act here. Repeated after a kill, it goes on."""
    with ExitStack() as held:
        begun = (config.state / archive.MOVED).exists()
        hold_ledgers(config, held, checked=not begun)  # another study's agent may share one
        if not begun:
            _hold(config, held)
        return archive.move(
            config.state,
            target,
            lambda: (*_sources(config, EVERYTHING), *ledger_files_to_move(config)),
            (*control.keys_in(config.identity), *ledgers_to_erase(config)),
            lambda: _facts(config, now_ms),
        )


def _hold(config: SiteConfig, held: ExitStack) -> None:
    """Every lock that an agent or a command on the log takes, until all is packed; and the log says what is done."""
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    held.callback(WriteAheadLog(config.state / "wal").close)
    if (config.state / "log" / "FORMAT").exists():
        log = held.enter_context(closing(open_for_people(config.path)))
        action = OperatorAction(command="backup --move: to another machine", role="operator")
        log.append(action, actor=software.account())
        log.checkpoint()


def _facts(config: SiteConfig, now_ms: int) -> dict[str, Any]:
    return member_copies.statement_of(Identity(folder=config.identity), now_ms, **ledger_facts(config))


def restore_site(
    source: Path, folder: Path, options: RestoreOptions, *, outside: Sequence[Path] = ()
) -> tuple[ArchiveContents, EnrolmentRequest | None]:
    """Make a site's folder of an archive: all of it, or none.

    :param outside: folders elsewhere in which a privacy ledger may be written.
    :returns: what the archive said, and the request for the new member's certificates.
    """
    with member_copies.unpacked(source, folder, Role.SITE, options) as (staging, contents):
        control.place_here(staging / "site.toml")
        config = SiteConfig.read(staging / "site.toml")
        control.check_places({"identity": config.identity, "state": config.state}, staging)
        config = _placed(config, staging, folder)
        moved = contents.kind == "move"
        request = None if moved else member_copies.new_member(staging, contents, Role.SITE, options)
        restore_ledgers(config, contents, staging, outside=outside)
        return contents, request


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


# The commands.


@click.command()
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--move", is_flag=True, help="Copy everything, with keys; then nothing can start from this folder.")
@with_config
@json_option
def backup(config_path: Path, target: Path, move: bool, as_json: bool) -> None:
    """Write a copy of this site to TARGET: a backup without keys, also while the agent runs; or all of it (--move)."""
    config, now = SiteConfig.read(config_path), SystemClock().now_ms()
    contents = move_away(config, target, now_ms=now) if move else back_up(config, target, now_ms=now)
    control.say_copied(contents, target, program="site-agent", as_json=as_json)
    if move:
        _say_left(contents)


def _say_left(contents: ArchiveContents) -> None:
    if names := contents.about["left_behind"]:
        say(f"note: the privacy ledgers of {', '.join(names)} stay on the old machine; bring them with their agents")


@click.command()
@restore_options
@click.option(
    "--outside",
    type=click.Path(path_type=Path, file_okay=False),
    multiple=True,
    help="A folder outside of FOLDER where the privacy ledger or its anchor may be written; may be repeated.",
)
def restore(source: Path, folder: Path, outside: tuple[Path, ...], as_json: bool, **options: str | None) -> None:
    """Restore the copy SOURCE into FOLDER: a site that has moved, or a new member with the models of a lost one."""
    contents, request = restore_site(source, folder, RestoreOptions(**options), outside=outside)
    check = f"run `site-agent check --config {folder}/site.toml`, and start the agent"
    moved = f"delete {source} and its copies, {check}"
    member_copies.say_restored(contents, folder, request, as_json=as_json, moved=moved, enrolled="`site-agent join`")
    if contents.kind == "move":
        _say_left(contents)


def _rows(config_path: Path) -> Iterator[dict[str, Any]]:
    config = SiteConfig.read(config_path)
    yield from control.file_rows(_places(config))
    if config.ledger.exists():
        size = config.ledger.stat().st_size
        yield {"file": str(config.ledger), "bytes": size, "copied": MOVE, "meaning": "the privacy ledger"}


state = control.state_command(_rows, with_config, "this site")
