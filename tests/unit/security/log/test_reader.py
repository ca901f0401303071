"""The one reader of logs: every byte once, whatever the blocks; long lines in little memory; a growing log followed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazaret.errors import AuditLogError
from security.audit.verify import verify
from security.crypto.merkle import leaf_hash
from security.log import reader
from security.log.machine import Heartbeat
from security.log.reader import LogFollower, LogReader, blocks
from security.log.schema import MAX_LINE
from tests.support.audit_attacks import Lonely, Tampering

LONG = MAX_LINE + 5


@settings(deadline=None)  # a busy disk is no fault of the reader
@given(
    data=st.binary(max_size=60).map(lambda drawn: drawn.replace(b"\x01", b"\n").replace(b"\x02", b"\n")),
    size=st.integers(1, 9),
    longest=st.integers(1, 12),
)
def test_blocks_are_the_file_whatever_their_size(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int, longest: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "segment"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BLOCK", size)
        patch.setattr(reader, "MAX_LINE", longest)
        patch.setattr(reader, "_KEPT", longest + 1)
        found = list(blocks(path))
    assert b"".join(block.raw for block in found) == data
    *whole, rest = data.split(b"\n")
    expected = [*whole, rest] if rest else whole
    lines = [line for block in found for line in block.lines]
    assert [leaf for block in found for leaf in block.leaves()] == [leaf_hash(line) for line in expected]
    for line, true in zip(lines, expected, strict=True):
        assert line == true or (line == true[: longest + 1] and len(true) > longest)
    assert [block.torn for block in found if block.torn] == [True] * bool(rest)
    for block in found:
        assert block.offset == 0 or data[block.offset - 1 : block.offset] == b"\n"
        assert block.end == len(data) - len(rest) if block.torn else data[: block.end].endswith(b"\n") or not block.end
        assert block.lines == [] or data[block.offset :].startswith(block.lines[0])


def test_a_line_of_many_blocks_is_held_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK", 4096)
    path = tmp_path / "segment"
    path.write_bytes(b"a\n" + b"x" * 10 * LONG + b"\nb\n")
    found = list(blocks(path))
    lines = [line for block in found for line in block.lines]
    assert [len(line) for line in lines] == [1, MAX_LINE + 1, 1]
    assert [leaf for block in found for leaf in block.leaves()][1] == leaf_hash(b"x" * 10 * LONG)
    assert max(len(block.raw) for block in found) == 4096


@pytest.mark.parametrize("block", [4096, reader.BLOCK])
def test_findings_do_not_depend_on_the_blocks(lonely: Lonely, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signed log with a line that is too long: one malformed entry, and the tree is right nevertheless."""
    lonely.log.close()
    tampering = Tampering(lonely.folder)
    tampering.write([*tampering.lines, b"x" * LONG])
    monkeypatch.setattr(reader, "BLOCK", block)
    found = {finding.code: finding for finding in verify(lonely.folder, lonely.keys).findings}
    assert found["MalformedEntry"].detail == f"entry {len(tampering.lines) - 1}: longer than {MAX_LINE} bytes"
    assert found.keys().isdisjoint({"RootMismatch", "LeavesMismatch"})


def test_lines_begin_where_they_are_asked_to(lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("log.machine", "log.store", "log.reader"):
        monkeypatch.setattr(f"security.{name}.SEGMENT", 8)
    monkeypatch.setattr(reader, "BLOCK", 700)
    for _ in range(30):
        lonely.log.append(Heartbeat(size=lonely.log.size))
    every = Tampering(lonely.folder).lines
    log = LogReader(lonely.folder)
    for start in range(len(every) + 2):
        assert list(log.lines(start)) == list(enumerate(every))[start:]
    beats = [record.seq for record in log.records("heartbeat")]
    assert [record.seq for record in log.checked("heartbeat")] == beats
    assert [record.seq for record in log.checked("heartbeat", newest=1)] == [seq for seq in beats if seq >= 32]
    assert [record.seq for record in log.checked("heartbeat", newest=99)] == beats
    assert [record.seq for record in log.backwards("heartbeat")] == beats[::-1]
    assert [record.seq for record in log.records(start=33)] == list(range(33, len(every)))
    event = next(log.records("heartbeat")).event()
    assert event.json.encode() in every[beats[0]]


def test_a_gap_is_an_error_unless_it_is_asked_for(lonely: Lonely) -> None:
    lonely.log.close()
    folder = Tampering(lonely.folder).folder
    folder.segment(0).rename(folder.segment(1))
    with pytest.raises(AuditLogError, match="gaps"):
        list(LogReader(lonely.folder).lines())
    assert len(list(LogReader(lonely.folder, gaps=True).lines())) == lonely.log.size


def test_what_is_no_entry_is_left_out_or_an_error_that_says_where(lonely: Lonely) -> None:
    lonely.log.append(Heartbeat(size=1))
    lonely.log.close()
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    tampering.write([*lines, b'{"ts":1,"type":"heartbeat","v":1}', b'{"ts":,"type":"heartbeat","v":1}'])
    log = LogReader(lonely.folder)
    assert [record.seq for record in log.records("heartbeat")] == [len(lines) - 1]
    assert log.first_line() == lines[0]
    tampering.write([*lines, lines[-1], b'{"ts":,"type":"heartbeat","v":1}'])
    with pytest.raises(AuditLogError, match=f"entry {len(lines) + 1}"):
        list(log.checked("heartbeat"))


def test_a_growing_log_is_followed_across_segments(lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("log.machine", "log.store"):
        monkeypatch.setattr(f"security.{name}.SEGMENT", 8)
    follower, seen = LogFollower(lonely.folder), list[int]()
    for step in range(25):
        lonely.log.append(Heartbeat(size=lonely.log.size))
        if step % 3 == 0:
            seen += [entry["seq"] for entry in follower.new_entries("heartbeat", "segment.sealed")]
            assert follower.size == lonely.log.size
            assert follower.newest_ms == lonely.clock.now_ms()
    assert seen == [record.seq for record in LogReader(lonely.folder).records("heartbeat", "segment.sealed")]
    assert list(follower.new_entries("heartbeat")) == []


def test_a_segment_that_fills_up_while_it_is_read_is_not_left_early(lonely: Lonely) -> None:
    """The next segment may appear between the last read of this one and the question whether it exists."""
    lonely.log.close()
    folder = Tampering(lonely.folder).folder
    lines = Tampering(lonely.folder).lines
    folder.segment(0).write_bytes(lines[0] + b"\n")
    follower = LogFollower(lonely.folder)
    going = follower.new_entries("log.genesis")
    assert next(going)["seq"] == 0
    folder.segment(0).write_bytes(b"".join(line + b"\n" for line in lines))
    folder.segment(1).write_bytes(lines[-1] + b"\n")
    assert list(going) == []
    list(follower.new_entries())
    assert follower.size == len(lines) + 1


def test_no_log_at_all(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path)
    assert list(follower.new_entries("egress")) == []
    assert (follower.size, follower.newest_ms) == (0, 0)
    assert list(LogReader(tmp_path).lines()) == []
