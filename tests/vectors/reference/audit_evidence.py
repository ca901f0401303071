"""Files that prove something without a log: two signed histories, or one entry; from docs/spec/audit-log.md alone."""

from __future__ import annotations

import json
import re
from typing import Any

from .audit_formats import (
    Invalid,
    Key,
    Note,
    check_chain,
    check_consistency,
    check_inclusion,
    demand,
    entry_of,
    leaf,
    read_json,
    unbase64,
)

Entry = dict[str, Any]


def is_signed(origin: str, root: Key, endorsements: list[Note], note: Note) -> bool:
    try:
        return bool(note.signers(check_chain(origin, root, endorsements)))
    except Invalid:
        return False


def check_fork(data: bytes, roots: list[Key]) -> str:
    """Whose two histories a file of evidence shows."""
    value = read_json(data)
    origin, endorsements = value["origin"], [Note(text.encode()) for text in value["endorsements"]]
    held, shown = (Note(value[name].encode()) for name in ("held", "shown"))
    genuine = any(
        is_signed(origin, root, endorsements, held) and is_signed(origin, root, endorsements, shown)
        for root in roots
        if root[0] == origin
    )
    demand(genuine and held.checkpoint[0] == shown.checkpoint[0] == origin, "not signed by the log")
    other, path = unbase64(value["other_root"]), [unbase64(step) for step in value["path"]]
    demand(other != held.checkpoint[2], "this is no fork")
    check_consistency(held.checkpoint[1], other, shown.checkpoint[1], shown.checkpoint[2], path)
    return str(origin)


def check_proof(data: bytes, root: Key, ml_dsa: Key | None = None) -> Entry:
    """The entry that a proof shows to be in the log of `root`."""
    top, _, signed = data.partition(b"\n\n")
    header, extra, index, *path = top.decode().split("\n")
    demand(header == "c2sp.org/tlog-proof@v1" and re.fullmatch("index (0|[1-9][0-9]*)", index), "not a proof")
    value = json.loads(unbase64(extra.removeprefix("extra ")))
    note, line = Note(signed), value["entry"].encode()
    origin, size, top_hash = note.checkpoint
    demand(
        origin == root[0] and is_signed(origin, root, [Note(t.encode()) for t in value["endorsements"]], note), "signer"
    )
    demand(ml_dsa is None or note.signers([ml_dsa]), "one signature only")
    check_inclusion(leaf(line), int(index[6:]), size, [unbase64(step) for step in path], top_hash)
    entry = entry_of(line)
    demand((entry["seq"], entry["origin"]) == (int(index[6:]), origin), "not the entry that the proof names")
    return entry
