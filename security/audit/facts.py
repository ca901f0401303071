"""The history that a log tells, and what all logs together say about one round: for comparing logs and for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from security.audit.safe_files import refuse_hostile
from security.crypto.merkle import Tree
from security.log.reader import LogReader, Record

GREETING: Final = "Open"  # the message that a connection begins with
TYPES: Final = frozenset(
    {
        "access.exported",
        "agent.start",
        "agent.stop",
        "annex.erased",
        "aggregate.published",
        "checkpoint.seen",
        "cosigned",
        "data.opened",
        "dp.committed",
        "dp.reserved",
        "egress",
        "egress.blocked",
        "ingress",
        "ingress.partial",
        "key.rotated",
        "model.received",
        "net.counter",
        "receipt",
        "result.voted",
        "round.declined",
        "round.invited",
        "secagg.survivors",
        "trainer.isolated",
        "secagg.unmasked",
        "train.done",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHistory:
    """The records of one log by type, in order, and when each boot began and ended."""

    origin: str
    name: str
    role: str
    by_type: dict[str, list[Record]] = field(default_factory=dict)
    boots: dict[str, tuple[int, int]] = field(default_factory=dict)

    def of(self, *types: str) -> Iterator[Record]:
        """Records of some types; those of one type are in order."""
        for name in types:
            yield from self.by_type.get(name, ())


def read_history(path: Path, *, origin: str, name: str, role: str) -> LogHistory:
    """Read a log; lines that are no entries are left to the verifier's findings."""
    refuse_hostile(path)
    history = LogHistory(origin=origin, name=name, role=role)
    for record in LogReader(path, gaps=True).records(*TYPES):
        history.by_type.setdefault(record.type, []).append(record)
        first, _ = history.boots.get(record.boot, (record.ts, record.ts))
        history.boots[record.boot] = (first, record.ts)
    return history


def tree_of(path: Path) -> Tree:
    """The tree over a log's lines, whatever they say."""
    tree = Tree()
    for block in LogReader(path, gaps=True).blocks():
        tree.extend(block.leaves())
    return tree


def towards(site: LogHistory, keys: Collection[str], heard: Collection[tuple[str, str]]) -> LogHistory:
    """What a site's log has to do with one coordinator: messages to its keys, and receipts on those connections.

    A site may learn only on a connection that there is another coordinator. So its greeting there still names the keys
    of the old one, and belongs to what was said next; or, where nothing was, to whoever has it.

    :param heard: senders and ids of the messages in that coordinator's log.
    """
    kept: dict[str, list[Record]] = {"egress": [], "receipt": []}
    said = list(site.of("egress"))
    after = {one.seq: other for one, other in pairwise(said) if other.body["message"] != GREETING}
    spoken = False
    for record in sorted([*said, *site.of("receipt")], key=lambda record: record.seq):
        if record.type == "egress":
            greeting = record.body["message"] == GREETING
            named = after.get(record.seq, record) if greeting else record
            alone = greeting and record.seq not in after
            spoken = named.body["destination"] in keys or (alone and (site.name, record.body["msg_id"]) in heard)
        if spoken:
            kept[record.type].append(record)
    return replace(site, by_type={**site.by_type, **kept})


def rounds_of(histories: Sequence[LogHistory]) -> list[tuple[str | None, int]]:
    """Every (run, round) that any log speaks of, in order."""
    keys = {
        (record.run, record.round) for history in histories for record in history.of(*TYPES) if record.round is not None
    }
    return sorted(keys, key=lambda key: (key[0] or "", key[1]))


# One round, from all logs

Round = tuple[str | None, int]


class RoundFacts:
    """What all logs say about one round."""

    def __init__(self, histories: Sequence[LogHistory], key: Round) -> None:
        self.models: set[str] = set()
        self.cohorts: set[str] = set()
        self.cohort_size = 0
        self.uploads: set[str] = set()
        self._dropouts: dict[int, set[str]] = {}
        self.bytes: Counter[str] = Counter()
        self.surplus = 0
        self.unmasked = 0
        for history in histories:
            self._take(history, key)

    def _take(self, history: LogHistory, key: Round) -> None:
        for record in history.of("model.received", "round.invited", "egress", "secagg.survivors"):
            if record.key != key:
                continue
            body = record.body
            match record.type:
                case "model.received":
                    self.models.add(body["model"])
                case "round.invited":
                    self.cohorts.add(body["cohort"])
                    self.cohort_size = max(self.cohort_size, body["cohort_size"])
                case "secagg.survivors":
                    self._dropouts.setdefault(body["attempt"], set()).update(body["dropouts"])
                case _:
                    self.bytes[body["data_class"]] += body["bytes"]
                    self.surplus += body["bytes"] - body["expected_bytes"]
                    if body["data_class"] == "masked-vector":
                        self.uploads.add(history.name)
                        self.unmasked += not body["masked"]

    @property
    def dropouts(self) -> set[str]:
        """Who is missing from the sum: of several attempts, the last one counts."""
        return self._dropouts[max(self._dropouts)] if self._dropouts else set()

    @property
    def summed(self) -> set[str]:
        """Whose vectors are in the sum."""
        return self.uploads - self.dropouts


def round_json(histories: Sequence[LogHistory], key: Round) -> dict[str, Any]:
    """The same for machines."""
    facts = RoundFacts(histories, key)
    return {
        "run": key[0],
        "round": key[1],
        "models": sorted(facts.models),
        "cohorts": sorted(facts.cohorts),
        "summed": sorted(facts.summed),
        "dropouts": sorted(facts.dropouts),
        "bytes": dict(facts.bytes),
        "surplus": facts.surplus,
    }


# What each party states about its processing


def processing_json(history: LogHistory) -> dict[str, Any]:
    """Software, purpose, legal basis, exports and erasures of one party, as its log states them; each value once."""

    def each(kind: str, name: str) -> list[Any]:
        return list(dict.fromkeys(record.body[name] for record in history.of(kind)))

    return {
        "party": history.name,
        "versions": each("agent.start", "version"),
        "packages": each("agent.start", "package"),
        "controllers": each("data.opened", "controller"),
        "purposes": each("data.opened", "purpose"),
        "legal_bases": each("data.opened", "legal_basis"),
        "subjects": each("data.opened", "subjects"),
        "categories": each("data.opened", "categories"),
        "retention": each("data.opened", "retention"),
        "recipients": each("egress", "destination"),
        "exports": [
            {"entry": record.seq, "auditor": record.body["auditor"], "purpose": record.body["purpose"]}
            for record in history.of("access.exported")
        ],
        "erasures": [
            {"entry": record.seq, "first": record.body["first"], "last": record.body["last"]}
            for record in history.of("annex.erased")
        ],
    }


CSV_COLUMNS: Final = ("party", "run", "round", "data_class", "messages", "bytes", "surplus")


def egress_rows(histories: Sequence[LogHistory]) -> list[dict[str, Any]]:
    """What left each site, by run, round and class of data: one row each, in order."""
    rows: dict[tuple[str, str, int, str], list[int]] = {}
    for history in histories:
        for record in history.of("egress"):
            number = -1 if record.round is None else record.round
            row = rows.setdefault((history.name, record.run or "", number, record.body["data_class"]), [0, 0, 0])
            row[0] += 1
            row[1] += record.body["bytes"]
            row[2] += record.body["bytes"] - record.body["expected_bytes"]
    return [
        dict(zip(CSV_COLUMNS, (party, run or None, None if number < 0 else number, name, *totals), strict=True))
        for (party, run, number, name), totals in sorted(rows.items())
    ]


# The same as events of the Open Cybersecurity Schema Framework (OCSF): class "API Activity" of the category
# "Application Activity". `type_uid` is the class times 100 and the activity; sending has no number of its own there.

OCSF_VERSION: Final = "1.3.0"
OCSF_CATEGORY: Final = 6
OCSF_CLASS: Final = 6003
OCSF_ACTIVITY: Final = 99
INFORMATIONAL, MEDIUM = 1, 3


def ocsf_events(histories: Sequence[LogHistory], version: str) -> Iterator[dict[str, Any]]:
    """One event for each party, run, round and class of data that left."""
    for history in histories:
        groups: dict[tuple[str, int, str], list[Record]] = {}
        for record in history.of("egress"):
            key = (record.run or "", -1 if record.round is None else record.round, record.body["data_class"])
            groups.setdefault(key, []).append(record)
        for (run, number, data_class), records in sorted(groups.items()):
            surplus = sum(record.body["bytes"] - record.body["expected_bytes"] for record in records)
            first, last = records[0], records[-1]
            yield {
                "activity_id": OCSF_ACTIVITY,
                "activity_name": "Send",
                "actor": {"app_name": "site-agent"},
                "api": {"operation": f"send {data_class}", "service": {"name": "lazaret.federation.v1.Federation"}},
                "category_uid": OCSF_CATEGORY,
                "class_uid": OCSF_CLASS,
                "count": len(records),
                "dst_endpoint": {"name": "coordinator", "uid": first.body["destination"]},
                "end_time": last.ts,
                "metadata": {
                    "log_name": history.origin,
                    "product": {"name": "Lazaret", "vendor_name": "Lazaret", "version": version},
                    "uid": f"{history.origin}#{first.seq}-{last.seq}-{data_class}",
                    "version": OCSF_VERSION,
                },
                "severity_id": MEDIUM if surplus else INFORMATIONAL,
                "src_endpoint": {"name": history.name},
                "start_time": first.ts,
                "status_id": 1,
                "time": first.ts,
                "type_uid": OCSF_CLASS * 100 + OCSF_ACTIVITY,
                "unmapped": {
                    "bytes": sum(record.body["bytes"] for record in records),
                    "data_class": data_class,
                    "entries": [record.seq for record in records],
                    "round": None if number < 0 else number,
                    "run": run or None,
                    "surplus": surplus,
                },
            }
