"""`site-agent backup`, `restore` and `state`: copies of a site that cannot lead to a mask that is used twice.

A site that has forgotten what it signed could answer one question in two ways, and two answers can reveal its masks.
So there are two kinds of copies; the tables below say which file is in which:

- A *backup* has no private key and no record of the protocol. Nobody can act as this site with it. What `restore` makes
  of it is a new member under another name, with keys of its own, which keeps what the hospital has learnt.
- A *move* has everything, and ends this folder: it is marked, its keys are erased, and so there is one site, not two.

What they share with those of a coordinator is in security/identity/member_copies.py; privacy ledgers are in
ledger_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import click

from lazaret import archive, control, copies, software
from lazaret.archive import ArchiveContents
from lazaret.copies import BACKUP, EVERYTHING, MOVE, NEITHER, CopyTable
from lazaret.terminal import say
from security.clock import SystemClock
from security.identity import member_copies
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentRequest
from security.identity.member_copies import RestoreOptions, restore_options
from security.identity.pki import Role
from security.log.events import OperatorAction
from site_agent import ledger_copies
from site_agent.config import SiteConfig
from site_agent.options import json_option, with_config
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
    yield from copies.sources(_places(config), kinds)


def back_up(config: SiteConfig, target: Path, *, now_ms: int) -> ArchiveContents:
    """A copy without keys; the agent may be running."""
    archive.refuse_moved(config.state)
    return archive.write(target, _sources(config, (BACKUP,)), kind="backup", **_told(config, now_ms))


def move_away(config: SiteConfig, target: Path, *, now_ms: int) -> ArchiveContents:
    """The site itself; the agent must not run. Afterwards nothing can act here. Repeated after a kill, it goes on."""
    with ExitStack() as held:
        begun = (config.state / archive.MOVED).exists()
        ledger_copies.hold(config, held, checked=not begun)  # another study's agent may share one
        if not begun:
            _hold(config, held)
        return archive.move(
            config.state,
            target,
            lambda: (*_sources(config, EVERYTHING), *ledger_copies.sources(config)),
            (*copies.keys_in(config.identity), *ledger_copies.given_up(config)),
            lambda: _told(config, now_ms),
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


def _told(config: SiteConfig, now_ms: int) -> dict[str, Any]:
    return member_copies.statement_of(Identity(folder=config.identity), now_ms, **ledger_copies.told(config))


def restore_site(
    source: Path, folder: Path, options: RestoreOptions, *, outside: Sequence[Path] = ()
) -> tuple[ArchiveContents, EnrolmentRequest | None]:
    """Make a site's folder of an archive: all of it, or none.

    :param outside: folders elsewhere in which a privacy ledger may be written.
    :returns: what the archive said, and the request for the new member's certificates.
    """
    with member_copies.unpacked(source, folder, Role.SITE, options) as (staging, contents):
        copies.place_here(staging / "site.toml")
        config = SiteConfig.read(staging / "site.toml")
        copies.check_places({"identity": config.identity, "state": config.state}, staging)
        config = _placed(config, staging, folder)
        moved = contents.kind == "move"
        request = None if moved else member_copies.new_member(staging, contents, Role.SITE, options)
        ledger_copies.restored(config, contents, staging, outside=outside)
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
@click.option("--move", is_flag=True, help="With keys and all; this folder can do nothing afterwards.")
@with_config
@json_option
def backup(config_path: Path, target: Path, move: bool, as_json: bool) -> None:
    """Write a copy of this site to TARGET: without keys, of an agent that may run; or, with --move, the site itself."""
    config, now = SiteConfig.read(config_path), SystemClock().now_ms()
    contents = move_away(config, target, now_ms=now) if move else back_up(config, target, now_ms=now)
    copies.say_copied(contents, target, program="site-agent", as_json=as_json)
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
    """Restore the copy SOURCE into FOLDER: a site that has moved, or a new member with what a lost one had learnt."""
    contents, request = restore_site(source, folder, RestoreOptions(**options), outside=outside)
    check = f"run `site-agent check --config {folder}/site.toml`, and start the agent"
    moved = f"delete {source} and its copies, {check}"
    member_copies.say_restored(contents, folder, request, as_json=as_json, moved=moved, enrolled="`site-agent join`")
    if contents.kind == "move":
        _say_left(contents)


def _rows(config_path: Path) -> Iterator[dict[str, Any]]:
    config = SiteConfig.read(config_path)
    yield from copies.rows(_places(config))
    if config.ledger.exists():
        size = config.ledger.stat().st_size
        yield {"file": str(config.ledger), "bytes": size, "copied": MOVE, "meaning": "the privacy ledger"}


state = copies.state_command(_rows, with_config, "this site")
