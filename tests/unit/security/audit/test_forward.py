"""Messages of RFC 5424 and frames of RFC 5425; a position that is written when, and only when, entries were taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lazaret.errors import AuditLogError, CannotDecide, ConfigError, RollbackDetected
from security.audit import forward
from security.audit.cli import main
from security.audit.forward import Forwarder, Position, frame, message
from security.crypto.merkle import leaf_hash
from security.log import events as ev
from security.log.machine import Heartbeat
from security.log.schema import MAX_COUNT
from tests.support.audit_attacks import Lonely, Tampering
from tests.support.audit_logs import small_federation

# RFC 5424, section 6, for the parts that this program writes.
SYSLOG = re.compile(
    rb"<([0-9]{1,3})>1 [0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}Z [!-~]{1,255} [!-~]{1,48} - [!-~]{1,32} "
    rb'\[lazaret@32473 origin="[^"\\\]]+" seq="[0-9]+" leaf="[0-9a-f]{64}"(?: again="1")?\] (\{.*\})'
)


class Taken:
    """A collector that takes frames, or refuses them while it is told to."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.marked: list[int] = []
        self.refuses = False
        self.dies = False

    def __call__(self, data: bytes, begin: Callable[[], None]) -> None:
        if self.refuses:
            raise CannotDecide("no")
        begin()
        while data:
            length, _, data = data.partition(b" ")
            text, data = data[: int(length)], data[int(length) :]
            match = SYSLOG.fullmatch(text)
            assert match is not None and match[1] in (b"110", b"108"), text[:200]
            entry = json.loads(match[2])
            assert f'leaf="{leaf_hash(match[2]).hex()}"'.encode() in text, "the line travels byte for byte"
            self.numbers.append(entry["seq"])
            if b' again="1"] ' in text:
                self.marked.append(entry["seq"])
        if self.dies:
            raise KeyboardInterrupt  # it has everything, and nobody notes that


def _grow(lonely: Lonely, count: int) -> None:
    for _ in range(count):
        lonely.clock.advance(5)
        lonely.log.append(ev.OperatorAction(command='größe "]\\ <&>', role="operator"))


def test_frames_have_their_length_in_bytes() -> None:
    assert frame("ä".encode()) == b"2 \xc3\xa4"


def test_blocked_messages_are_warnings(tmp_path: Path) -> None:
    lonely = Lonely(tmp_path)
    lonely.log.append(ev.EgressBlocked(rule="x", message="Ready", bytes=1, sha256=None))
    line = Tampering(lonely.folder).lines[-1]
    assert message(line, json.loads(line)).startswith(b"<108>1 ")


def test_what_may_be_a_repetition_is_marked_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lonely, taken, state = Lonely(tmp_path / "log"), Taken(), tmp_path / "position"
    size = lonely.log.size
    for batch in range(4):
        _grow(lonely, 5)
        sending = Forwarder(lonely.folder, state, taken)
        taken.dies = batch % 2 == 0
        if taken.dies:
            with pytest.raises(KeyboardInterrupt):
                sending.step()
        while not taken.dies and sending.step():
            pass
    doubtful = [*range(size + 5), *range(size + 10, size + 15)]
    assert taken.marked == doubtful, "what was under way when it was killed, and no more"
    unmarked = list(taken.numbers)
    for seq in taken.marked:
        unmarked.remove(seq)
    assert sorted(unmarked) == list(range(lonely.log.size)), "each entry once, without the mark"
    monkeypatch.setattr(forward, "AGAIN", "")
    _grow(lonely, 1)
    taken.dies = True
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Forwarder(lonely.folder, state, taken).step()
    assert taken.marked == doubtful, "twin: nothing tells the repetition from the first"


def test_a_time_that_no_calendar_has_is_none(tmp_path: Path) -> None:
    lonely = Lonely(tmp_path)
    lonely.clock.wall = MAX_COUNT - 1000
    lonely.log.append(Heartbeat(size=1))
    line = Tampering(lonely.folder).lines[-1]
    assert message(line, json.loads(line)).startswith(b"<110>1 - ")


def test_each_entry_once_in_order_and_only_what_was_taken(tmp_path: Path) -> None:
    lonely, taken, state = Lonely(tmp_path / "log"), Taken(), tmp_path / "position"
    _grow(lonely, forward.MOST_ENTRIES + 30)
    sending = Forwarder(lonely.folder, state, taken)
    assert sending.step() == forward.MOST_ENTRIES
    taken.refuses = True
    with pytest.raises(CannotDecide):
        sending.step()
    noted = Position.read(state)
    assert noted is not None and noted.size == forward.MOST_ENTRIES
    taken.refuses = False
    again = Forwarder(lonely.folder, state, taken)  # as after a kill
    while again.step():
        pass
    _grow(lonely, 3)
    assert again.step() == 3 and again.step() == 0
    assert taken.numbers == list(range(lonely.log.size))


def test_line_that_is_being_written_waits(tmp_path: Path) -> None:
    lonely, taken = Lonely(tmp_path / "log"), Taken()
    segment = lonely.folder / "segments" / "00000000.jsonl"
    with segment.open("ab") as file:
        file.write(b'{"actor":"ag')
    sending = Forwarder(lonely.folder, tmp_path / "position", taken)
    while sending.step():
        pass
    assert taken.numbers == list(range(lonely.log.size))


@pytest.mark.parametrize("line", [b"{}", b"[]", b"\xff", b'{"seq":1}'])
def test_what_is_no_entry_is_not_sent(line: bytes, tmp_path: Path) -> None:
    lonely, taken = Lonely(tmp_path / "log"), Taken()
    with (lonely.folder / "segments" / "00000000.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(AuditLogError, match="no entry"):
        Forwarder(lonely.folder, tmp_path / "position", taken).step()
    assert taken.numbers == []


def test_another_log_or_an_older_one_is_refused(tmp_path: Path) -> None:
    lonely, taken, state = Lonely(tmp_path / "log"), Taken(), tmp_path / "position"
    _grow(lonely, 9)
    Forwarder(lonely.folder, state, taken).step()
    other = Lonely(tmp_path / "other", "linz")
    _grow(other, 20)
    with pytest.raises(RollbackDetected):
        Forwarder(other.folder, state, taken).step()
    Tampering(lonely.folder).write(Tampering(lonely.folder).lines[:5])
    with pytest.raises(RollbackDetected):
        Forwarder(lonely.folder, state, taken).step()
    assert len(taken.numbers) == 10, "nothing more was sent"


def test_two_forwarders_do_not_share_a_position(tmp_path: Path) -> None:
    with forward.only_one(tmp_path / "p"), pytest.raises(ConfigError), forward.only_one(tmp_path / "p"):
        pass


def forward_command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_forward_refuses_unclear_orders(tmp_path: Path) -> None:
    federation = small_federation(tmp_path / "federation")
    log = federation.members["graz"].folder
    assert forward_command("forward", log).exit_code == 2
    for target, position in (("nowhere", tmp_path / "p"), ("a:b", tmp_path / "p"), ("a:6514", log / "p")):
        done = forward_command("forward", log, "--to", target, "--ca", federation.root_key, "--position", position)
        assert done.exit_code == 2, target
    (tmp_path / "p").write_text("no position\n")
    done = forward_command(
        "forward", log, "--to", "127.0.0.1:9", "--ca", federation.root_key, "--position", tmp_path / "p", "--once"
    )
    assert done.exit_code == 2 and "not a position" in done.output
