"""The coordinator of the bench, in a process of its own: messages come and go as bytes over two pipes.

A request is ``operation || TLV(site) || TLV(parcel)``; the answer is any number of ``1 || TLV(site) || TLV(parcel)``,
then 0. Parcels are those of the network.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from benchmarks.secagg_parts import COORDINATOR, Federation, Floor, Stopwatch, peak_bytes, warm_memory
from protos.stream_end import StreamEnd
from security.clock import SystemClock
from security.crypto import encoding, merkle
from security.crypto.masking import Accumulator
from security.identity.membership import BareMandate
from security.secagg import messages
from security.secagg import state as states
from security.secagg.coordinator import attempt as machine
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.spool import FileSpool
from security.secagg.coordinator.unmasking import Opening
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import Advanced, Effect, Send, SendFrames
from security.secagg.fields import Wire
from security.secagg.transitions import CoordinatorState as State

START, RECEIVE, CLOSE, REPORT = range(4)
LISTENERS = 2  # sites whose results are carried out: every one holds a model of its own, and all are in one process


def read_exactly(pipe: BinaryIO, count: int) -> bytes:
    data = pipe.read(count)
    if len(data) != count:
        raise EOFError("the other process of the bench has gone")
    return data


def read_tlv(pipe: BinaryIO) -> bytes:
    return read_exactly(pipe, int.from_bytes(read_exactly(pipe, 4), "big"))


class Shell:
    """Carries out what the machine asks for, and measures it."""

    def __init__(self, federation: Federation, folder: Path, workers: int) -> None:
        self.federation = federation
        self.watch = Stopwatch()
        self.watched()
        core = CoordinatorCore(
            mandate=BareMandate(federation.policy, federation.signer(COORDINATOR)),
            spool=FileSpool(folder),
            clock=SystemClock(),
            workers=workers,
        )
        head = federation.log_head(COORDINATOR)
        self.streams = {name: StreamEnd.of_coordinator(head) for name in federation.names}
        self.attempt = CoordinatorAttempt(core, federation.plan(), federation.model())
        self.baseline = peak_bytes()
        self.verdict = -1
        self._peak = 0
        self._warmed: State | None = None

    def watched(self) -> None:
        self.watch.watch(Accumulator, "add")
        self.watch.watch(Accumulator, "unmask")
        self.watch.watch(Opening, "open")
        self.watch.watch(machine, "opened_masks")
        self.watch.watch(merkle, "leaf_hash")
        self.watch.watch(FileSpool, "write")
        self.watch.watch(FileSpool, "seal")
        self.watch.watch(states, "next_state")
        self.watch.watch(states, "state_hash")

    def run(self, operation: int, site: str, data: bytes) -> Iterator[tuple[str, bytes]]:
        with self.watch.time("whole"):
            if operation == START:
                effects = self.attempt.start()
            elif operation == CLOSE:
                effects = self.attempt.close_step()
            else:
                with self.watch.time("decode"):
                    message = self.streams[site].decode(data)
                effects = self.attempt.receive(site, message)
        # Before the first frame is added, and before the next state is made.
        if self.attempt.state is not self._warmed and self.attempt.state in (State.UPLOADING, State.UNMASKING):
            self._warmed = self.attempt.state
            self._peak = max(self._peak, peak_bytes())
            warm_memory(2, self.federation.layout.byte_length)
        for effect in effects:
            yield from self.carry_out(effect)

    def carry_out(self, effect: Effect) -> Iterator[tuple[str, bytes]]:
        listening = self.federation.names[-LISTENERS:]
        if isinstance(effect, Send) and (effect.to in listening or not isinstance(effect.message, messages.Result)):
            yield self._to(effect.to or "", effect.message)
        elif isinstance(effect, SendFrames) and effect.to in listening:
            for frame in effect.frames():
                yield self._to(effect.to, frame)
        elif isinstance(effect, Advanced):
            self.verdict = int(effect.verdict)

    def _to(self, site: str, message: Wire) -> tuple[str, bytes]:
        return site, self.streams[site].encode(message)

    def report(self) -> dict[str, float]:
        peak = max(self._peak, peak_bytes())
        layout, total = self.federation.layout, self.attempt.uploads.total()
        floor = Floor(layout.words, layout.dtype)
        for _ in range(9):
            floor.measure()
            # Once more in warm memory; the first time is among these as well.
            states.next_state(layout, self.federation.model(), total, survivors=self.federation.sites)
        watch = self.watch
        return {
            "verdict": self.verdict,
            "peak_bytes": peak,
            "baseline_bytes": self.baseline,
            "unmask_ms": 1e3 * watch.total("unmask", "open", "opened_masks"),
            "add_ms": 1e3 * watch.total("add"),
            "merkle_ms": 1e3 * watch.total("leaf_hash", "state_hash"),
            "spool_ms": 1e3 * watch.total("write", "seal"),
            "next_state_ms": 1e3 * watch.median("next_state"),
            "decode_ms": 1e3 * watch.total("decode"),
            "whole_ms": 1e3 * watch.total("whole"),
            "keystream_ms": 1e3 * floor.keystream,
            "one_add_ms": 1e3 * floor.add,
        }


def main() -> None:
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(read_tlv(incoming))
    federation = Federation(bytes.fromhex(settings["seed"]), settings["sites"], settings["params"])
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(federation, Path(folder), settings["workers"])
        while True:
            operation = read_exactly(incoming, 1)[0]
            site, data = read_tlv(incoming).decode(), read_tlv(incoming)
            if operation == REPORT:
                outgoing.write(encoding.tlv(json.dumps(shell.report()).encode()))
                outgoing.flush()
                return
            for to, message in shell.run(operation, site, data):
                outgoing.write(b"\1" + encoding.text(to) + encoding.tlv(message))
            outgoing.write(b"\0")
            outgoing.flush()


if __name__ == "__main__":
    main()
