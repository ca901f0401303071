"""One pass over all entries of a log: form, order, time, tree, what left, and whether the rules in force were kept.

This is the verifier's hot loop. A line is hashed and matched against its type's expression; only what a check needs
is turned into numbers. On a large log this costs less than reading the same lines with `json.loads`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from security.audit.agreement import EVER, NEVER, Agreement, Agreements
from security.audit.checkpoints import TreeCheck, VerifiedCheckpoint
from security.audit.completeness import OF_AN_AGENT, RECEIPTED, IsolationBook, RoundBook, SettingsBook, round_key
from security.audit.conformance import RULES, breaches
from security.audit.egress_ledger import EgressLedger, possible
from security.audit.findings import Findings
from security.log.egress import LEAST_UNIFORMITY, MASKED, due_bytes, permitted
from security.log.keys import EpochChain
from security.log.machine import HEARTBEAT_MS, SEGMENT, SKEW_MS
from security.log.reader import LineBlock, blocks, record_of
from security.log.roster import SITE
from security.log.schema import MAX_LINE, SCHEMAS, explain
from security.log.store import LogFolder
from security.log.witness import HeldCheckpoint

SILENCE_MS: Final = 2 * HEARTBEAT_MS
UNDATED: Final = frozenset({"control", "checkpoint"})  # a member whose certificate ended may still say so
UPLOAD: Final = "UploadFrame"
ACKNOWLEDGEMENT: Final = '"Ack"'  # belongs to a result, not to a round, so every one counts
RECONNECT: Final = '"Open"'  # the first message of every connection

# Everything that a rule or the steps of a round are judged by, besides what has a handler of its own.
JUDGED: Final = frozenset(RULES) | {"dp.committed", "egress.blocked", "operator.action", "run.stopped"}


Match = re.Match[str]


class Scan:
    """The state of the pass. `run` reads everything; the rest are its results."""

    def __init__(
        self,
        folder: LogFolder,
        signed: Sequence[VerifiedCheckpoint],
        chain: EpochChain | None,
        findings: Findings,
        agreements: Agreements,
        held: Sequence[HeldCheckpoint] = (),
    ) -> None:
        self.folder = folder
        self.findings = findings
        self.size = 0
        self.rotations: list[int] = []
        self.commitments: dict[int, str] = {}
        self.ledger = EgressLedger(findings)
        self.types: dict[str, int] = {}
        self.manifest: str | None = None
        self.uploads: list[tuple[int, str, str]] = []  # the first vector of each run and round: entry, run, round
        self.given: dict[str, int] = {}  # for each other log, the largest checkpoint of it that was cosigned here
        self.cosigned: dict[int, dict[str, int]] = {}  # own checkpoints: who cosigned each, and the entry that says so
        self.shown: dict[str, int] = {}  # sizes of own checkpoints that travelled with messages, and the first entry
        self.torn: dict[str, int] = {}  # digests of incomplete writes that were set aside, and the entry that says so
        self.erased: list[range] = []  # entries whose annexes were erased
        self.running = False  # whether the agent was started and has not said that it stops
        self.rounds = RoundBook(findings)
        self._agreements = agreements
        self._sites = max((len(one.rules.sites) for one in agreements.versions if one.rules), default=0)
        self._adopted_at: list[int] = []  # entries from which on another manifest is in force,
        self._in_force: list[Agreement | None] = []  # and which one
        self.tree = TreeCheck(folder, signed, held, findings)
        self._chain = chain
        self._origin = f'"{findings.log}"'
        self._offset = self._heartbeats = 0
        self._epoch = "0"
        self._boot = self._role = ""
        self._boots: set[str] = set()
        self._digest_of_last = ""
        self._settings = SettingsBook(findings)
        self.isolation = IsolationBook(findings)
        self._ts = self._latest = self._mono = self._sealed_mono = self._floor = 0
        self._names: frozenset[str] | set[str] = frozenset()
        self._destinations: frozenset[str] = frozenset()
        self._windows: Mapping[str, tuple[int, int]] = {}
        self._own_window = EVER
        self._modulus = ""
        self._sent: set[tuple[str, str, str]] = set()
        self._due: dict[tuple[str, str], str] = {}
        self._segment = sha256()
        self._handlers: Mapping[str, Callable[[Match, int], None]] = {
            "log.genesis": self._genesis,
            "manifest.adopted": self._adopted,
            "agent.start": self._start,
            "agent.stop": lambda *_: setattr(self, "running", False),
            "aggregate.published": lambda _, seq: self._check_dates(self._own_window, "a sum", seq),
            "config.changed": self._settings.config_changed,
            "policy.changed": self._settings.policy_changed,
            "clock.adjusted": self._adjusted,
            "annex.erased": self._erased,
            "cosigned": self._cosigned,
            "trainer.isolated": self.isolation.said,
            "train.done": self.isolation.trained,
            "egress": self._egress,
            "heartbeat": lambda *_: setattr(self, "_heartbeats", self._heartbeats + 1),
            "ingress": self._ingress,
            "ingress.partial": self._partial,
            "key.rotated": self._rotated,
            "log.recovered": self._recovered,
            "net.counter": self.ledger.counter,
            "receipt": self._receipt,
            "segment.sealed": self._sealed,
            "software.differs": lambda at, n: findings.add("SoftwareDiffers", f"entry {n}: {at['body_count']}", n),
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
            if self.size > (number + 1) * SEGMENT:
                self.findings.add("SegmentMissing", f"{path.name} has more lines than a segment", self.size)
                break
            if self.size != (number + 1) * SEGMENT and number + 1 < len(files):
                self.findings.add("SegmentMissing", f"{path.name} is not full although another follows", self.size)
        self.tree.close(self._latest)
        self.rounds.close(self._role)

    @property
    def adoptions(self) -> tuple[tuple[int, str], ...]:
        """From which entry on which manifest was in force."""
        digests = [one.digest if one else "" for one in self._in_force]
        return tuple(zip(self._adopted_at, digests, strict=True))

    def agreement_at(self, seq: int) -> Agreement | None:
        """The manifest version in force when an entry was written."""
        place = bisect_right(self._adopted_at, seq)
        return self._in_force[place - 1] if place else None

    def _block(self, block: LineBlock) -> None:
        lines, leaves, done = block.lines, block.leaves(), 0
        entry = self._torn if block.torn else self._entry
        while done < len(lines):
            if self.size == self.tree.stop and self.tree.reach(self._latest):
                self._sealed_mono = self._mono
            upto = min(done + self.tree.stop - self.size, len(lines))  # as far as the next checkpoint
            self.tree.pending += leaves[done:upto]
            for line in lines[done:upto]:
                entry(line)
            done = upto

    def _torn(self, _line: bytes) -> None:
        self.findings.add("MalformedEntry", f"entry {self.size} is torn", self.size)
        self.size += 1

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
        # `seq` counts without gaps (section 2). After one finding, the numbers are held against the new offset.
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
        if not self.running and kind in OF_AN_AGENT:
            self.findings.add("StepMissing", f"entry {seq}: {kind}, and no agent.start before it in this boot", seq)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(match, seq)
        if kind in JUDGED:
            self._judge(text, seq)

    def _judge(self, text: str, seq: int) -> None:
        """Hold one entry against the rules in force. Few entries come here: messages and receipts do not."""
        # By its place in the file: what number it states was judged before.
        record = record_of(json.loads(text) | {"seq": seq})
        agreement = self._in_force[-1] if self._in_force else None
        rules = agreement.rules if agreement else None
        self.rounds.take(record, rules)
        if rules is not None:
            for code, detail in breaches(record, rules):
                where = "" if record.round is None else f"round {record.round}, "
                self.findings.add(code, f"{where}entry {seq}: {detail}", seq)

    def _take_force(self, digest: str, seq: int) -> None:
        """From here on, entries are judged under another manifest version."""
        self.manifest = digest
        agreement = self._agreements.of(digest)
        self._adopted_at.append(seq)
        self._in_force.append(agreement)
        self._due.clear()
        self._sent.clear()
        self.isolation.required = agreement is not None and agreement.roster.isolation == "required"
        self._names = {*agreement.roster.by_name, *agreement.roster.by_origin} if agreement else frozenset()
        rules = agreement.rules if agreement else None
        self._destinations = frozenset(f'"{key}"' for key in rules.destinations) if rules else frozenset()
        self._windows = rules.certificates if rules else {}
        party = agreement.roster.by_origin.get(self.findings.log) if agreement else None
        # Whom the manifest does not list has no certificate under it. Where rules are not known, nobody has.
        self._own_window = self._windows.get(party.name if party else "", NEVER) if rules else EVER
        self._modulus = f"{rules.modulus_bits}" if rules else ""
        if agreement is None:
            self.findings.add("ManifestMissing", f"the manifest in force from entry {seq} on is not here", seq)
        elif rules is None:
            self.findings.add("RulesUnknown", f"no manifest was given for entries from {seq} on", seq)

    def _time(self, kind: str, boot: str, wall: int, mono: int, match: Match, seq: int) -> None:
        # Time goes back only with an entry that says by how much, and not by more than that (sections 2 and 10,
        # Tolerances).
        if wall < self._ts and (kind != "clock.adjusted" or int(match["body_offset_ms"]) > wall - self._ts + SKEW_MS):
            self.findings.add("ClockRollback", f"entry {seq} is {self._ts - wall} ms earlier than the one before", seq)
        # A cosignature that was logged before this entry states a time at which a witness saw what precedes it (section
        # 6).
        if wall < self._floor and kind != "clock.adjusted":
            self.findings.add("Backdated", f"entry {seq} is earlier than a cosignature logged before it", seq)
        self._ts = wall
        if wall > self._latest:
            self._latest = wall
        if boot == self._boot:
            if mono < self._mono:
                self.findings.add("MonotonicRollback", f"entry {seq} went back by {self._mono - mono} ms", seq)
            # A running agent writes a heartbeat every 15 minutes (section 4): twice that in silence, and entries are
            # missing.
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
        if self.running:
            self.findings.add("UncleanStop", f"a boot ends at entry {seq - 1} without agent.stop", seq - 1)
            self.running = False
        self.ledger.started(mono)
        self.rounds.reconnected()
        self._boots.add(boot)
        self._boot, self._sealed_mono = boot, mono

    # Types with a check of their own

    def _genesis(self, match: Match, seq: int) -> None:
        if seq:
            self.findings.add("GenesisInvalid", f"a second genesis at entry {seq}", seq)
        self._take_force(match["body_manifest"][1:-1], seq)
        self._settings.policy = match["body_policy"]
        self._role = match["body_role"][1:-1]
        self.ledger.bounded = self._role == SITE

    def _adopted(self, match: Match, seq: int) -> None:
        if match["body_old"][1:-1] != self.manifest:
            self.findings.add("ManifestMismatch", f"entry {seq} replaces another manifest than the one in force", seq)
        before = self._in_force[-1] if self._in_force else None
        self._take_force(match["body_new"][1:-1], seq)
        after = self._in_force[-1]
        if before and after and after.version <= before.version and after is not before:
            detail = f"entry {seq} goes from version {before.version} to {after.version}"
            self.findings.add("ManifestMismatch", detail, seq)
        if after and after.rules and match["body_version"] != str(after.version):
            self.findings.add("ManifestMismatch", f"entry {seq} names another version than the file has", seq)

    def _start(self, match: Match, seq: int) -> None:
        self.running = True
        self.isolation.started()
        self._settings.started(match["body_config"], seq)

    def _adjusted(self, match: Match, seq: int) -> None:
        self.findings.add("ClockAdjusted", f"entry {seq}: by {match['body_offset_ms']} ms", seq)
        # A step back that is owned up to moves the lower bound with it; witnesses' times still bound it from above.
        self._floor = min(self._floor, self._ts)

    def _cosigned(self, match: Match, seq: int) -> None:
        if match["body_origin"] != self._origin:
            given = match["body_origin"][1:-1]
            self.given[given] = max(self.given.get(given, 0), int(match["body_size"]))
            return
        self.cosigned.setdefault(int(match["body_size"]), {})[match["body_cosigner"][1:-1]] = seq
        seen = int(match["body_timestamp"]) * 1000
        if abs(seen - self._ts) > SKEW_MS:
            # Else a witness with a false clock could make an honest log look backdated.
            self.findings.add("WitnessClock", f"entry {seq}: {abs(seen - self._ts) // 1000} s from the log's time", seq)
        else:
            self._floor = max(self._floor, seen - SKEW_MS)

    def _erased(self, match: Match, seq: int) -> None:
        # What comes later was not there to be erased.
        self.erased.append(range(int(match["body_first"]), min(int(match["body_last"]), seq) + 1))

    def _recovered(self, match: Match, seq: int) -> None:
        self.findings.add("TornWrite", f"{match['body_bytes']} bytes were set aside before entry {seq}", seq)
        self.torn[match["body_quarantined"][1:-1]] = seq

    def _receipt(self, match: Match, seq: int) -> None:
        self.rounds.receipt(self.ledger.receipt(match, seq))

    def _egress(self, match: Match, seq: int) -> None:
        run, number, destination = match.group("run", "round", "body_destination")
        msg_id, message, data_class, size, expected, masked, evenness, modulus, head, shape = match.group(
            "body_msg_id",
            "body_message",
            "body_data_class",
            "body_bytes",
            "body_expected_bytes",
            "body_masked",
            "body_uniformity",
            "body_modulus_bits",
            "body_head",
            "body_shape",
        )
        self._check_class(message, data_class, seq)
        self._check_length(message, shape, size, expected, int(head), seq)
        is_vector = data_class == f'"{MASKED}"'
        if is_vector:
            self._check_mask(message, masked, evenness, modulus, seq)
        if head not in self.shown and int(head) <= seq:
            self.shown[head] = seq
        if message == RECONNECT:
            self.ledger.reconnected()
            self.rounds.reconnected()
        elif message in RECEIPTED:
            self.rounds.await_receipt(round_key(run, number), message[1:-1], msg_id, match["body_sha256"], seq)
        self.ledger.add(data_class[1:-1], int(size), msg_id)
        if destination not in self._destinations and self._destinations:
            self.findings.add("DestinationUnknown", f"entry {seq} went to {destination[1:17]}", seq)
        if (run, number, message) not in self._sent or message == ACKNOWLEDGEMENT:
            self._sent.add((run, number, message))
            self._first_sent(run, number, message[1:-1], seq, is_vector=is_vector)

    def _check_class(self, message: str, data_class: str, seq: int) -> None:
        if permitted().get(message[1:-1]) != data_class[1:-1]:
            self.findings.add("ForbiddenMessage", f"{message[1:-1]} with {data_class[1:-1]} at entry {seq}", seq)

    def _check_length(self, message: str, shape: str, size: str, expected: str, head: int, seq: int) -> None:
        due = self._due.get((message, shape))
        if due is None:
            due = self._due[message, shape] = self._recompute(message, shape, seq)
        if size != due or expected != due or head > seq:
            self.findings.add("SurplusBytes", f"{message[1:-1]} at entry {seq}: {size} bytes, {due} due", seq)

    def _check_mask(self, message: str, masked: str, evenness: str, modulus: str, seq: int) -> None:
        even = evenness != "null" and LEAST_UNIFORMITY <= float(evenness[1:-1]) <= 1
        if masked != "true" or not even or modulus != (self._modulus or modulus):
            what = f"masked {masked}, uniformity {evenness}, modulus {modulus}"
            self.findings.add("UnmaskedVector", f"{message[1:-1]} at entry {seq}: {what}", seq)

    def _first_sent(self, run: str, number: str, message: str, seq: int, *, is_vector: bool) -> None:
        """A message type for the first time in a round: enough for the steps of a round and the dates of a member."""
        if is_vector:
            self.uploads.append((seq, run, number))
        if permitted().get(message) not in UNDATED:
            self._check_dates(self._own_window, message, seq)
        agreement = self._in_force[-1] if self._in_force else None
        rules = agreement.rules if agreement else None
        self.rounds.sent(round_key(run, number), message, seq, rules)

    def _ingress(self, match: Match, seq: int) -> None:
        sender, message = match["body_sender"][1:-1], match["body_message"][1:-1]
        if message == UPLOAD:
            self.rounds.arrived(round_key(*match.group("run", "round")), sender)
        if self._windows:
            self._check_sender(sender, message, seq)

    def _check_sender(self, sender: str, message: str, seq: int) -> None:
        window = self._windows.get(sender)
        if message not in permitted():
            self.findings.add("ForbiddenMessage", f"entry {seq}: {message[:40]} of {sender}, which no site sends", seq)
        if window is None:
            self.findings.add("SenderUnlisted", f"entry {seq}: {message} of {sender}", seq)
        elif permitted().get(message) not in UNDATED:
            self._check_dates(window, f"{message} of {sender}", seq)

    def _check_dates(self, window: tuple[int, int], what: str, seq: int) -> None:
        if not window[0] - SKEW_MS <= self._ts <= window[1] + SKEW_MS:
            detail = f"entry {seq}: {what}, outside of the dates of the certificate"
            self.findings.add("CertificateInvalid", detail, seq)

    def _partial(self, match: Match, seq: int) -> None:
        sender = match["body_sender"][1:-1]
        if self._windows and sender not in self._windows:
            self.findings.add("SenderUnlisted", f"entry {seq}: {match['body_bytes']} bytes of {sender}", seq)

    def _recompute(self, message: str, shape: str, seq: int) -> str:
        """The size equation, from the numbers in the entry; a name it counts must be one of the roster's."""
        numbers = json.loads(shape)
        agreement = self._in_force[-1] if self._in_force else None
        due = agreement.roster.vector_bytes if agreement else None
        if due is not None and numbers["vector_bytes"] != due:
            # The size equation starts from the vector's length, which the manifest fixes: an entry cannot choose it.
            detail = f"entry {seq} counts on a vector of {numbers['vector_bytes']} bytes, {due} are due"
            self.findings.add("LayoutMismatch", detail, seq)
        named = numbers["named"]
        if named is not None and self._names and named not in self._names:
            return "none"
        if self._sites and not possible(message[1:-1], numbers, self._sites, int(self._epoch)):
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
