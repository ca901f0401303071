"""`privacy-audit export`: what left as a table or as events, and a whole log as files that anybody can follow.

The files are C2SP tlog-tiles: with them anybody can check every entry and ask for any proof. Published is what the
newest checkpoint with a quorum covers. The layout is `checkpoint`, `tile/<level>/<number>` with 256 hashes to a tile,
and `tile/entries/<number>` with 256 entries; the last tile of a level is `<number>.p/<width>`. A whole tile never
changes, so that a second publication only adds files. The checkpoint is written last: who reads it finds all that it
covers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from lazaret import files, software
from lazaret.errors import CannotDecide, CodecError, ConfigError, VerificationFailed
from security.audit.cli import logs
from security.audit.facts import LogHistory, read_history
from security.audit.safe_files import NOTE_BYTES, read_capped, refuse_hostile
from security.audit.text import plain
from security.audit.verify import origin_of
from security.crypto.merkle import Tree, leaf_hash
from security.log.note import Note, checkpoint_of
from security.log.reader import LogReader, Record
from security.log.store import LogFolder

WIDTH: Final = 256
CHECKPOINT: Final = "checkpoint"
ENTRIES: Final = "entries"
LONGEST: Final = (1 << 16) - 1  # an entry's length has two bytes in a bundle
TILE_BYTES: Final = WIDTH * (LONGEST + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTiles:
    """What was written: up to which entry, and how many files were new."""

    size: int
    added: int


def publish(path: Path, target: Path, *, entries: bool = True) -> PublishedTiles:
    """Write the tiles of a log folder; what is there already stays.

    :param entries: whether the entries themselves are published, or only the tree over them.
    :raises CannotDecide: if no checkpoint has a quorum yet.
    :raises VerificationFailed: if the entries do not lead to the checkpoint, or `target` has another history.
    """
    refuse_hostile(path)
    folder = LogFolder(path)
    try:
        note = Note.parse(folder.cosigned.read_bytes())
    except FileNotFoundError:
        hint = "publish after other parties have cosigned a checkpoint"
        raise CannotDecide("no checkpoint of this log has a quorum", where=str(path), hint=hint) from None
    checkpoint = checkpoint_of(note)
    lines = [line for block in LogReader(path).blocks() for line in block.lines][: checkpoint.size]
    leaves = [leaf_hash(line) for line in lines]
    if len(lines) < checkpoint.size or Tree(leaves).root() != checkpoint.root:
        raise VerificationFailed("the entries do not lead to the checkpoint", where=str(path))
    _refuse_other_history(target, leaves, checkpoint.origin)
    wanted = [*_tree(leaves), *(_bundles(lines) if entries else ())]
    added = sum(_add(target / name, data) for name, data in wanted)
    files.write_atomically(target / CHECKPOINT, note.encode())
    return PublishedTiles(size=checkpoint.size, added=added)


def tile_name(level: int | str, number: int, width: int) -> str:
    """Where a tile is: groups of three digits, all but the last with an x, and the width if it is not whole."""
    groups = [f"{number % 1000:03d}"]
    while number := number // 1000:
        groups.insert(0, f"x{number % 1000:03d}")
    return f"tile/{level}/{'/'.join(groups)}" + ("" if width == WIDTH else f".p/{width}")


def _tree(leaves: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    level, row = 0, list(leaves)
    while row:
        above = []
        for number, chunk in enumerate(_chunks(row)):
            yield tile_name(level, number, len(chunk)), b"".join(chunk)
            # C2SP tlog-tiles: a tile of the next level has the roots of whole tiles below; what is left is in partial
            # tiles.
            if len(chunk) == WIDTH:
                above.append(Tree(chunk).root())
        level, row = level + 1, above


def _bundles(lines: Sequence[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, chunk in enumerate(_chunks(lines)):
        if any(len(line) > LONGEST for line in chunk):
            raise CodecError("an entry is longer than this layout permits", where=f"entries from {number * WIDTH} on")
        data = b"".join(len(line).to_bytes(2, "big") + line for line in chunk)
        yield tile_name(ENTRIES, number, len(chunk)), data


def _chunks(row: Sequence[bytes]) -> Iterator[list[bytes]]:
    rest = iter(row)
    while chunk := list(islice(rest, WIDTH)):
        yield chunk


def _refuse_other_history(target: Path, leaves: Sequence[bytes], origin: str) -> None:
    """What was published before must be the beginning of this."""
    try:
        before = checkpoint_of(Note.parse(read_capped(target / CHECKPOINT, NOTE_BYTES)))
    except FileNotFoundError:
        return
    if before.origin != origin:
        raise VerificationFailed("another log is published here", where=str(target))
    if before.size > len(leaves) or Tree(leaves[: before.size]).root() != before.root:
        hint = "keep both: `privacy-audit check-proof` and the witnesses tell which history was signed"
        raise VerificationFailed("another history of this log is published here", where=str(target), hint=hint)


def _add(file: Path, data: bytes) -> bool:
    if file.exists():
        if read_capped(file, TILE_BYTES) != data:
            raise VerificationFailed("a published tile is not that of this log", where=str(file))
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(file, data)
    return True


# What left, as a table.

CSV_COLUMNS: Final = ("party", "run", "round", "data_class", "messages", "bytes", "surplus")


def egress_rows(histories: Sequence[LogHistory]) -> list[dict[str, Any]]:
    """What left each site, by run, round and class of data: one row each, in order."""
    rows: dict[tuple[str, str, int, str], list[int]] = {}
    for history in histories:
        for record in history.of("egress"):
            number = -1 if record.round is None else record.round
            row = rows.setdefault((history.name, record.run or "", number, record.body["data_class"]), [0, 0, 0])
            row[0] += 1
            row[1] += record.body["bytes"]
            row[2] += record.body["bytes"] - record.body["expected_bytes"]
    return [
        dict(zip(CSV_COLUMNS, (party, run or None, None if number < 0 else number, name, *totals), strict=True))
        for (party, run, number, name), totals in sorted(rows.items())
    ]


# The same as events of the Open Cybersecurity Schema Framework (OCSF): class "API Activity" of the category
# "Application Activity". `type_uid` is the class times 100 and the activity; sending has no number of its own there.

OCSF_VERSION: Final = "1.3.0"
OCSF_CATEGORY: Final = 6
OCSF_CLASS: Final = 6003
OCSF_ACTIVITY: Final = 99
INFORMATIONAL, MEDIUM = 1, 3


def ocsf_events(histories: Sequence[LogHistory], version: str) -> Iterator[dict[str, Any]]:
    """One event for each party, run, round and class of data that left."""
    for history in histories:
        groups: dict[tuple[str, int, str], list[Record]] = {}
        for record in history.of("egress"):
            key = (record.run or "", -1 if record.round is None else record.round, record.body["data_class"])
            groups.setdefault(key, []).append(record)
        for (run, number, data_class), records in sorted(groups.items()):
            surplus = sum(record.body["bytes"] - record.body["expected_bytes"] for record in records)
            first, last = records[0], records[-1]
            yield {
                "activity_id": OCSF_ACTIVITY,
                "activity_name": "Send",
                "actor": {"app_name": "site-agent"},
                "api": {"operation": f"send {data_class}", "service": {"name": "lazaret.federation.v1.Federation"}},
                "category_uid": OCSF_CATEGORY,
                "class_uid": OCSF_CLASS,
                "count": len(records),
                "dst_endpoint": {"name": "coordinator", "uid": first.body["destination"]},
                "end_time": last.ts,
                "metadata": {
                    "log_name": history.origin,
                    "product": {"name": "Lazaret", "vendor_name": "Lazaret", "version": version},
                    "uid": f"{history.origin}#{first.seq}-{last.seq}-{data_class}",
                    "version": OCSF_VERSION,
                },
                "severity_id": MEDIUM if surplus else INFORMATIONAL,
                "src_endpoint": {"name": history.name},
                "start_time": first.ts,
                "status_id": 1,
                "time": first.ts,
                "type_uid": OCSF_CLASS * 100 + OCSF_ACTIVITY,
                "unmapped": {
                    "bytes": sum(record.body["bytes"] for record in records),
                    "data_class": data_class,
                    "entries": [record.seq for record in records],
                    "round": None if number < 0 else number,
                    "run": run or None,
                    "surplus": surplus,
                },
            }


# The command.

FORMATS: Final = ("csv", "jsonl", "ocsf", "tiles")


@click.command(short_help="Write what left as a table, or a whole log.")
@logs
@click.option("--format", "form", type=click.Choice(FORMATS), default="csv", show_default=True)
@click.option("--no-entries", is_flag=True, help="Of a published log (tiles) only the tree, without the entries.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: standard output. With tiles a folder.")
def export(logs: Sequence[Path], form: str, no_entries: bool, output: Path | None) -> None:
    """What left each site by run, round and class of data, for a spreadsheet or a log collector; or one whole log as
    static files that anybody can follow (C2SP tlog-tiles).
    """
    if form == "tiles":
        _publish(logs, output, entries=not no_entries)
        return
    if no_entries:
        raise ConfigError("only a published log has a choice of entries", where="--no-entries", hint="--format tiles")
    if output is not None and output.is_dir():
        raise ConfigError("this is a folder", where=str(output), hint="name a file")
    histories, out = _histories(logs), io.StringIO()
    rows = list(ocsf_events(histories, software.version())) if form == "ocsf" else egress_rows(histories)
    if form == "csv":
        writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        out.writelines(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    if output is None:
        click.echo(out.getvalue(), nl=False)
    else:
        output.write_text(out.getvalue(), encoding="utf-8")
        click.echo(f"{output}: {len(rows)} {'events' if form == 'ocsf' else 'rows'}")


def _publish(logs: Sequence[Path], output: Path | None, *, entries: bool) -> None:
    if output is None or len(logs) != 1:
        raise ConfigError("one log is published into one folder", where="--format tiles", hint="LOG -o FOLDER")
    if output.resolve().is_relative_to(logs[0].resolve()) or output.is_file():
        raise ConfigError("not a folder outside of the log", where=str(output))
    done = publish(logs[0], output, entries=entries)
    click.echo(f"{output}: {done.size} entries are published, {done.added} files are new")


def _histories(paths: Sequence[Path]) -> list[LogHistory]:
    names = [(path, origin_of(path)) for path in paths]
    return [read_history(path, origin=origin, name=plain(origin.split(".", 1)[0]), role="") for path, origin in names]
