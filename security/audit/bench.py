"""What logging and verifying cost, as ratios taken in one process: to a bare synced write, and to a plain read.

The log that is verified is a real one: a site's rounds from invitation to check, a checkpoint every
`CHECKPOINT_EVERY` entries, a manifest's rules in force, and every check of `verify` on.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from security.audit.agreement import AgreedRules, Agreement, Agreements, Keys
from security.audit.verify import verify
from security.clock import ManualClock, SystemClock
from security.log.egress import due_bytes, permitted, recorded_shape
from security.log.events import (
    AgentStart,
    AgentStop,
    DataOpened,
    Egress,
    Heartbeat,
    ModelReceived,
    NetCounter,
    ReceiptReceived,
    RoundInvited,
    SecaggSurvivors,
    SecaggUnmasked,
    TrainDone,
    TrainerIsolated,
)
from security.log.note import KeyType, NoteSigner, checkpoint_of
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


_SOME: Final = "be" * 32  # stands for every digest that the manifest and the log share


def _keys(roster: Roster) -> Keys:
    """Rules like those of a manifest with differential privacy, so that every rule has something to do."""
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
        colluders=colluders,
        least_survivors=3,
        least_cohort=thresholds.least_cohort(c=colluders, m=3, roster=sites),
        max_rounds_unwitnessed=3,
        destinations=frozenset({_SOME}),
        certificates=dict.fromkeys(names, (0, 1 << 50)),
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
        sha256=digest,
        expected_bytes=due,
        shape=shape,
        masked=vector,
        modulus_bits=32 if vector else None,
        uniformity=decimal(0.25 + number % 1000 / 2000) if vector else None,
        destination=_SOME,
        head=head,
    )


def _begin(number: int) -> list[Event]:
    """What a round writes before its first message."""
    return [
        ModelReceived(model=_SOME, bytes=VECTOR_BYTES, layout=_SOME, sender=_SOME),
        TrainDone(method="fednpr-per", steps=40, wall_ms=60_000, artefacts=()),
        RoundInvited(
            method="fednpr-per",
            attempt=0,
            context=f"{number:064x}",
            cohort=_SOME,
            cohort_size=3,
            config=_SOME,
            rule="bench",
        ),
    ]


def _end(number: int) -> list[Event]:
    """What a round writes after its last message."""
    context = f"{number:064x}"
    names = ("site-a", "site-b", "site-c")
    return [
        SecaggSurvivors(attempt=0, context=context, survivors=_SOME, count=3, threshold=3, dropouts=()),
        SecaggUnmasked(attempt=0, context=context, self_mask=names, mask_key=()),
    ]


def _started() -> AgentStart:
    return AgentStart(
        version="bench",
        package=_SOME,
        dependencies=_SOME,
        proto=_SOME,
        image=None,
        sbom=None,
        config=_SOME,
        insecure=(),
    )


def make_log(folder: Path, entries: int, progress: Callable[[int], object]) -> tuple[Path, Roster]:
    """A log of about `entries` entries with checkpoints, epochs, segments and witnesses."""
    rng, clock = SystemRandomness(), ManualClock()
    roster, made = _parties(rng)
    party, root, _ = made[1]
    path = folder / "log"
    log = AuditLog.create(
        path,
        folder / "keys",
        party=party,
        roster=roster,
        manifest=b"{}\n",
        policy="0" * 64,
        root=root,
        clock=clock,
        rng=rng,
        disk=_Unsynced(),
    )
    number = sent = 0
    log.append(_started())
    walls = dict.fromkeys(("network_namespace", "seccomp", "landlock"), True)
    log.append(TrainerIsolated(asked="best", **walls, connection=False, keys=False, ranks=False))
    opened = DataOpened(fingerprint=_SOME, purpose="model training", legal_basis="consent", change="unchanged")
    log.append(opened, run="bench")
    while log.size < entries:
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
            log.append(NetCounter(source="bench", connections=0, bytes_out=sent, bytes_in=0))
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
    """Verify against a plain read of the same lines, in turns."""
    path, roster = make_log(folder, entries, progress)
    keys = _keys(roster)
    plain, full, codes = [], [], set[str]()
    for _ in range(3):
        gc.collect()
        start = time.perf_counter()
        count = plain_read(path)
        middle = time.perf_counter()
        found = verify(path, keys)
        full.append(time.perf_counter() - middle)
        plain.append(middle - start)
        codes |= {finding.code for finding in found.findings}
    return {
        "entries": count,
        "heads": len(found.checkpoints.signed),
        "epochs": found.epochs,
        "findings": sorted(codes),
        "plain_read_s": round(min(plain), 3),
        "verify_s": round(min(full), 3),
        "verify_over_plain_read": round(min(full) / min(plain), 3),
    }


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _ratio_of_medians(ours: Sequence[float], bare: Sequence[float], blocks: int = 5) -> float:
    """The middle one of several ratios of interleaved medians, so that one busy moment of the disk does not decide."""
    step = len(ours) // blocks
    ratios = [
        statistics.median(ours[at : at + step]) / statistics.median(bare[at : at + step])
        for at in range(0, step * blocks, step)
    ]
    return statistics.median(ratios)


def bench_append(folder: Path, rounds: int) -> dict[str, Any]:
    """One entry of about 500 bytes against a bare write and sync of as many bytes, in turns; medians."""
    rng = SystemRandomness()
    roster, made = _parties(rng)
    party, root, _ = made[1]
    log = AuditLog.create(
        folder / "append",
        folder / "append-keys",
        party=party,
        roster=roster,
        manifest=b"{}\n",
        policy="0" * 64,
        root=root,
        clock=SystemClock(),
        rng=rng,
    )
    bare, ours, signed = list[float](), list[float](), list[float]()
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    prepared = [_entry(2 * number + 1, 1) for number in range(rounds)]  # making up an event is not appending it
    before = LogFolder(folder / "append").segment(0).stat().st_size
    log.append(_entry(1, 1), run="bench", round=1)
    size = LogFolder(folder / "append").segment(0).stat().st_size - before

    def write_bare(number: int) -> None:
        os.write(descriptor, number.to_bytes(size, "big"))
        os.fsync(descriptor)

    def write_entry(number: int) -> None:
        log.append(prepared[number], run="bench", round=1)

    for number in range(rounds):
        # In turns, and each first every other time: the disk's own work is then shared fairly.
        pair = [(write_bare, bare), (write_entry, ours)]
        for action, times in pair if number % 2 else reversed(pair):
            times.append(_timed(partial(action, number)))
        if number % 20 == 19:
            signed.append(_timed(log.checkpoint))
    os.close(descriptor)
    log.close()
    return {
        "entry_bytes": size,
        "bare_fsync_ms": round(statistics.median(bare) * 1000, 4),
        "append_ms": round(statistics.median(ours) * 1000, 4),
        "append_over_bare_fsync": round(_ratio_of_medians(ours, bare), 3),
        "checkpoint_ms": round(statistics.median(signed) * 1000, 4),
    }


def bench(entries: int, appends: int, where: Path | None, progress: Callable[[int], object]) -> dict[str, Any]:
    """Both, in a temporary folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="privacy-audit-", dir=where) as name:
        folder = Path(name)
        return {**bench_append(folder, appends), **bench_verify(folder, entries, progress)}
