"""The one reader of logs. Whatever looks at the past of a log walks its folder here.

`blocks` is the walk: it cuts a segment file into lines and holds no more than a block of it in memory, however long a
line somebody wrote. The verifier and crash recovery use it directly, because they need every byte. All others ask:

LogReader.lines      every line with its index, from a given index on
LogReader.records    strictly parsed entries of some types: for logs that other parties wrote
LogReader.checked    the same without the strict parse: for a party's own log, which `continue_log` has checked
LogReader.backwards  the same, newest first: reads no further back than the caller goes
LogFollower          what was added since the last call: for pages beside a running agent

Nothing here writes, and nothing here judges: a line that is no entry is a finding of `security.audit`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import security.log.events  # noqa: F401  # enters the event types, without which no line is an entry
from lazaret.errors import AuditLogError, CodecError
from security.log.machine import SEGMENT
from security.log.schema import MAX_LINE, Event, event_from, read_line, type_of
from security.log.store import LogFolder

if TYPE_CHECKING:
    from hashlib import _Hash

BLOCK: Final = 1 << 17
_KEPT: Final = MAX_LINE + 1  # of a longer line: enough to see that it is too long


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBlock:
    """Lines of one segment file that follow each other.

    :ivar raw: the bytes that were read for it. Those of all blocks of a file are the file.
    :ivar lines: without their newlines. A line that is too long for an entry and for a block has lost its end.
    :ivar offset: where in the file the first line begins.
    :ivar end: where the line after the last whole one begins.
    :ivar torn: the file ends in a line without a newline. That line is alone in its block.
    """

    raw: bytes
    lines: list[bytes]
    offset: int
    end: int
    torn: bool = False
    first_leaf: bytes | None = None  # of a first line that has lost its end

    def leaves(self) -> list[bytes]:
        """The hashes of the lines as leaves of the log's tree (RFC 6962)."""
        # `merkle.leaf_hash` spelled out: a call for each line would cost as much as the hash.
        hashes = [sha256(b"\x00" + line).digest() for line in self.lines]
        if self.first_leaf is not None:
            hashes[0] = self.first_leaf
        return hashes


def blocks(path: Path, offset: int = 0) -> Iterator[LineBlock]:
    """Walk one segment file, and of one that has more lines than a segment so many and one more.

    :param offset: where a line begins.
    """
    count = 0
    rest = b""  # the beginning of a line that the next block goes on with
    long: _Hash | None = None  # its hash so far, where it is too long to be kept
    with path.open("rb", buffering=0) as file:
        at = file.seek(offset)
        while raw := file.read(BLOCK):
            at += len(raw)
            first_leaf = None
            if long is None:
                lines = (rest + raw).split(b"\n")
            else:
                end_of_line, newline, after = raw.partition(b"\n")
                long.update(end_of_line)
                if not newline:
                    yield LineBlock(raw=raw, lines=[], offset=offset, end=offset)
                    continue
                lines, first_leaf, long = [rest, *after.split(b"\n")], long.digest(), None
            rest = lines.pop()
            end = at - len(rest)
            count += len(lines)
            if count > SEGMENT:
                # No log writes it, and a small archive can hold a great many empty lines: one too many is enough.
                surplus = count - SEGMENT - 1
                yield LineBlock(
                    raw=raw, lines=lines[: len(lines) - surplus], offset=offset, end=end, first_leaf=first_leaf
                )
                return
            yield LineBlock(raw=raw, lines=lines, offset=offset, end=end, first_leaf=first_leaf)
            offset = end
            if len(rest) > MAX_LINE:
                rest, long = rest[:_KEPT], sha256(b"\x00" + rest)
    if rest:
        leaf = long.digest() if long else None
        yield LineBlock(raw=b"", lines=[rest], offset=offset, end=offset, torn=True, first_leaf=leaf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One entry that was read: its envelope as far as readers ask for it, and its body."""

    seq: int
    ts: int
    boot: str
    type: str
    run: str | None
    round: int | None
    body: dict[str, Any]

    @property
    def key(self) -> tuple[str | None, int | None]:
        """The round it belongs to."""
        return self.run, self.round

    def event(self) -> Event:
        """The typed event."""
        return event_from({"type": self.type, "body": self.body})


class LogReader:
    """Reads one log folder; the log may be that of a running party, or a copy.

    :param gaps: go on where a segment file is missing. For an auditor, who has a finding for it.
    """

    def __init__(self, path: Path, *, gaps: bool = False) -> None:
        self._folder = LogFolder(path)
        self._gaps = gaps

    def segments(self) -> list[Path]:
        """The segment files in order, those in an archive among them.

        :raises AuditLogError: at a gap in their numbers, since it could hide entries.
        """
        # As `LogFolder.segment` looks: what is here comes before what is archived, the first archive before others.
        folders = (*reversed(self._folder.archives()), self._folder.segments)
        by_name = {path.name: path for folder in folders for path in folder.glob("*.jsonl")}
        found = [by_name[name] for name in sorted(by_name)]
        if not self._gaps and found != [self._folder.segment(number) for number in range(len(found))]:
            raise _gap("segment files are not numbered without gaps", self._folder)
        return found

    def blocks(self) -> Iterator[LineBlock]:
        """All blocks of all segments."""
        for path in self.segments():
            yield from blocks(path)

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Each line from the one of index `start` on, with its index."""
        skipped, index = start // SEGMENT, start // SEGMENT * SEGMENT  # segments but the last are full
        for path in self.segments()[skipped:]:
            for block in blocks(path):
                if index + len(block.lines) > start:
                    yield from ((at, line) for at, line in enumerate(block.lines, index) if at >= start)
                index += len(block.lines)

    def first_line(self) -> bytes:
        """The line that should be the genesis; empty where there is none."""
        block = next(blocks(self._folder.segment(0)), None)
        return block.lines[0] if block is not None and block.lines else b""

    def records(self, *types: str, start: int = 0) -> Iterator[Record]:
        """Entries of some types (of all, if none is named), each parsed strictly. What is no entry is left out."""
        wanted = {name.encode() for name in types}
        for _, line in self.lines(start):
            if wanted and type_of(line) not in wanted:
                continue
            try:
                entry = read_line(line)
            except CodecError:
                continue  # the verifier has a finding for it
            yield record_of(entry)

    def checked(self, *types: str, newest: int | None = None) -> Iterator[Record]:
        """Entries of some types of a log that this process has opened, and so checked.

        :param newest: how many segments to look at, from the end; None for all.
        :raises AuditLogError: if an entry was damaged since.
        """
        start = 0 if newest is None else max(0, len(self.segments()) - newest) * SEGMENT
        wanted = {name.encode() for name in types}
        for index, line in self.lines(start):
            if type_of(line) in wanted:
                yield record_of(parse(line, f"{self._folder.path} entry {index}"))

    def backwards(self, *types: str) -> Iterator[Record]:
        """What `checked` gives, newest first, one segment after the other: who stops early reads no more of the log.

        :raises AuditLogError: if an entry was damaged since.
        """
        wanted = {name.encode() for name in types}
        for path in reversed(self.segments()):
            lines = [line for block in blocks(path) for line in block.lines]
            first = int(path.stem) * SEGMENT
            for index in reversed(range(len(lines))):
                if type_of(lines[index]) in wanted:
                    yield record_of(parse(lines[index], f"{self._folder.path} entry {first + index}"))


def parse(line: bytes, where: str) -> dict[str, Any]:
    """An entry that was checked before, without checking it again.

    :raises AuditLogError: if it is no JSON object any more.
    """
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise AuditLogError(
            "an entry cannot be read although the log was checked before",
            where=where,
            hint="keep the folder as it is and run `privacy-audit verify` on a copy",
        ) from error
    return entry


def record_of(entry: dict[str, Any]) -> Record:
    """The part of an entry that readers ask for."""
    return Record(
        seq=entry["seq"],
        ts=entry["ts"],
        boot=entry["boot"],
        type=entry["type"],
        run=entry["run"],
        round=entry["round"],
        body=entry["body"],
    )


def _gap(what: str, folder: LogFolder) -> AuditLogError:
    hint = "were older ones archived? that folder must be reachable; an auditor names it with --segments"
    return AuditLogError(what, where=str(folder.segments), hint=hint)


class LogFollower:
    """Reads on in a log that grows; each line is looked at once.

    :ivar size: how many entries were read so far.
    """

    def __init__(self, path: Path) -> None:
        self._folder = LogFolder(path)
        self._segment = self._offset = self.size = 0
        self._newest = b""

    @property
    def newest_ms(self) -> int:
        """The time of the last entry that was read; 0 where there was none."""
        return int(parse(self._newest, f"{self._folder.path} entry {self.size - 1}")["ts"]) if self._newest else 0

    def new_entries(self, *types: str) -> Iterator[dict[str, Any]]:
        """The entries of some types that were added since the last call. A line that is being written waits."""
        wanted = {name.encode() for name in types}
        for index, line in self.new_lines():
            if type_of(line) in wanted:
                yield parse(line, f"{self._folder.path} entry {index}")

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line that was added since the last call, with its index.

        :raises AuditLogError: if the next segment is not here and a later one is: silence would look like an idle log.
        """
        while (path := self._folder.segment(self._segment)).exists():
            # Asked before reading: where the next segment exists, nothing is added to this one any more.
            full = self._folder.segment(self._segment + 1).exists()
            for block in blocks(path, self._offset):
                if block.torn or not block.lines:
                    continue
                index, self._offset = self.size, block.end
                self.size, self._newest = index + len(block.lines), block.lines[-1]
                yield from enumerate(block.lines, index)
            if not full:
                return
            self._segment, self._offset = self._segment + 1, 0
        if any(int(path.stem) > self._segment for path in self._folder.segments.glob("[0-9]*.jsonl")):
            raise _gap(f"segment {self._segment} is not here, and later ones are", self._folder)
