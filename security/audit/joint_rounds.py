"""One round in all logs together: what no log shows by itself, about sums, models, manifests and votes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from security.audit.agreement import Agreement
from security.audit.facts import LogHistory
from security.audit.findings import Findings
from security.log.reader import Record
from security.log.roster import COORDINATOR, SITE


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


InForce = Mapping[str, Callable[[int], Agreement | None]]  # for each log, the manifest at an entry


def join_manifests(histories: Sequence[LogHistory], in_force: InForce, joint: Findings) -> None:
    """Over all logs: a context has the hash of one manifest, so who joins it is under that manifest and no other."""
    seen: dict[str, tuple[str, str, int]] = {}
    for history in histories:
        for record in history.of("round.invited"):
            agreement = in_force[history.origin](record.seq)
            if agreement is None:
                continue
            told = (agreement.digest, history.name, record.seq)
            digest, name, seq = seen.setdefault(record.body["context"], told)
            if digest != agreement.digest:
                detail = f"round {record.round}: {name} and {history.name} were under different manifests"
                joint.add("SplitCohort", detail, seq, record.seq)


def join_first_models(histories: Sequence[LogHistory], in_force: InForce, joint: Findings) -> None:
    """A run begins with the model that its manifest names. If a log is not here, its beginning may not be either."""
    first: dict[str | None, tuple[int, LogHistory, Record]] = {}
    for history in histories:
        for record in history.of("model.received"):
            told = (record.round or 0, history, record)
            if record.run not in first or told[0] < first[record.run][0]:
                first[record.run] = told
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
