"""One pass over all entries of a log: form, order, time, tree, and what left.

This is the verifier's hot loop. A line is hashed and matched against its type's expression; only what a check needs
is turned into numbers. On a large log this costs less than reading the same lines with `json.loads`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from security.audit.checkpoints import Checkpoints
from security.audit.egress_ledger import EgressLedger
from security.audit.findings import Findings
from security.crypto.merkle import HASH_SIZE, CompactRange
from security.log.egress import LEAST_UNIFORMITY, MASKED, due_bytes, permitted
from security.log.keys import EpochChain
from security.log.machine import HEARTBEAT_MS, SEGMENT
from security.log.reader import LineBlock, blocks
from security.log.roster import SITE
from security.log.schema import MAX_LINE, SCHEMAS, explain
from security.log.store import LogFolder
from security.log.witness import HeldCheckpoint

SKEW_MS: Final = 5 * 60 * 1000
SILENCE_MS: Final = 2 * HEARTBEAT_MS
QUOTE: Final = '"'
RECONNECT: Final = '"Open"'  # the first message of every connection

Match = re.Match[str]


class Scan:
    """The state of the pass. `run` reads everything; the rest are its results."""

    def __init__(
        self,
        folder: LogFolder,
        checkpoints: Checkpoints,
        chain: EpochChain | None,
        findings: Findings,
        held: Sequence[HeldCheckpoint] = (),
        names: Collection[str] = (),
    ) -> None:
        self.folder = folder
        self.findings = findings
        self.size = 0
        self.root = CompactRange()
        self.rotations: list[int] = []
        self.commitments: dict[int, str] = {}
        self.ledger = EgressLedger(findings)
        self.types: dict[str, int] = {}
        self.manifest: str | None = None
        self.latest_at: dict[int, int] = {}  # for each checkpoint, the latest time among the entries it covers
        self.rounds_after_witness: set[str] = set()
        self.vector_sizes: dict[int, int] = {}  # under the manifest in force: each length, and an entry that has it
        self._checkpoints = {one.checkpoint.size: one for one in checkpoints.signed}
        self._held: dict[int, list[HeldCheckpoint]] = {}
        for other in held:
            self._held.setdefault(other.checkpoint.size, []).append(other)
        self._stops = iter([*sorted({*self._checkpoints, *self._held}), 1 << 62])
        self._stop = next(self._stops)
        self._witnessed = checkpoints.witnessed.checkpoint.size if checkpoints.witnessed else 0
        self._chain = chain
        self._origin = f'"{findings.log}"'
        self._pending: list[bytes] = []
        self._offset = self._fits = 0
        self._epoch = "0"
        self._heartbeats = 0
        self._boot = ""
        self._boots: set[str] = set()
        self._running = False
        self._config = self._policy = ""
        self._isolation_known = False
        self.open_trainers: list[int] = []  # under the manifest in force: entries of processes with a way out
        self._ts = self._latest = self._mono = self._sealed_mono = self._floor = 0
        self._names = names
        self._due: dict[tuple[str, str], str] = {}
        self._segment = sha256()
        self._leaves = folder.leaves.open("rb") if folder.leaves.exists() else io.BytesIO()
        self._handlers: Mapping[str, Callable[[Match, int], None]] = {
            "log.genesis": self._genesis,
            "manifest.adopted": self._adopted,
            "agent.start": self._start,
            "agent.stop": self._stop_said,
            "config.changed": self._config_changed,
            "policy.changed": self._policy_changed,
            "clock.adjusted": self._adjusted,
            "cosigned": self._cosigned,
            "trainer.isolated": self._isolated,
            "train.done": self._trained,
            "egress": self._egress,
            "heartbeat": self._heartbeat,
            "key.rotated": self._rotated,
            "log.recovered": self._recovered,
            "net.counter": self.ledger.counter,
            "receipt": self.ledger.receipt,
            "segment.sealed": self._sealed,
        }

    def run(self, files: list[Path]) -> None:
        """Read every segment."""
        for number, path in enumerate(files):
            if number:
                self._digest_of_last = self._segment.hexdigest()
                self._segment = sha256()
            for block in blocks(path):
                self._segment.update(block.raw)
                self._block(block)
            if self.size != (number + 1) * SEGMENT and number + 1 < len(files):
                self.findings.add("SegmentMissing", f"{path.name} is not full although another follows", self.size)
        self._flush()
        while self._stop <= self.size:
            self._reach_checkpoint()
        self._check_leaves_end()

    def _block(self, block: LineBlock) -> None:
        lines, leaves, done = block.lines, block.leaves(), 0
        entry = self._torn if block.torn else self._entry
        while done < len(lines):
            if self.size == self._stop:
                self._reach_checkpoint()
            upto = min(done + self._stop - self.size, len(lines))  # as far as the next checkpoint
            self._pending += leaves[done:upto]
            for line in lines[done:upto]:
                entry(line)
            done = upto

    def _torn(self, _line: bytes) -> None:
        self.findings.add("MalformedEntry", f"entry {self.size} is torn", self.size)
        self.size += 1

    _digest_of_last = ""

    def _entry(self, line: bytes) -> None:
        seq = self.size
        self.size = seq + 1
        try:
            text = line.decode()
        except UnicodeDecodeError:
            text = ""
        kind = text[text.rfind('"', 0, -8) + 1 : -8]
        schema = SCHEMAS.get(kind)
        match = schema.line.fullmatch(text) if schema is not None and len(line) <= MAX_LINE else None
        if match is None:
            self.findings.add("MalformedEntry", f"entry {seq}: {explain(line)}", seq)
            return
        written, origin, epoch, boot, wall, mono, commitment = match.group(
            "seq", "origin", "epoch", "boot", "ts", "mono_ms", "annex_commit"
        )
        if written != str(seq + self._offset):
            self.findings.add("SequenceGap", f"entry {seq} says it is number {written}", seq)
            self._offset = int(written) - seq
        if origin != self._origin:
            self.findings.add("ForeignEntry", f"entry {seq} is of another log", seq)
        if epoch != self._epoch:
            self.findings.add("WrongEpochKey", f"entry {seq} says epoch {epoch}, not {self._epoch}", seq)
            self._epoch = epoch
        if commitment != "null":
            self.commitments[seq] = commitment[1:-1]
        self._time(kind, boot, int(wall), int(mono), match, seq)
        self.types[kind] = self.types.get(kind, 0) + 1
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(match, seq)

    def _time(self, kind: str, boot: str, wall: int, mono: int, match: Match, seq: int) -> None:
        if wall < self._ts and (kind != "clock.adjusted" or int(match["body_offset_ms"]) > wall - self._ts + SKEW_MS):
            self.findings.add("ClockRollback", f"entry {seq} is {self._ts - wall} ms earlier than the one before", seq)
        if wall < self._floor and kind != "clock.adjusted":
            self.findings.add("Backdated", f"entry {seq} is earlier than a cosignature logged before it", seq)
        self._ts = wall
        if wall > self._latest:
            self._latest = wall
        if boot == self._boot:
            if mono < self._mono:
                self.findings.add("MonotonicRollback", f"entry {seq} went back by {self._mono - mono} ms", seq)
            elif mono - self._mono > SILENCE_MS:
                self.findings.add("HeartbeatGap", f"{(mono - self._mono) // 60_000} minutes of silence", seq)
            elif mono - self._sealed_mono > SILENCE_MS:
                self.findings.add("HeartbeatGap", f"no head for {(mono - self._sealed_mono) // 60_000} minutes", seq)
                self._sealed_mono = mono
        else:
            self._new_boot(boot, mono, seq)
        self._mono = mono

    def _new_boot(self, boot: str, mono: int, seq: int) -> None:
        if boot in self._boots:
            self.findings.add("MonotonicRollback", f"entry {seq} goes back to an earlier boot", seq)
        if self._running:
            self.findings.add("UncleanStop", f"a boot ends at entry {seq - 1} without agent.stop", seq - 1)
            self._running = False
        self.ledger.started(mono)
        self._boots.add(boot)
        self._boot, self._sealed_mono = boot, mono

    # Types with a check of their own

    def _genesis(self, match: Match, seq: int) -> None:
        if seq:
            self.findings.add("GenesisInvalid", f"a second genesis at entry {seq}", seq)
        self.manifest = match["body_manifest"][1:-1]
        self._policy = match["body_policy"]
        self.ledger.bounded = match["body_role"] == f'"{SITE}"'

    def _adopted(self, match: Match, seq: int) -> None:
        if match["body_old"][1:-1] != self.manifest:
            self.findings.add("ManifestMismatch", f"entry {seq} replaces another manifest than the one in force", seq)
        self.manifest = match["body_new"][1:-1]
        self.vector_sizes.clear()
        self.open_trainers.clear()
        self._due.clear()

    def _start(self, match: Match, seq: int) -> None:
        self._running, self._isolation_known = True, False
        if self._config not in ("", match["body_config"]):
            self.findings.add("SettingsUnannounced", f"entry {seq} starts with another configuration", seq)
        self._config = match["body_config"]
        if match["body_insecure"] != "[]":
            self.findings.add("InsecureOption", f"entry {seq}: {match['body_insecure'][:200]}", seq)

    def _stop_said(self, _match: Match, _seq: int) -> None:
        self._running = False

    def _isolated(self, match: Match, seq: int) -> None:
        """The site's own rule is judged here, the manifest's by `verify`."""
        self._isolation_known = True
        if match["body_keys"] == "true" or (match["body_connection"] == "true" and match["body_ranks"] != "true"):
            self.open_trainers.append(seq)
            code = "IsolationWeak" if match["body_asked"] == '"required"' else "NotIsolated"
            open_to = f"connection {match['body_connection']}, keys {match['body_keys']}"
            self.findings.add(code, f"entry {seq}: {open_to}", seq)
        elif match["body_ranks"] == "true":
            self.findings.add("RanksConnected", f"entry {seq}", seq)

    def _trained(self, _match: Match, seq: int) -> None:
        if not self._isolation_known:
            self.findings.add("IsolationMissing", f"entry {seq}: no trainer.isolated since the start", seq)

    def _config_changed(self, match: Match, seq: int) -> None:
        self._changed("configuration", self._config or match["body_old"], match, seq)
        self._config = match["body_new"]

    def _policy_changed(self, match: Match, seq: int) -> None:
        self._changed("policy", self._policy, match, seq)
        self._policy = match["body_new"]

    def _changed(self, what: str, before: str, match: Match, seq: int) -> None:
        if match["body_old"] != before:
            self.findings.add("SettingsUnannounced", f"entry {seq} replaces another {what} than the last one", seq)
        self.findings.add("SettingsChanged", f"entry {seq}: {what}, by {match['body_who'][:80]}", seq)

    def _adjusted(self, match: Match, seq: int) -> None:
        self.findings.add("ClockAdjusted", f"entry {seq}: by {match['body_offset_ms']} ms", seq)
        # A step back that is owned up to moves the lower bound with it; witnesses' times still bound it from above.
        self._floor = min(self._floor, self._ts)

    def _cosigned(self, match: Match, _seq: int) -> None:
        if match["body_origin"] == self._origin:
            self._floor = max(self._floor, int(match["body_timestamp"]) * 1000 - SKEW_MS)

    def _heartbeat(self, _match: Match, _seq: int) -> None:
        self._heartbeats += 1

    def _recovered(self, match: Match, seq: int) -> None:
        self.findings.add("TornWrite", f"{match['body_bytes']} bytes were set aside before entry {seq}", seq)

    def _egress(self, match: Match, seq: int) -> None:
        msg_id, message, data_class, size, expected, masked, evenness, head, shape = match.group(
            "body_msg_id",
            "body_message",
            "body_data_class",
            "body_bytes",
            "body_expected_bytes",
            "body_masked",
            "body_uniformity",
            "body_head",
            "body_shape",
        )
        if permitted().get(message[1:-1]) != data_class[1:-1]:
            self.findings.add("ForbiddenMessage", f"{message[1:-1]} with {data_class[1:-1]} at entry {seq}", seq)
        due = self._due.get((message, shape))
        if due is None:
            due = self._due[message, shape] = self._recompute(message, shape, seq)
        if size != due or expected != due or int(head) > seq:
            self.findings.add("SurplusBytes", f"{message[1:-1]} at entry {seq}: {size} bytes, {due} due", seq)
        is_vector = data_class == f'"{MASKED}"'
        if is_vector and (masked != "true" or evenness == "null" or float(evenness[1:-1]) < LEAST_UNIFORMITY):
            detail = f"{message[1:-1]} at entry {seq}: masked {masked}, uniformity {evenness.strip(QUOTE)}"
            self.findings.add("UnmaskedVector", detail, seq)
        if message == RECONNECT:
            self.ledger.reconnected()
        self.ledger.add(data_class[1:-1], int(size), msg_id)
        if seq >= self._witnessed and is_vector:
            self.rounds_after_witness.add(match["round"])

    def _recompute(self, message: str, shape: str, seq: int) -> str:
        """The size equation, from the numbers in the entry; a name it counts must be one of the roster's."""
        numbers = json.loads(shape)
        self.vector_sizes.setdefault(numbers["vector_bytes"], seq)
        named = numbers["named"]
        if named is not None and self._names and named not in self._names:
            return "none"
        return str(due_bytes(message[1:-1], self.findings.log, numbers))

    def _rotated(self, match: Match, seq: int) -> None:
        old, new, epoch = int(self._epoch), int(self._epoch) + 1, match["body_epoch"]
        keys = self._chain.keys if self._chain else ()
        if epoch != str(new):
            self.findings.add("EpochChain", f"entry {seq} begins epoch {epoch} after {old}", seq)
        elif self._chain and (
            new >= len(keys) or match["body_old_vkey"] != f'"{keys[old]}"' or match["body_new_vkey"] != f'"{keys[new]}"'
        ):
            self.findings.add("EpochChain", f"entry {seq} names other keys than were endorsed", seq)
        if not self._heartbeats:
            self.findings.add("EpochWithoutHeartbeat", f"epoch {old} ends at entry {seq} without one", seq)
        self.rotations.append(seq)
        self._epoch, self._heartbeats = epoch, 0

    def _sealed(self, match: Match, seq: int) -> None:
        segment, digest = match.group("body_segment", "body_sha256")
        if seq % SEGMENT or int(segment) != seq // SEGMENT - 1 or digest != f'"{self._digest_of_last}"':
            self.findings.add("SegmentMismatch", f"entry {seq} seals segment {segment}", seq)

    # Tree, checkpoints and leaves.bin

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        self.root.extend(pending)
        self._compare_leaves(pending)

    def _compare_leaves(self, pending: list[bytes]) -> None:
        kept = self._leaves.read(HASH_SIZE * len(pending))
        if kept == b"".join(pending):
            return
        start = self.size - len(pending)
        for index, leaf in enumerate(pending):
            mine = kept[index * HASH_SIZE : (index + 1) * HASH_SIZE]
            # The file is derived and not synced, so it may end early; but never below the newest checkpoint.
            if mine != leaf and (mine or start + index < max(self._checkpoints, default=0)):
                self.findings.add("LeavesMismatch", f"entry {start + index} has another hash", start + index)

    def _check_leaves_end(self) -> None:
        if self._leaves.read(1):
            self.findings.add("LeavesMismatch", "leaves.bin has hashes of entries that are not here", self.size)
        self._leaves.close()

    def _reach_checkpoint(self) -> None:
        self._flush()
        size, root, own = self._stop, self.root.root(), self._checkpoints.get(self._stop)
        if own is not None:
            if root == own.checkpoint.root:
                self._fits = size
            else:
                between = f"a change between entries {self._fits} and {size - 1}"
                self.findings.add("RootMismatch", f"head {size} has another root: {between}", max(size - 1, 0))
            self.latest_at[size] = self._latest
            self._sealed_mono = self._mono
        for other in self._held.get(size, ()):
            if root != other.checkpoint.root:
                self._contradicted(other, size)
        self._stop = next(self._stops)

    def _contradicted(self, other: HeldCheckpoint, size: int) -> None:
        """Entries that differ from what a witness saw: changed afterwards, or signed as another history?"""
        own = self._checkpoints.get(size)
        agrees = own is not None and own.checkpoint.root == other.checkpoint.root
        if agrees or "RootMismatch" in self.findings:
            self.findings.add("RootMismatch", f"a witness saw other entries up to {size}", max(size - 1, 0))
        else:
            self.findings.add("Fork", f"a witness holds another history of {size} entries", max(size - 1, 0))
