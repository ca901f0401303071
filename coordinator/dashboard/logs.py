"""Heads of all privacy logs as far as this coordinator holds them, and who has witnessed them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from security.audit.note import Checkpoint, Note, head_of
from security.audit.roster import Roster
from security.audit.store import LogFolder
from security.audit.witness import Held
from security.errors import CodecError

Stamp = tuple[tuple[str, int, int], ...]


class LogHeads:
    """Reads a file again only when it has changed."""

    def __init__(self, folder: Path, roster: Roster, name: str) -> None:
        self._folder = LogFolder(folder)
        self._roster = roster
        self._name = name

    def stamp(self) -> Stamp:
        """Another value whenever a head has been kept."""
        found = []
        for path in (self._folder.cosigned, *self._paths()):
            try:
                told = path.stat()
            except FileNotFoundError:
                continue
            found.append((path.name, told.st_mtime_ns, told.st_size))
        return tuple(found)

    def _paths(self) -> list[Path]:
        return [self._folder.witness_path(party.origin) for party in self._roster.sites]

    def read(self, own: Note, size: int, known: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
        """This coordinator's log first, then what is held of each site's.

        :param known: what other sites have said that they hold of whose log.
        """
        peers: dict[str, list[dict[str, Any]]] = {}
        for (name, origin), held in sorted(known.items()):
            peers.setdefault(origin, []).append({"name": name, "size": held})
        sites = [self._held(party.name, party.origin, peers.get(party.origin, [])) for party in self._roster.sites]
        return [self._own(own, size), *sites]

    def _own(self, newest: Note, size: int) -> dict[str, Any]:
        witnessed = self._witnessed()
        witnesses = self._witnesses(witnessed) if witnessed else []
        return _head(self._name, head_of(newest)) | {"entries": size, "witnesses": witnesses}

    def _witnessed(self) -> Note | None:
        try:
            return Note.parse(self._folder.cosigned.read_bytes())
        except (FileNotFoundError, CodecError):
            return None

    def _held(self, name: str, origin: str, peers: list[dict[str, Any]]) -> dict[str, Any]:
        """A site's head was checked and cosigned here before it was kept, so that we are one of its witnesses."""
        try:
            held = Held.parse(self._folder.witness_path(origin).read_bytes())
        except (FileNotFoundError, CodecError):
            return {"log": name, "size": 0, "root": None, "witnesses": []}
        return _head(name, held.checkpoint) | {"witnesses": [*self._witnesses(held.head), *peers]}

    def _witnesses(self, note: Note) -> list[dict[str, Any]]:
        """The cosignatures of parties that the roster knows, with their times (C2SP tlog-cosignature)."""
        known = {(party.cosigner.name, party.cosigner.id): party.name for party in self._roster.parties}
        size = head_of(note).size
        return [
            {"name": known[line.name, line.key_id], "size": size, "at": 1000 * int.from_bytes(line.value[:8], "big")}
            for line in note.signatures
            if (line.name, line.key_id) in known
        ]


def _head(name: str, head: Checkpoint) -> dict[str, Any]:
    return {"log": name, "size": head.size, "root": head.root.hex()}
