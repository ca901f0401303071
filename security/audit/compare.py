"""Many logs side by side: did both ends record the same bytes, and did all sites see one model and one cohort?

`cross` verifies each log against the checkpoints that the others hold of it. Then it compares, in this order: each
message at both ends, receipts and checkpoints that a party was shown, models, cohorts and survivors, opened shares,
payments of privacy budget, and checkpoints of logs that are not here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from lazaret.errors import ConfigError
from security.audit import epsilon
from security.audit.agreement import Agreements, Keys, coordinator_keys, coordinator_name, site_names
from security.audit.checkpoints import held_checkpoints, hold_copies
from security.audit.egress_ledger import join_counts
from security.audit.epsilon import EpsilonStatement
from security.audit.facts import GREETING, LogHistory, join_rounds, read_history, towards, tree_of
from security.audit.findings import Concern, Finding, Findings, exit_code
from security.audit.verify import Verified, origin_of, verify
from security.crypto.merkle import Tree
from security.log.machine import SKEW_MS
from security.log.reader import Record
from security.log.roster import COORDINATOR, SITE
from security.log.store import LogFolder
from security.log.witness import Fork, HeldCheckpoint


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a set of logs tells together."""

    logs: tuple[Verified, ...]
    histories: tuple[LogHistory, ...]
    statements: tuple[EpsilonStatement, ...]
    joint: tuple[Finding, ...]
    matched: int = 0
    receipts: int = 0
    forks: tuple[Fork, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of each log, then those between them."""
        return (*(finding for log in self.logs for finding in log.findings), *self.joint)

    @property
    def exit_code(self) -> int:
        """0, 1 or 3 over everything."""
        return exit_code(self.findings)

    @property
    def pairs(self) -> Iterator[tuple[Verified, LogHistory]]:
        """Each log with its history; of several copies of one log, the longest."""
        return zip(longest(self.logs), self.histories, strict=True)


def longest(logs: Sequence[Verified]) -> tuple[Verified, ...]:
    """One log of each name: the longest copy, if possible of those whose record is intact."""
    found = {log.origin: log for log in sorted(logs, key=lambda log: (log.verdict(Concern.RECORD) != 1, log.size))}
    return tuple(log for log in logs if log is found[log.origin])


def cross(
    paths: Sequence[Path], keys: Mapping[Path, Keys], *, second_opinion: bool = False, lost: Collection[str] = ()
) -> Comparison:
    """Verify each log against the checkpoints that the others hold of it, then compare what they say.

    :param lost: parties whose logs are known to be lost, which is then no reason not to decide.
    """
    agreements = Agreements()
    for found in keys.values():
        agreements |= found.agreements
    if strangers := sorted(set(lost) - agreements.names):
        raise ConfigError(f"{', '.join(strangers)} is no party of these logs", where="--lost")
    held = held_checkpoints(paths, agreements.confirmed)
    copies: dict[str, list[Path]] = {}
    for path in dict.fromkeys(paths):
        copies.setdefault(origin_of(path), []).append(path)
    hold_copies(copies, agreements.confirmed, held)
    logs = tuple(verify(path, keys[path], held.get(origin_of(path), ())) for path in paths)
    # Of several copies of a log the longest one tells its story. It is held against the others by their checkpoints.
    whole = longest(logs)
    histories = tuple(_history(log, agreements) for log in whole)
    joint = Findings("between the logs")
    for one, other in agreements.conflicts():
        joint.add("ManifestConflict", f"{one.digest[:16]} and {other.digest[:16]} are both version {one.version}")
    trees = {log.origin: tree_of(log.folder) for log in whole if log.size}
    matched, receipts = _join_messages(histories, agreements, trees, lost, joint)
    join_seen(histories, trees, joint)
    _join_models(histories, joint)
    _join_cohorts(histories, joint)
    join_rounds(histories, {log.origin: log.agreement_at for log in whole}, joint)
    _join_held(held, logs, joint)
    epsilon.join_payments(histories, joint)
    statements, privacy = [], list[Finding]()
    for log, history in zip(whole, histories, strict=True):
        findings = Findings(history.origin)
        statement = epsilon.replay(history, findings, log.rules_at, second_opinion=second_opinion)
        statements += [statement] if statement is not None else []
        privacy += findings.listed()
    proofs = tuple(fork for log in logs for fork in forks(log, held.get(log.origin, ())))
    return Comparison(
        logs=logs,
        histories=histories,
        statements=tuple(statements),
        joint=(*joint.listed(), *privacy),
        matched=matched,
        receipts=receipts,
        forks=proofs,
    )


def _history(log: Verified, agreements: Agreements) -> LogHistory:
    party = agreements.party(log.origin)
    name = party.name if party else log.origin.split(".", 1)[0]
    if not log.size:
        return LogHistory(origin=log.origin, name=name, role=log.role)
    return read_history(log.folder, origin=log.origin, name=name, role=log.role)


# Messages: each that left has one that arrived


def _join_messages(
    histories: Sequence[LogHistory],
    agreements: Agreements,
    trees: Mapping[str, Tree],
    lost: Collection[str],
    joint: Findings,
) -> tuple[int, int]:
    """How many messages match, and receipts fit. What sites sent to each coordinator is compared with its own log."""
    hubs = {history.name: history for history in histories if history.role == COORDINATOR}
    sites = [history for history in histories if history.role == SITE]
    known, keys = site_names(agreements.versions), coordinator_keys(agreements)
    _check_all_here(hubs.values(), sites, agreements, lost, joint)
    if not hubs and not keys:
        joint.add("LogMissing", "no log of the coordinator: nothing that left could be matched")
    matched = receipts = 0
    for name in sorted(keys.keys() | hubs.keys()):
        hub, spoken = hubs.get(name), sites
        if len(keys) > 1:
            ids = {(one.body["sender"], one.body["msg_id"]) for one in (hub.of("ingress") if hub else ())}
            spoken = [towards(site, keys.get(name, ()), ids) for site in sites]
        sent = sum(len(site.by_type.get("egress", ())) for site in spoken)
        if hub is not None:
            matched += _match_hub(hub, spoken, known, joint)
            receipts += join_receipts(spoken, hub, trees[hub.origin], joint) if hub.origin in trees else 0
        elif sent or name == coordinator_name(agreements):
            detail = f"no log of the coordinator {name}: {sent} messages to it could not be matched"
            joint.add("LogLost" if name in lost else "LogMissing", detail)
    return matched, receipts


def _match_hub(hub: LogHistory, sites: Sequence[LogHistory], known: Collection[str], joint: Findings) -> int:
    arrived: dict[tuple[str, str], list[Record]] = {}
    for record in hub.of("ingress"):
        arrived.setdefault((record.body["sender"], record.body["msg_id"]), []).append(record)
    matched = 0
    for site in sites:
        matched += _match_site(site, hub, arrived, _settled(site, hub, joint), joint)
    join_counts(hub, len(known), joint)
    _match_left(arrived, {site.name for site in sites}, known, hub, joint)
    return matched


def _check_all_here(
    hubs: Iterable[LogHistory],
    sites: Sequence[LogHistory],
    agreements: Agreements,
    lost: Collection[str],
    joint: Findings,
) -> None:
    """A hospital that has left is missed where it took part, one that is a member always."""
    heard = {record.body["sender"] for hub in hubs for record in hub.of("ingress")}
    due = site_names([agreements.newest] if agreements.newest else []) | (site_names(agreements.versions) & heard)
    absent = due - {history.name for history in sites}
    for code, names in (("LogLost", absent & set(lost)), ("LogMissing", absent - set(lost))):
        if names:
            joint.add(code, f"no log of {', '.join(sorted(names))}")


def _settled(site: LogHistory, hub: LogHistory, joint: Findings) -> set[str]:
    """Uploads that arrived in part. Frames that belong to no upload of the site's log are bytes it did not log."""
    sent = {record.body["msg_id"]: record.body["bytes"] for record in site.of("egress")}
    found = set()
    for record in hub.of("ingress.partial"):
        name, size = record.body["msg_id"], record.body["bytes"]
        if record.body["sender"] != site.name:
            continue
        if size > sent.get(name, 0):
            detail = f"{site.name}: {size} bytes of frames at {hub.name}, of which the site logged {sent.get(name, 0)}"
            joint.add("IngressUnexplained", detail, record.seq)
        found.add(name)
    return found


def _match_site(
    site: LogHistory,
    hub: LogHistory,
    arrived: dict[tuple[str, str], list[Record]],
    settled: set[str],
    joint: Findings,
) -> int:
    """Take each message's counterpart out of `arrived`; what is left there had none."""
    matched, waiting = 0, list[Record]()
    digests: dict[str, str] = {}
    last_boot = ""
    for record in site.of("egress"):
        body = record.body
        if record.boot != last_boot or body["message"] == GREETING:
            # The end of a boot or of a connection: what was under way then may have been lost on the way.
            _let_go(waiting, site, joint)
        last_boot = record.boot
        if digests.setdefault(body["msg_id"], body["sha256"]) != body["sha256"]:
            joint.add("DuplicateMessage", f"{site.name} used {body['msg_id']} for two messages", record.seq)
        queue = arrived.get((site.name, body["msg_id"]))
        if not queue:
            if body["msg_id"] not in settled:
                waiting.append(record)
            continue
        for lost in waiting:
            joint.add("EgressUnacknowledged", f"{site.name}: {lost.body['message']}, entry {lost.seq}", lost.seq)
        waiting.clear()
        other = queue.pop(0)
        _compare(site, record, hub, other, joint)
        matched += 1
        if not queue:
            del arrived[site.name, body["msg_id"]]
    receipts = {record.body["msg_id"] for record in site.of("receipt")}
    for record in [record for record in waiting if record.body["msg_id"] in receipts]:
        joint.add("EgressUnacknowledged", f"{site.name}: entry {record.seq} has a receipt but no ingress", record.seq)
        waiting.remove(record)
    _let_go(waiting, site, joint)
    return matched


def _match_left(
    arrived: Mapping[tuple[str, str], Sequence[Record]],
    given: set[str],
    known: Collection[str],
    hub: LogHistory,
    joint: Findings,
) -> None:
    """What arrived and left nowhere. Of a member whose log is not here nothing can be said."""
    for (sender, _), records in arrived.items():
        if sender in given or sender not in known:
            for record in records:
                joint.add("IngressUnexplained", f"{sender}: {record.body['message']} at {hub.name}", record.seq)
    for record in hub.of("ingress.partial"):
        if record.body["sender"] not in known:
            detail = f"{record.body['sender']}: {record.body['bytes']} bytes at {hub.name}"
            joint.add("IngressUnexplained", detail, record.seq)


def _let_go(waiting: list[Record], site: LogHistory, joint: Findings) -> None:
    for record in waiting:
        joint.add("InFlight", f"{site.name}: {record.body['message']}, entry {record.seq}", record.seq)
    waiting.clear()


def _compare(site: LogHistory, sent: Record, hub: LogHistory, got: Record, joint: Findings) -> None:
    differing = [name for name in ("message", "bytes", "sha256") if sent.body[name] != got.body[name]]
    # A message of no round, such as the greeting in which a site learns that a new run has begun, is of no run either.
    if sent.key != got.key and (sent.round, got.round) != (None, None):
        differing.append("round")
    if differing:
        joint.add(
            "DigestMismatch",
            f"{site.name} entry {sent.seq} and {hub.name} entry {got.seq} differ in {', '.join(differing)}",
            sent.seq,
            got.seq,
        )
    if abs(sent.ts - got.ts) > SKEW_MS:
        joint.add(
            "ClockSkew",
            f"{site.name} entry {sent.seq} and {hub.name} entry {got.seq} are {abs(sent.ts - got.ts) // 1000} s apart",
            sent.seq,
            got.seq,
        )


# What a party was shown of another's log, against that log


def join_seen(histories: Iterable[LogHistory], trees: Mapping[str, Tree], joint: Findings) -> None:
    """Every message carries its sender's newest checkpoint, and the receiver wrote it down.

    Only the checkpoints that witnesses hold are proof against somebody; this is one party's word. But it costs nothing
    to ask, and a log's owner who shows a checkpoint to one party only contradicts itself here.
    """
    for history in histories:
        for record in history.of("checkpoint.seen"):
            origin, size, root = (record.body[name] for name in ("origin", "size", "root"))
            tree = trees.get(origin)
            if tree is not None and (size > tree.size or tree.root(size).hex() != root):
                detail = f"{history.name} entry {record.seq}: a head of {size} entries of {origin}"
                joint.add("HeadContradicted", detail, record.seq)


def join_receipts(sites: Iterable[LogHistory], hub: LogHistory, tree: Tree, joint: Findings) -> int:
    """Check every receipt that the sites kept; returns how many fit.

    A receipt binds the coordinator to one history of its own log: a checkpoint that it showed to one site only, or an
    entry that it moved or dropped later, does not lead to the same root.
    """
    arrived = {record.seq: record for record in hub.of("ingress")}
    roots: dict[int, str] = {}
    fitting = 0
    for site in sites:
        for receipt in site.of("receipt"):
            fault = _fault(site.name, receipt, arrived.get(receipt.body["ingress"]), tree, roots)
            if fault is None:
                fitting += 1
            else:
                joint.add("ReceiptInvalid", f"{site.name} entry {receipt.seq}: {fault}", receipt.seq)
    return fitting


def _fault(name: str, receipt: Record, entry: Record | None, tree: Tree, roots: dict[int, str]) -> str | None:
    body = receipt.body
    if entry is None or (entry.body["sender"], entry.body["msg_id"]) != (name, body["msg_id"]):
        return f"the coordinator's entry {body['ingress']} is not that message"
    size = body["head_size"]
    if not entry.seq < size <= tree.size:
        return f"the head shown has {size} entries, which does not cover entry {entry.seq}"
    if body["head_root"] != roots.setdefault(size, tree.root(size).hex()):
        return f"the head of {size} entries that was shown is not one of this log"
    path = tree.inclusion_path(entry.seq, size)
    if body["proof"] != (sha256(b"".join(path)).hexdigest() if path else None):
        return "the proof that was shown is another one"
    return None


# One model, one cohort, one kind of share


def _join_models(histories: Sequence[LogHistory], joint: Findings) -> None:
    seen: dict[tuple[str | None, int | None], tuple[str, str, int]] = {}
    for history in histories:
        for record in history.of("model.received"):
            model, name, seq = seen.setdefault(record.key, (record.body["model"], history.name, record.seq))
            if record.body["model"] != model:
                joint.add(
                    "ModelInconsistency",
                    f"round {record.round}: {name} had {model[:8]}, {history.name} had {record.body['model'][:8]}",
                    seq,
                    record.seq,
                )
    voted = {record.key: record.body["model"] for history in histories for record in history.of("result.voted")}
    for history in histories:
        last: Record | None = None
        stands = voted | {record.key: record.body["model"] for record in history.of("result.voted")}
        for record in history.of("aggregate.published"):
            model = seen.get(record.key, (record.body["previous"], "", 0))[0]
            if record.body["previous"] != model:
                joint.add(
                    "ModelInconsistency",
                    f"round {record.round}: sites had {model[:8]}, the sum is on {record.body['previous'][:8]}",
                    record.seq,
                )
            after = stands.get(last.key, last.body["model"]) if last is not None else None
            if last is not None and last.run == record.run and after != record.body["previous"]:
                joint.add("ModelInconsistency", f"round {record.round} does not go on from the last one", record.seq)
            last = record


def _join_cohorts(histories: Sequence[LogHistory], joint: Findings) -> None:
    for kind, fields in (
        ("round.invited", ("context", "cohort", "cohort_size", "groups")),
        ("secagg.survivors", ("context", "survivors", "count", "threshold")),
        ("result.voted", ("accepts", "refusals", "accepted", "model")),
    ):
        seen: dict[tuple[object, ...], tuple[tuple[object, ...], str, int]] = {}
        for history in histories:
            for record in history.of(kind):
                view = tuple(record.body[name] for name in fields)
                first, name, seq = seen.setdefault(
                    (*record.key, record.body.get("attempt")), (view, history.name, record.seq)
                )
                if view != first:
                    what = next(name for name, a, b in zip(fields, first, view, strict=True) if a != b)
                    joint.add(
                        "SplitCohort",
                        f"round {record.round}: {name} and {history.name} saw another {what}",
                        seq,
                        record.seq,
                    )


# Checkpoints that others hold


def _join_held(held: Mapping[str, Sequence[HeldCheckpoint]], logs: Sequence[Verified], joint: Findings) -> None:
    """Checkpoints of a log that is not here can still contradict each other."""
    here = {log.origin for log in logs}
    for origin, found in held.items():
        roots: dict[int, bytes] = {}
        for other in found if origin not in here else ():
            size, root = other.checkpoint.size, other.checkpoint.root
            if roots.setdefault(size, root) != root:
                joint.add("Fork", f"two heads of {origin} of size {size} differ", size - 1)


def forks(log: Verified, held: Sequence[HeldCheckpoint]) -> Iterable[Fork]:
    """Two checkpoints that contradict each other, with the proof that the shown one has another beginning."""
    newest = log.checkpoints.newest
    if newest is None or not any(finding.code == "Fork" for finding in log.findings):
        return
    tree = tree_of(log.folder)
    for other in held:
        theirs = other.checkpoint
        if theirs.size <= newest.checkpoint.size <= tree.size and tree.root(theirs.size) != theirs.root:
            yield Fork(
                origin=log.origin,
                held=other.note,
                shown=newest.note,
                endorsements=tuple(LogFolder(log.folder).endorsements()),
                other_root=tree.root(theirs.size),
                path=tree.consistency_path(theirs.size, newest.checkpoint.size),
            )
