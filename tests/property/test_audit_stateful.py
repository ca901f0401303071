"""An honest log in any order of events is clean; an adversary's change of what was witnessed is found by its name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from security.audit.verify import verify
from security.log import events as ev
from security.log.witness import HeldCheckpoint
from tests.support.audit_attacks import Lonely, Tampering, copied, weighty

POSITIONS = st.integers(0, 10_000)


class HonestAndAdversary(RuleBasedStateMachine):
    """The honest rules move one real log; the adversary's rules work on copies of it, with its live key in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="audit-stateful-"))
        self.copies = 0

    @initialize()
    def start(self) -> None:
        self.alone = Lonely(self.folder)
        self.watcher = self.alone.watcher(self.folder / "outside")
        self.held: HeldCheckpoint = self.alone.show(self.watcher)

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # Honest

    @rule(count=st.integers(1, 3), private=st.booleans())
    def append(self, count: int, private: bool) -> None:
        for _ in range(count):
            self.alone.clock.advance(100)
            annex = {"images": 812} if private else None
            self.alone.log.append(ev.OperatorAction(command="status", role="operator"), annex=annex)

    @rule()
    def checkpoint(self) -> None:
        self.alone.log.checkpoint()

    @rule()
    def cosign(self) -> None:
        self.alone.log.checkpoint()
        self.held = self.alone.show(self.watcher)

    @rule()
    def rotate(self) -> None:
        self.alone.log.rotate("epoch over")

    @rule(back=st.booleans())
    def restart(self, back: bool) -> None:
        self.alone.log.close()
        self.alone.clock.advance(1000)
        if back:
            self.alone.clock.wall -= 60_000
        self.alone.reopen().refuse_rollback([self.held])

    @rule(torn=st.binary(max_size=40))
    def crash(self, torn: bytes) -> None:
        """The process dies; half a line may be left at the end."""
        self.alone.log._writer.close()
        segment = Tampering(self.alone.folder).folder.segment(0)
        with segment.open("ab") as file:
            file.write(torn.replace(b"\n", b" "))
        self.alone.clock.advance(1000)
        self.alone.reopen().refuse_rollback([self.held])

    @invariant()
    def honest_log_is_clean(self) -> None:
        if hasattr(self, "alone"):
            codes = weighty(verify(self.alone.folder, self.alone.keys, [self.held]).findings)
            assert codes <= {"UnsealedTail"}, codes

    # Adversary: everything below the witnessed head, signed again with the live key where that helps

    def _attack(self, change: Callable[[Tampering, list[bytes]], None]) -> set[str]:
        self.copies += 1
        path = copied(self.alone.folder, self.folder / f"copy-{self.copies}")
        tampering = Tampering(path)
        change(tampering, tampering.lines)
        codes = weighty(verify(path, self.alone.keys, [self.held]).findings)
        shutil.rmtree(path)
        return codes

    def _witnessed(self, position: int) -> int:
        return position % self.held.checkpoint.size

    @rule(position=POSITIONS)
    def edit_an_entry(self, position: int) -> None:
        at = self._witnessed(position)

        def change(tampering: Tampering, lines: list[bytes]) -> None:
            tampering.edit(at, lambda entry: entry.update(actor="somebody else"))

        assert "RootMismatch" in self._attack(change)

    @rule(position=POSITIONS)
    def edit_and_sign_again(self, position: int) -> None:
        at = self._witnessed(position)

        def change(tampering: Tampering, lines: list[bytes]) -> None:
            tampering.edit(at, lambda entry: entry.update(actor="somebody else"))
            tampering.resign(self.alone.signer(self.alone.log.epoch))

        assert "Fork" in self._attack(change)

    @precondition(lambda self: self.held.checkpoint.size > 2)
    @rule(position=POSITIONS)
    def delete_and_renumber(self, position: int) -> None:
        at = 1 + self._witnessed(position) % (self.held.checkpoint.size - 1)

        def change(tampering: Tampering, lines: list[bytes]) -> None:
            tampering.write(tampering.renumber([*lines[:at], *lines[at + 1 :]]))
            tampering.resign(self.alone.signer(self.alone.log.epoch))

        codes = self._attack(change)
        assert codes & {"Fork", "TruncatedTail"}, codes

    @precondition(lambda self: self.held.checkpoint.size > 2)
    @rule(position=POSITIONS)
    def swap(self, position: int) -> None:
        at = self._witnessed(position) % (self.held.checkpoint.size - 1)

        def change(tampering: Tampering, lines: list[bytes]) -> None:
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
            tampering.write(lines)

        assert "SequenceGap" in self._attack(change)

    @rule(position=POSITIONS)
    def cut_the_tail(self, position: int) -> None:
        def change(tampering: Tampering, lines: list[bytes]) -> None:
            sizes = [size for size in tampering.folder.checkpoint_sizes() if size < self.held.checkpoint.size]
            if sizes:
                tampering.cut(sizes[position % len(sizes)])
            else:
                tampering.write([])

        codes = self._attack(change)
        assert codes & {"TruncatedTail", "SegmentMissing"}, codes

    @rule()
    def strip_every_head(self) -> None:
        def change(tampering: Tampering, lines: list[bytes]) -> None:
            for size in tampering.folder.checkpoint_sizes():
                tampering.folder.checkpoint_path(size).unlink()

        assert "Unsealed" in self._attack(change)

    @precondition(lambda self: self.alone.log.epoch > 0)
    @rule()
    def seal_an_old_epoch_with_the_new_key(self) -> None:
        def change(tampering: Tampering, lines: list[bytes]) -> None:
            tampering.resign(self.alone.signer(self.alone.log.epoch))

        assert "WrongEpochKey" in self._attack(change)

    @rule(position=POSITIONS, bit=st.integers(0, 7))
    def flip_a_bit(self, position: int, bit: int) -> None:
        def change(tampering: Tampering, lines: list[bytes]) -> None:
            segment = tampering.folder.segment(0)
            data = bytearray(segment.read_bytes())
            end = sum(len(line) + 1 for line in lines[: self.held.checkpoint.size])
            data[position % end] ^= 1 << bit
            segment.write_bytes(bytes(data))

        assert self._attack(change)


TestHonestAndAdversary = HonestAndAdversary.TestCase
TestHonestAndAdversary.settings = settings(
    max_examples=12,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
