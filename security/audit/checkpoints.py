"""The signed heads of one log: read, checked against keys, and sorted into epochs and witnesses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lazaret.errors import CodecError, VerificationFailed
from security.audit.findings import Findings
from security.log.keys import EpochChain, Roster
from security.log.note import Checkpoint, KeyType, Note, VerifierKey, head_of
from security.log.store import LogFolder, is_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One head whose signatures verify: who signed it, as which epoch, and which witnesses saw it when."""

    checkpoint: Checkpoint
    note: Note
    epochs: tuple[int, ...]
    cosigners: Mapping[VerifierKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """All heads, smallest first, and the newest one with a full quorum."""

    heads: tuple[Head, ...]
    witnessed: Head | None
    missing: tuple[str, ...]

    @property
    def newest(self) -> Head | None:
        """The largest head."""
        return self.heads[-1] if self.heads else None


def read_heads(folder: LogFolder, chain: EpochChain | None, roster: Roster | None, findings: Findings) -> Heads:
    """Check every signature on every head. What fails is a finding and is left out."""
    origin = findings.log
    cosigners = roster.cosigners_for(origin) if roster else ()
    keys = (*(chain.keys if chain else ()), *cosigners)
    strange = [path.name for path in folder.checkpoints.glob("*") if not _is_head_name(path.name)]
    for name in strange:
        findings.add("BadHead", f"checkpoints/ holds {name[:40]!r}, which is no head")
    found = []
    for size in folder.head_sizes():
        where = f"checkpoints/{size}.note"
        head = _read_head(folder.head_path(size).read_bytes(), where, keys, chain, roster, findings)
        if head is not None and head.checkpoint.size != size:
            findings.add("BadHead", f"{where} is a head of size {head.checkpoint.size}")
        elif head is not None:
            found.append(head)
    witnessed, missing = _newest_witnessed(found, roster, origin)
    _check_cosigned_note(folder, found, keys, chain, roster, findings)
    return Heads(heads=tuple(found), witnessed=witnessed, missing=missing)


def _is_head_name(name: str) -> bool:
    return name.endswith(".note") and is_size(name.removesuffix(".note")) is not None


def _read_head(
    data: bytes,
    where: str,
    keys: Sequence[VerifierKey],
    chain: EpochChain | None,
    roster: Roster | None,
    findings: Findings,
) -> Head | None:
    try:
        note = Note.parse(data)
        checkpoint = head_of(note)
    except CodecError as error:
        findings.add("BadHead", f"{where}: {error.message}")
        return None
    if checkpoint.origin != findings.log:
        findings.add("BadHead", f"{where} is a head of another log")
        return None
    if chain is None:
        return Head(checkpoint=checkpoint, note=note, epochs=())
    try:
        verified = note.verify(keys)
    except VerificationFailed as error:
        findings.add("BadSignature", f"{where}: {error.message}")
        return None
    # Without a roster the witnesses' keys are unknown, and C2SP says to ignore unknown signers.
    if roster is not None and note.unknown(keys):
        findings.add("UnknownSigner", f"{where} is also signed by {note.unknown(keys)[0].name[:60]!r}")
    epochs = tuple(number for number, key in enumerate(chain.keys) if key in verified)
    if not epochs:
        findings.add("BadSignature", f"{where} is not signed by the log itself")
        return None
    times = {key: time for key, time in verified.items() if key.kind is KeyType.COSIGNER and time is not None}
    return Head(checkpoint=checkpoint, note=note, epochs=epochs, cosigners=times)


def _newest_witnessed(found: Sequence[Head], roster: Roster | None, origin: str) -> tuple[Head | None, tuple[str, ...]]:
    """The newest head with a quorum, or else what the newest one lacks.

    A witness of a larger head has checked that it extends the smaller one, so its cosignature counts for both.
    """
    if roster is None or not found:
        return None, ("the manifest",)
    missing: tuple[str, ...] = ()
    seen: dict[VerifierKey, int] = {}
    for head in reversed(found):
        for key, time in head.cosigners.items():
            seen.setdefault(key, time)
        lacking = roster.missing_for_quorum(origin, seen)
        if not lacking:
            return Head(checkpoint=head.checkpoint, note=head.note, epochs=head.epochs, cosigners=dict(seen)), ()
        missing = lacking
    return None, missing


def _check_cosigned_note(
    folder: LogFolder,
    found: Iterable[Head],
    keys: Sequence[VerifierKey],
    chain: EpochChain | None,
    roster: Roster | None,
    findings: Findings,
) -> None:
    """cosigned.note is what a party hands out as proof: it must be one of the heads, and genuine throughout."""
    if not folder.cosigned.exists():
        return
    head = _read_head(folder.cosigned.read_bytes(), "cosigned.note", keys, chain, roster, findings)
    if head is not None and all(other.checkpoint != head.checkpoint for other in found):
        if head.checkpoint.size > max((other.checkpoint.size for other in found), default=0):
            findings.add("TruncatedTail", f"cosigned.note speaks of {head.checkpoint.size} entries")
        else:
            findings.add("BadHead", "cosigned.note is none of the heads in checkpoints/")


def check_epochs(heads: Heads, rotations: Sequence[int], findings: Findings) -> None:
    """A head inside an epoch is signed by that epoch's key only; the one at a rotation by both.

    :param rotations: the entry numbers of `key.rotated`, in order.
    """
    sealed = set()
    for head in heads.heads:
        size = head.checkpoint.size
        epoch = sum(entry < size for entry in rotations)
        boundary = epoch > 0 and rotations[epoch - 1] == size - 1
        due = (epoch - 1, epoch) if boundary else (epoch,)
        if head.epochs and head.epochs != due:
            signed = " and ".join(map(str, head.epochs))
            findings.add("WrongEpochKey", f"head {size} is signed by epoch {signed}, due is {due}", size - 1)
        if boundary:
            sealed.add(size - 1)
    for number, entry in enumerate(rotations):
        if entry not in sealed:
            findings.add("EpochUnsealed", f"no head of size {entry + 1} seals epoch {number}", entry)


# ----------------------------------------
# Bytes that left, by data class, and whether the kernel's own count agrees.
#
# A reading covers one run of the agent since its start. It may be behind the log, since an entry is written before its
# bytes leave, but not behind what the coordinator has acknowledged; and it is above the log by what TLS and HTTP/2
# add, which is known well enough to leave no room for anything worth hiding.

# What the transport adds to the messages, about half as much again as measured with gRPC over TLS 1.3: a share of what
# is sent (records and frames of 16 kB) and of what is received (windows are opened anew), headers and prefix of each
# message, the handshake of each connection with both certificates, and pings.
FRAMING_OUT: Final = 0.003
FRAMING_IN: Final = 0.0003
PER_MESSAGE: Final = 100
PER_CONNECTION: Final = 4096
PER_SECOND: Final = 4
# What a connection carries between the meter's last look and its sudden end is not counted.
UNSEEN_PER_CONNECTION: Final = 256 * 1024


class EgressLedger:
    """Totals of what was logged as sent, and the comparison with what was counted."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.counted = 0
        self.readings = 0
        self.covered = 0
        self.bounded = True  # not so at a coordinator: it logs what arrives, and anybody may knock at its port
        self._waiting: dict[str, int] = {}  # messages of this connection without a receipt
        self.started(0)

    def started(self, mono: int) -> None:
        """The agent has started: the kernel counts from zero, and what was under way before is nobody's business."""
        self._since = mono
        self._out = self._in = self._opened = self._connections = 0
        self._logged = self._sent = self._acknowledged = self._read = 0
        self._waiting.clear()

    def reconnected(self) -> None:
        """A new connection; nothing of the one before will be acknowledged any more."""
        self._connections += 1
        self._waiting.clear()

    def add(self, data_class: str, size: int, msg_id: str) -> None:
        """One message."""
        self.messages[data_class] += 1
        self.bytes[data_class] += size
        self._logged += size
        self._sent += 1
        self._waiting[msg_id] = size

    def receipt(self, match: re.Match[str], seq: int) -> None:
        """The coordinator has a message."""
        size = self._waiting.pop(match["body_msg_id"], None)
        if size is None:
            self.findings.add("ReceiptInvalid", f"entry {seq}: for a message that did not leave just before", seq)
        else:
            self._acknowledged += size

    def counter(self, match: re.Match[str], seq: int) -> None:
        """Compare the totals since the start at one reading of the network's counter."""
        out, into, opened, mono = match.group("body_bytes_out", "body_bytes_in", "body_connections", "mono_ms")
        self.counted += int(out)
        self.readings += 1
        self.covered, self._read = self.covered + self._logged - self._read, self._logged
        self._out, self._in, self._opened = self._out + int(out), self._in + int(into), self._opened + int(opened)
        least = self._acknowledged - self._connections * UNSEEN_PER_CONNECTION
        most = self._logged + self._overhead(int(mono) - self._since)
        if self.bounded and not least <= self._out <= most:
            self.findings.add(
                "UnloggedTraffic",
                f"at entry {seq} the network counted {self._out} bytes out since the start; the log explains "
                f"{self._logged}, which with TLS and HTTP/2 is at most {most}",
                seq,
            )

    def _overhead(self, mono: int) -> int:
        shares = FRAMING_OUT * self._logged + FRAMING_IN * self._in
        return int(shares + PER_MESSAGE * self._sent + PER_CONNECTION * self._opened + PER_SECOND * mono / 1000)

    @property
    def total(self) -> int:
        """All bytes logged as sent."""
        return self.bytes.total()

    @property
    def count(self) -> int:
        """All messages logged as sent."""
        return self.messages.total()
