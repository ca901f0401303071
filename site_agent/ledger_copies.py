"""The privacy ledgers of a site in its copies: what was spent stays spent, whatever is restored where.

A ledger is in no backup: an older one would give back what was spent. A backup tells how far the ledger was. Where
`restore` finds no ledger, it leaves an anchor without one, and the budget counts as spent. A ledger that was begun
after the backup is not known to it: so a restored site begins none without a person's word (`ledger --create --first`).

A move takes every ledger inside the site's own folder along, and of a folder elsewhere only its own one: agents of
other studies may use the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lazaret.archive import ArchiveContents
from lazaret.errors import ConfigError, LedgerError
from security.dp.ledger import LedgerAnchor
from site_agent.config import SiteConfig
from site_agent.privacy import ledger_files

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


# Making a copy.


def told(config: SiteConfig) -> dict[str, Any]:
    """How far the ledger of this site is, for what an archive says of itself."""
    head = ledger_files(config).newest()
    known = head and {"population": config.privacy.population, "seq": head.seq, "digest": head.digest}
    return {"ledger": known, "left_behind": left_behind(config)}


def sources(config: SiteConfig) -> Iterator[tuple[str, Path]]:
    """What moves: ledgers with their anchors; of a ledger that is lost or closed the anchor alone."""
    for one in _taken(config):
        for place, path in ((_LEDGERS, one.ledger), (_ANCHORS, one.ledger_anchor)):
            if path.exists():
                yield f"{place}/{one.privacy.population}", path


def given_up(config: SiteConfig) -> list[tuple[str, Path]]:
    """What is erased here after a move. Anchors stay: no ledger of these patients can be begun here again."""
    return [(name, path) for name, path in sources(config) if name.startswith(f"{_LEDGERS}/")]


def hold(config: SiteConfig, held: ExitStack, *, checked: bool) -> None:
    """Keep everybody else from booking in what moves.

    :param checked: and see that each is whole.
    """
    for one in _taken(config):
        if one.ledger.exists():
            store = held.enter_context(ledger_files(one))
            store.load() if checked else store.lock()


# Restoring it.


def restored(config: SiteConfig, contents: ArchiveContents, staging: Path, *, outside: Sequence[Path] = ()) -> None:
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
    lines, heads = (_read(staging / place) for place in (_LEDGERS, _ANCHORS))
    if lines.keys() - heads.keys():
        raise LedgerError("the archive has a privacy ledger without its anchor", where=_LEDGERS)
    if heads:
        _check_places(config, permitted)
    for population, data in heads.items():
        told, store = json.loads(data), ledger_files(of_population(config, population))
        head = LedgerAnchor(seq=int(told["seq"]), digest=str(told["digest"]))
        if population in lines:
            store.take_over(lines[population], head)
        else:
            store.close_for_good(head)


def _read(folder: Path) -> dict[str, bytes]:
    """The files of a folder, which goes: it has no place in a site's."""
    found = {path.name: path.read_bytes() for path in sorted(folder.glob("*"))}
    for name in found:
        (folder / name).unlink()
    if folder.exists():
        folder.rmdir()
    return found
