"""What logging and verifying cost, as ratios taken in one process: to a bare synced write, and to a plain read.

The log that is verified is a real one: a site's rounds from invitation to check, a checkpoint every
`CHECKPOINT_EVERY` entries, a manifest's rules in force, and every check of `verify` on.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from security.audit.agreement import AgreedRules, Agreement, Agreements, Keys
from security.audit.compare import cross
from security.audit.verify import verify
from security.clock import Clock, ManualClock, SystemClock
from security.log.egress import due_bytes, permitted, recorded_shape
from security.log.events import (
    AgentStart,
    AgentStop,
    AggregatePublished,
    DataOpened,
    Egress,
    Ingress,
    ModelReceived,
    NetCounter,
    ReceiptReceived,
    RoundInvited,
    SecaggSurvivors,
    SecaggUnmasked,
    TrainDone,
    TrainerIsolated,
)
from security.log.machine import Heartbeat
from security.log.note import KeyType, NoteSigner, checkpoint_of
from security.log.opening import create_log
from security.log.roster import Party, Roster
from security.log.schema import Event, decimal
from security.log.store import Disk, LogFolder
from security.log.witness import Witness
from security.log.writer import AuditLog
from security.rng import SystemRandomness
from security.secagg import thresholds
from security.secagg.registry import Shape

CHECKPOINT_EVERY: Final = 85  # a checkpoint after every batch of messages: what a site's log has
STEP_MS: Final = 700
VECTOR_BYTES: Final = 16_000_000
ROUND_ENTRIES: Final = 1000


class _Unsynced(Disk):
    """For making a large log quickly; never for a real one."""

    def sync(self, descriptor: int) -> None:
        """Do not wait."""

    def publish(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        """Write in place."""
        path.write_bytes(data)
        path.chmod(mode)


def _parties(rng: SystemRandomness, sites: int = 3) -> tuple[Roster, list[tuple[Party, NoteSigner, NoteSigner]]]:
    made = []
    names = [(f"site-{chr(ord('a') + place)}", "site") for place in range(sites)]
    for name, role in (("hub", "coordinator"), *names):
        root = NoteSigner.from_seed(f"{name}.bench/audit", rng.bytes(32))
        cosigner = NoteSigner.from_seed(f"{name}.bench/witness", rng.bytes(32), KeyType.COSIGNER)
        party = Party(name=name, role=role, origin=root.key.name, root=root.key, cosigner=cosigner.key)
        made.append((party, root, cosigner))
    return Roster(parties=tuple(party for party, _, _ in made), vector_bytes=VECTOR_BYTES), made


def _create(path: Path, roster: Roster, party: Party, root: NoteSigner, clock: Clock, disk: Disk) -> AuditLog:
    return create_log(
        path,
        path.with_name(f"{path.name}-keys"),
        party=party,
        roster=roster,
        manifest=b"{}\n",
        policy="0" * 64,
        root=root,
        clock=clock,
        rng=SystemRandomness(),
        disk=disk,
    )


_SOME: Final = "be" * 32  # stands for every digest that the manifest and the log share


def _keys(roster: Roster) -> Keys:
    """Rules like those of a manifest without differential privacy, whose entries are two in a round."""
    names = [party.name for party in roster.parties]
    sites = len(roster.sites)
    colluders = thresholds.default_colluders(sites)
    rules = AgreedRules(
        run="bench",
        rounds=1 << 20,
        method="fednpr-per",
        configs=frozenset({_SOME}),
        layout=_SOME,
        initial_state=_SOME,
        initial_file=_SOME,
        modulus_bits=32,
        plugin=None,
        colluders=colluders,
        least_survivors=3,
        least_cohort=thresholds.least_cohort(c=colluders, m=3, roster=sites),
        max_rounds_unwitnessed=3,
        destinations=frozenset({_SOME}),
        certificates=dict.fromkeys(names, (0, 1 << 50)),
        ends_ms=1 << 50,
        sites=frozenset(party.name for party in roster.sites),
        purposes=frozenset({"model training"}),
        packages=frozenset({_SOME}),
        schemas=frozenset({_SOME}),
    )
    return Keys(agreements=Agreements(fixed=Agreement(digest="", roster=roster, version=1, rules=rules)), pinned=True)


@cache
def _length(message: str, frame: int) -> tuple[dict[str, Any], int]:
    cohort = ("site-a", "site-b", "site-c")
    shape = Shape(federation="bench", site="site-a", cohort=cohort, vector_bytes=VECTOR_BYTES, frame=frame)
    numbers = recorded_shape(shape)
    return numbers, due_bytes(message, shape.origin, numbers) or 0


def _entry(number: int, head: int) -> Egress | ReceiptReceived:
    """Messages and receipts in turn, as in a round."""
    ident, digest = f"{number // 2:032x}", sha256(number.to_bytes(8, "big")).hexdigest()
    if number % 2:
        return ReceiptReceived(msg_id=ident, head_size=head, head_root=digest, ingress=number, proof=digest)
    message = "UploadFrame" if number % 8 else ("Agree", "Unmask", "Ack")[number // 8 % 3]
    vector = message == "UploadFrame"
    shape, due = _length(message, number % 61)
    return Egress(
        msg_id=ident,
        message=message,
        data_class=permitted()[message],
        bytes=due,
        sha256=_SOME if vector else digest,  # a round has one vector
        expected_bytes=due,
        shape=shape,
        masked=vector,
        modulus_bits=32 if vector else None,
        uniformity=decimal(0.25 + number % 1000 / 2000) if vector else None,
        destination=_SOME,
        head=head,
    )


def _start() -> list[Event]:
    """What a site writes before its first round."""
    made = dict.fromkeys(("package", "dependencies", "proto", "config"), _SOME)
    walls = dict.fromkeys(("network_namespace", "seccomp", "landlock"), True)
    stated = dict.fromkeys(("change", "controller", "subjects", "categories", "retention"), "bench")
    return [
        AgentStart(version="bench", **made, image=None, sbom=None, insecure=()),
        TrainerIsolated(asked="best", **walls, connection=False, keys=False, ranks=False),
        DataOpened(fingerprint=_SOME, purpose="model training", legal_basis="consent", **stated),
    ]


def _begin(number: int, count: int = 3) -> list[Event]:
    """What a round writes before its first message."""
    agreed = {"context": f"{number:064x}", "cohort": _SOME, "config": _SOME}
    return [
        ModelReceived(model=_SOME, bytes=VECTOR_BYTES, layout=_SOME, sender=_SOME),
        TrainDone(method="fednpr-per", steps=40, wall_ms=60_000, artefacts=()),
        RoundInvited(method="fednpr-per", attempt=0, cohort_size=count, groups=None, rule="bench", **agreed),
    ]


def _end(number: int, names: tuple[str, ...] = ("site-a", "site-b", "site-c")) -> list[Event]:
    """What a round writes after its last message."""
    count, agreed = len(names), {"context": f"{number:064x}"}
    threshold = thresholds.quorum(n=count, c=thresholds.default_colluders(count), m=3)
    return [
        SecaggSurvivors(attempt=0, survivors=_SOME, count=count, threshold=threshold, dropouts=(), **agreed),
        SecaggUnmasked(attempt=0, self_mask=names, mask_key=(), **agreed),
    ]


def _counted(sent: int) -> NetCounter:
    return NetCounter(
        source="bench", coverage="network namespace", beside_out=0, connections=0, bytes_out=sent, bytes_in=0
    )


def make_log(folder: Path, entries: int, progress: Callable[[int], object]) -> tuple[Path, Roster]:
    """A log of about `entries` entries with checkpoints, epochs, segments and witnesses."""
    rng, clock = SystemRandomness(), ManualClock()
    roster, made = _parties(rng)
    party, root, _ = made[1]
    path = folder / "log"
    log = _create(path, roster, party, root, clock, _Unsynced())
    number = sent = 0
    for event in _start():
        log.append(event, run="bench" if isinstance(event, DataOpened) else None)
    while log.size < entries or number % 2:  # the last message has its receipt too
        clock.advance(STEP_MS)
        at = number // ROUND_ENTRIES
        if number % ROUND_ENTRIES == 0:
            for event in (*(_end(at - 1) if at else ()), *_begin(at)):
                log.append(event, run="bench", round=at - isinstance(event, SecaggSurvivors | SecaggUnmasked))
        event = _entry(number, checkpoint_of(log.newest_checkpoint).size)
        log.append(event, run="bench", round=at)
        sent += event.bytes if isinstance(event, Egress) else 0
        number += 1
        if number % CHECKPOINT_EVERY == 0:
            log.append(_counted(sent))
            log.tick()
            log.checkpoint()
            progress(log.size)
            sent = 0
    for event in _end(number // ROUND_ENTRIES):
        log.append(event, run="bench", round=number // ROUND_ENTRIES)
    log.append(Heartbeat(size=log.size))
    log.append(AgentStop(reason="bench"))
    log.checkpoint()
    for other, _, cosigner in made:
        if other is not party:
            witness = Witness(folder / other.name, lambda: roster, cosigner, clock, _Unsynced())
            log.add_cosignature(checkpoint_of(log.newest_checkpoint).size, witness.consider(log.submission(0)))
    log.close()
    return path, roster


def plain_read(path: Path) -> int:
    """What anybody would write: parse each line and hash it."""
    count = 0
    for file in sorted(LogFolder(path).segments.glob("*.jsonl")):
        with file.open("rb") as lines:
            for line in lines:
                json.loads(line)
                sha256(line).digest()
                count += 1
    return count


def bench_verify(folder: Path, entries: int, progress: Callable[[int], object]) -> dict[str, Any]:
    """Verify against a plain read of the same lines, in turns: medians of processor time."""
    path, roster = make_log(folder, entries, progress)
    keys = _keys(roster)
    plain, full, codes = [], [], set[str]()
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        count = plain_read(path)
        middle = time.process_time()
        found = verify(path, keys)
        full.append(time.process_time() - middle)
        plain.append(middle - start)
        codes |= {finding.code for finding in found.findings}
    return {
        "entries": count,
        "heads": len(found.checkpoints.signed),
        "epochs": found.epochs,
        "findings": sorted(codes),
        "plain_read_processor_s": round(statistics.median(plain), 3),
        "verify_processor_s": round(statistics.median(full), 3),
        "verify_over_plain_read": round(statistics.median(full) / statistics.median(plain), 3),
    }


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class _Counted(Disk):
    """Counts how often it is waited for."""

    syncs = 0

    def sync(self, descriptor: int) -> None:
        """One more."""
        self.syncs += 1
        super().sync(descriptor)


def _one_more(log: AuditLog) -> None:
    """A checkpoint over something new."""
    log.append(Heartbeat(size=log.size))
    log.checkpoint()


def bench_append(folder: Path, rounds: int) -> dict[str, Any]:
    """An entry of about 500 bytes with its sync, against a bare write and fsync of as many bytes, in turns: medians."""
    rng, disk = SystemRandomness(), _Counted()
    roster, made = _parties(rng)
    party, root, _ = made[1]
    log = _create(folder / "append", roster, party, root, SystemClock(), disk)
    bare, ours = list[float](), list[float]()
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    prepared = [_entry(2 * number + 1, 1) for number in range(rounds)]  # making up an event is not appending it
    before = LogFolder(folder / "append").segment(0).stat().st_size
    log.append(_entry(1, 1), run="bench", round=1)
    size = LogFolder(folder / "append").segment(0).stat().st_size - before

    blank = [rng.bytes(size) for _ in range(rounds)]  # nothing that a disk could store in less space

    def write_bare(number: int) -> None:
        os.write(descriptor, blank[number])
        os.fsync(descriptor)

    def write_entry(number: int) -> None:
        log.append(prepared[number], run="bench", round=1)

    syncs = disk.syncs
    for number in range(rounds):
        # In turns, and each first every other time: the disk's own work is then shared fairly.
        pair = [(write_bare, bare), (write_entry, ours)]
        for action, times in pair if number % 2 else reversed(pair):
            times.append(_timed(partial(action, number)))
    syncs = disk.syncs - syncs
    signed = [_timed(partial(_one_more, log)) for _ in range(rounds // 20)]
    os.close(descriptor)
    log.close()
    return {
        "entry_bytes": size,
        "bare_fsync_ms": round(statistics.median(bare) * 1000, 4),
        "append_ms": round(statistics.median(ours) * 1000, 4),
        "append_over_bare_fsync": round(statistics.median(ours) / statistics.median(bare), 3),
        "syncs_of_an_append": syncs / rounds,
        "checkpoint_ms": round(statistics.median(signed) * 1000, 4),
    }


# Many logs side by side


class _Logs:
    """A coordinator and sites whose logs fit together, written without waiting for the disk."""

    def __init__(self, folder: Path, sites: int) -> None:
        self.rng, self.clock = SystemRandomness(), ManualClock()
        self.roster, made = _parties(self.rng, sites)
        self.paths = [folder / party.name for party, _, _ in made]
        self.logs = [
            _create(path, self.roster, party, root, self.clock, _Unsynced())
            for path, (party, root, _) in zip(self.paths, made, strict=True)
        ]
        self.witnesses = [
            Witness(path, lambda: self.roster, cosigner, self.clock, _Unsynced())
            for path, (_, _, cosigner) in zip(self.paths, made, strict=True)
        ]
        self.hub, self.names = self.logs[0], tuple(party.name for party in self.roster.sites)
        for log in self.logs:
            for event in _start()[: None if log is not self.hub else 1]:
                log.append(event, run="bench" if isinstance(event, DataOpened) else None)

    def round(self, number: int) -> None:
        """One round of `CHECKPOINT_EVERY` messages of each site."""
        ends = _end(number, self.names)
        for name, log in zip(self.names, self.logs[1:], strict=True):
            self.clock.advance(STEP_MS)
            for event in _begin(number, len(self.names)):
                log.append(event, run="bench", round=number)
            self._messages(name, log, number)
            for event in ends:
                log.append(event, run="bench", round=number)
        published = AggregatePublished(inputs=len(self.names), groups=None, sum=_SOME, model=_SOME, previous=_SOME)
        for event in (*ends, published):
            self.hub.append(event, run="bench", round=number)

    def _messages(self, name: str, log: AuditLog, number: int) -> None:
        sent, total = [], 0
        for place in range(CHECKPOINT_EVERY):
            message = _entry(2 * (number * CHECKPOINT_EVERY + place), checkpoint_of(log.newest_checkpoint).size)
            log.append(message, run="bench", round=number)
            fields = {key: message.body()[key] for key in ("msg_id", "message", "bytes", "sha256")}
            sent.append((fields["msg_id"], self.hub.append(Ingress(sender=name, **fields), run="bench", round=number)))
            total += fields["bytes"]
        head = checkpoint_of(self.hub.checkpoint())
        for msg_id, entry in sent:
            shown = {"head_root": head.root.hex(), "msg_id": msg_id}
            shown["proof"] = sha256(b"".join(self.hub.inclusion_path(entry, head.size))).hexdigest()
            log.append(ReceiptReceived(head_size=head.size, ingress=entry, **shown), run="bench", round=number)
        log.append(_counted(total))
        log.tick()
        log.checkpoint()

    def close(self) -> None:
        """Everybody stops, and everybody's last checkpoint is witnessed by all others."""
        for log in self.logs:
            log.append(Heartbeat(size=log.size))
            log.append(AgentStop(reason="bench"))
            log.checkpoint()
        for log in self.logs:
            for witness, other in zip(self.witnesses, self.logs, strict=True):
                if other is not log:
                    size = checkpoint_of(log.newest_checkpoint).size
                    log.add_cosignature(size, witness.consider(log.submission(0)))
            log.close()


def bench_cross(folder: Path, logs: int, entries: int, progress: Callable[[int], object]) -> dict[str, Any]:
    """Compare logs that have `entries` entries on average; the coordinator's is the largest."""
    made, number = _Logs(folder, logs - 1), 0
    while (size := sum(log.size for log in made.logs)) < logs * entries:
        made.round(number)
        number += 1
        progress(size)
    made.close()
    keys = dict.fromkeys(made.paths, _keys(made.roster))
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, busy = time.perf_counter(), time.process_time()
    found = cross(made.paths, keys)
    return {
        "logs": logs,
        "entries": size,
        "messages": found.matched,
        "receipts": found.receipts,
        "findings": sorted({finding.code for finding in found.findings}),
        "cross_s": round(time.perf_counter() - start, 2),
        "cross_processor_s": round(time.process_time() - busy, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "peak_before_mb": before // 1024,
    }


def bench(
    entries: int, appends: int, where: Path | None, progress: Callable[[int], object], *, logs: int = 0
) -> dict[str, Any]:
    """In a temporary folder that is removed afterwards: one log, or the comparison of many."""
    with tempfile.TemporaryDirectory(prefix="privacy-audit-", dir=where) as name:
        folder = Path(name)
        if logs:
            return bench_cross(folder, logs, entries, progress)
        return {**bench_append(folder, appends), **bench_verify(folder, entries, progress)}
