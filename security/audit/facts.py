"""The history that a log tells, and one round in all logs together: for comparing logs and for reports.

`join_...` find what no log shows by itself, about sums, models, manifests and votes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from security.audit.agreement import Agreement
from security.audit.findings import Findings
from security.audit.safe_files import refuse_hostile
from security.crypto.merkle import Tree
from security.log.reader import LogReader, Record
from security.log.roster import COORDINATOR, SITE

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


# One round in all logs together. Each function is one comparison, and looks at nothing else.

InForce = Mapping[str, Callable[[int], Agreement | None]]  # for each log, the manifest at an entry


def join_rounds(histories: Sequence[LogHistory], in_force: InForce, joint: Findings) -> None:
    """Every comparison that needs more than one log, beside that of messages."""
    join_unmasking(histories, joint)
    join_uploads(histories, joint)
    join_openings(histories, joint)
    join_manifests(histories, in_force, joint)
    join_votes(histories, in_force, joint)
    if "LogMissing" not in joint and "LogLost" not in joint:
        join_first_models(histories, in_force, joint)
        join_models(histories, in_force, joint)


def join_unmasking(histories: Sequence[LogHistory], joint: Findings) -> None:
    """Over all logs: for no site of an attempt were self-mask shares *and* key shares opened."""
    opened: dict[str, dict[str, dict[str, int]]] = {}
    for history in histories:
        for record in history.of("secagg.unmasked"):
            kinds = opened.setdefault(record.body["context"], {"self_mask": {}, "mask_key": {}})
            for kind, names in kinds.items():
                for name in record.body[kind]:
                    names.setdefault(name, record.seq)
    for kinds in opened.values():
        for name in sorted(kinds["self_mask"].keys() & kinds["mask_key"].keys()):
            joint.add(
                "MaskExposure",
                f"both kinds of share were opened for {name}",
                kinds["self_mask"][name],
                kinds["mask_key"][name],
            )


def join_uploads(histories: Sequence[LogHistory], joint: Findings) -> None:
    """Over all logs: of every site whose mask was opened a vector left. Else a sum is over fewer than it says."""
    sent = {
        history.name: {record.key for record in history.of("egress") if record.body["message"] == "UploadFrame"}
        for history in histories
        if history.role == SITE
    }
    for history in histories:
        for record in history.of("secagg.unmasked"):
            for name in record.body["self_mask"]:
                if record.key not in sent.get(name, {record.key}):
                    detail = f"round {record.round}: {history.name} opened the mask of {name}, which sent no vector"
                    joint.add("SumMismatch", detail, record.seq)


def join_openings(histories: Sequence[LogHistory], joint: Findings) -> None:
    """Over all logs: a quorum of sites says that it opened its shares for a published sum. A site whose log is not here
    may have done so too.
    """
    opened: dict[str, set[str]] = {}
    here = {history.name for history in histories if history.role == SITE}
    for history in histories:
        for record in history.of("secagg.unmasked") if history.role == SITE else ():
            opened.setdefault(record.body["context"], set()).add(history.name)
    for hub in histories:
        if hub.role != COORDINATOR:
            continue
        quorums = {record.body["context"]: record.body["threshold"] for record in hub.of("secagg.survivors")}
        published = {record.key for record in hub.of("aggregate.published")}
        for record in hub.of("secagg.unmasked"):
            asked = {*record.body["self_mask"], *record.body["mask_key"]}
            count = len(opened.get(record.body["context"], ())) + len(asked - here)
            due = quorums.get(record.body["context"], 0)
            if record.key in published and count < due:
                detail = f"round {record.round}: {count} sites may have opened shares for a sum, a quorum is {due}"
                joint.add("SumMismatch", detail, record.seq)


def join_manifests(histories: Sequence[LogHistory], in_force: InForce, joint: Findings) -> None:
    """Over all logs: a context has the hash of one manifest, so who joins it is under that manifest and no other."""
    seen: dict[str, tuple[str, str, int]] = {}
    for history in histories:
        for record in history.of("round.invited"):
            agreement = in_force[history.origin](record.seq)
            if agreement is None:
                continue
            here = (agreement.digest, history.name, record.seq)
            digest, name, seq = seen.setdefault(record.body["context"], here)
            if digest != agreement.digest:
                detail = f"round {record.round}: {name} and {history.name} were under different manifests"
                joint.add("SplitCohort", detail, seq, record.seq)


def join_first_models(histories: Sequence[LogHistory], in_force: InForce, joint: Findings) -> None:
    """A run begins with the model that its manifest names. If a log is not here, its beginning may not be either."""
    first: dict[str | None, tuple[int, LogHistory, Record]] = {}
    for history in histories:
        for record in history.of("model.received"):
            number = record.round or 0
            if record.run not in first or number < first[record.run][0]:
                first[record.run] = (number, history, record)
    for number, history, record in first.values():
        agreement, model = in_force[history.origin](record.seq), record.body["model"]
        rules = agreement.rules if agreement else None
        if rules is not None and record.run == rules.run and model != rules.initial_state:
            what = f"{record.run} begins with model {model[:16]}, agreed is {rules.initial_state[:16]}"
            joint.add("MethodMismatch", f"round {number}: {what}", record.seq)


def join_models(histories: Sequence[LogHistory], in_force: InForce, joint: Findings) -> None:
    """A site trains on the model that the run begins with, or on one that a coordinator's log has published in an
    earlier round. Only where no log is missing: what a lost one published is not known.
    """
    made: dict[tuple[str | None, str], int] = {}  # by run and model, the first round that gives it
    for history in histories:
        for record in history.of("aggregate.published") if history.role == COORDINATOR else ():
            key = record.run, record.body["model"]
            made[key] = min(record.round or 0, made.get(key, record.round or 0))
    begun: dict[str | None, int] = {}  # the first round of each run, which `join_first_models` judges
    for record in (record for history in histories for record in history.of("model.received")):
        begun[record.run] = min(record.round or 0, begun.get(record.run, record.round or 0))
    for history in histories:
        for record in history.of("model.received"):
            agreement, model = in_force[history.origin](record.seq), record.body["model"]
            rules = agreement.rules if agreement and record.round != begun[record.run] else None
            known = made.get((record.run, model), record.round or 0) < (record.round or 0)
            if rules is not None and not known and (record.run, model) != (rules.run, rules.initial_state):
                detail = f"round {record.round}: {history.name} had model {model[:8]}, which no sum before it gives"
                joint.add("ModelInconsistency", detail, record.seq)


def join_votes(histories: Sequence[LogHistory], in_force: InForce, joint: Findings) -> None:
    """Where the manifest asks for votes, nobody trains on a model before the vote: somebody's log has it."""
    voted = {record.key for history in histories for record in history.of("result.voted")}
    for history in histories:
        for last, record in pairwise(history.of("aggregate.published")):
            agreement = in_force[history.origin](record.seq)
            asked = agreement is not None and agreement.rules is not None and agreement.rules.vote
            if asked and last.run == record.run and last.key not in voted:
                detail = f"round {record.round}: a sum, and no vote on that of round {last.round} before it"
                joint.add("StepMissing", detail, record.seq)
