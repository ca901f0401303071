"""Steps in another order than a round has them, of another cohort, or of a round that never was; and what only all logs
together show: who is in a sum and sent nothing, under which manifest, on which model, without a vote.

As in test_audit_conformance, the owner of a log writes the breach itself and signs it with its own key.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from security.audit import facts
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.audit.completeness import RoundBook
from security.audit.scan import Scan
from security.log.egress import MASKED
from tests.attacks.audit.test_audit_conformance import Entry, _rewritten, _verified
from tests.attacks.audit.test_audit_conformance import private as private  # a fixture
from tests.support.audit_attacks import weighty
from tests.support.audit_logs import Federation
from tests.support.audit_parties import FIVE, digest
from tests.support.consortium_world import DAY, PLAN, World

Rewrite = Callable[[list[Entry]], list[Entry]]


def _is_upload(entry: Entry) -> bool:
    return bool(entry["type"] == "egress" and entry["body"]["data_class"] == MASKED)


def _after(kind: str, what: Callable[[Entry], bool]) -> Rewrite:
    """Entries of a type come right after the last entry of their round for which `what` holds."""

    def change(entries: list[Entry]) -> list[Entry]:
        moved = [entry for entry in entries if entry["type"] == kind]
        rest = [entry for entry in entries if entry["type"] != kind]
        for entry in moved:
            at = max(n for n, other in enumerate(rest) if entry["round"] in (None, other["round"]) and what(other))
            times = {name: rest[at][name] for name in ("ts", "mono_ms")}
            rest.insert(at + 1, {**entry, **times})
        return rest

    return change


def _is(kind: str) -> Callable[[Entry], bool]:
    return lambda entry: bool(entry["type"] == kind)


def _each(change: Callable[[Entry], object], *kinds: str) -> Rewrite:
    def rewrite(entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            if entry["type"] in kinds:
                change(entry)
        return entries

    return rewrite


def _another_context(entry: Entry) -> None:
    entry["body"]["context"] = digest("another", entry["round"])


def _second_attempt(entries: list[Entry]) -> list[Entry]:
    """A second attempt of each round, in which the shares of another set are opened."""
    out = []
    for entry in entries:
        out.append(entry)
        if entry["type"] in ("round.invited", "secagg.survivors", "secagg.unmasked"):
            other = deepcopy(entry)
            _another_context(other)
            other["body"]["attempt"] = 1
            if "self_mask" in other["body"]:
                other["body"]["self_mask"] = ["graz", "linz", "wels"]
            out.append(other)
    return out


def _failed_attempt(entries: list[Entry]) -> list[Entry]:
    """The sum is over as many as an attempt agreed whose shares nobody opened."""
    out = []
    for entry in entries:
        if entry["type"] == "secagg.survivors":
            other = deepcopy(entry)
            _another_context(other)
            other["body"].update(count=4, threshold=3)
            out.append(other)
        if entry["type"] == "aggregate.published":
            entry["body"]["inputs"] = 4
        out.append(entry)
    return out


def _of_no_round(entries: list[Entry]) -> list[Entry]:
    at = max(n for n, entry in enumerate(entries) if _is_upload(entry))
    other = deepcopy(entries[at])
    other.update(round=None, run=None)
    other["body"]["msg_id"] = "77" * 16
    return [*entries[: at + 1], other, *entries[at + 1 :]]


def _late(days: int, kind: str) -> Rewrite:
    """Everything from the last entry of a type on is so much later."""

    def change(entries: list[Entry]) -> list[Entry]:
        at = max(n for n, entry in enumerate(entries) if entry["type"] == kind)
        return [{**entry, "ts": entry["ts"] + days * DAY * (n >= at)} for n, entry in enumerate(entries)]

    return change


STEPS: dict[str, tuple[str, Rewrite, str]] = {
    "trained after the upload": ("graz", _after("train.done", _is_upload), "StepMissing"),
    "data opened after the upload": ("graz", _after("data.opened", _is_upload), "StepMissing"),
    "invited after the upload": ("graz", _after("round.invited", _is_upload), "StepMissing"),
    "paid after the upload": ("graz", _after("dp.committed", _is_upload), "PrivacyMissing"),
    "booked after the training": ("graz", _after("dp.reserved", _is("train.done")), "PrivacyMissing"),
    "agreed after the shares": ("graz", _after("secagg.survivors", _is("secagg.unmasked")), "StepMissing"),
    "agreed after the shares at the coordinator": (
        "hub",
        _after("secagg.survivors", _is("secagg.unmasked")),
        "StepMissing",
    ),
    "a set of a cohort that nobody was invited to": (
        "graz",
        _each(_another_context, "secagg.survivors", "secagg.unmasked"),
        "StepMissing",
    ),
    "both kinds of share": (
        "graz",
        _each(lambda entry: entry["body"].update(mask_key=["linz"]), "secagg.unmasked"),
        "MaskExposure",
    ),
    "the key of a site that did not drop out": (
        "graz",
        _each(lambda entry: entry["body"].update(mask_key=["wels"]), "secagg.unmasked"),
        "SumMismatch",
    ),
    "another set in a second attempt": ("graz", _second_attempt, "SecondSum"),
    "a sum over an attempt that was not opened": ("hub", _failed_attempt, "SumMismatch"),
    "a vector of no round": ("graz", _of_no_round, "StepMissing"),
    "a sum after the coordinator's certificate": ("hub", _late(400, "aggregate.published"), "CertificateInvalid"),
}
# What renumbered entries under the owner's signature alone bring with them, and what some of these cases do.
COMPANY = {"NotWitnessed", "CosignatureMissing", "HeadMissing", "SurplusBytes"}
BESIDE = {
    "data opened after the upload": {"AnnexLost"},
    "another set in a second attempt": {"SurvivorsTooFew"},  # of three sites, one of the set is a stranger
}


@pytest.mark.parametrize("name", STEPS)
def test_step_out_of_place_is_found(
    name: str, private: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, change, expected = STEPS[name]
    path = _rewritten(private, tmp_path, who, change)
    codes = weighty(_verified(path, private).findings)
    company = COMPANY | BESIDE.get(name, set())
    assert expected in codes and codes - {expected} <= company | {"StepMissing", "SumMismatch", "PrivacyMissing"}
    for step in ("_judge", "_agree", "_open", "_sum"):
        monkeypatch.setattr(RoundBook, step, lambda *_: None)
    monkeypatch.setattr(Scan, "_check_dates", lambda *_: None)
    assert weighty(_verified(path, private).findings) <= company, "twin"


def test_a_repeated_set_is_no_second_sum(private: Federation, tmp_path: Path) -> None:
    """A later attempt may give the same sum again."""

    def change(entries: list[Entry]) -> list[Entry]:
        same = {"self_mask": ["graz", "linz", "vienna"]}
        return _each(lambda entry: entry["body"].update(same), "secagg.unmasked")(_second_attempt(entries))

    path = _rewritten(private, tmp_path, "graz", change)
    assert weighty(_verified(path, private).findings) <= COMPANY


# A site that is in the sum, and sent nothing


def _without_vectors(entries: list[Entry]) -> list[Entry]:
    """As a site's log would be: without receipts for what it did not send, and without a count that could tell."""
    gone = {entry["body"]["msg_id"] for entry in entries if _is_upload(entry)}
    return [e for e in entries if e["type"] != "net.counter" and e["body"].get("msg_id") not in gone]


def test_a_site_in_a_sum_without_a_vector(private: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own log; and, where that says nothing of the sum either, by the logs of the others."""
    path = _rewritten(private, tmp_path / "own", "graz", _without_vectors)
    company = COMPANY | {"NoNetworkCounter"}
    assert weighty(_verified(path, private).findings) - company == {"StepMissing"}

    def silent(entries: list[Entry]) -> list[Entry]:
        kinds = ("secagg.survivors", "secagg.unmasked")
        unmask = {e["body"]["msg_id"] for e in entries if e["body"].get("message") == "Unmask"}
        entries = [e for e in _without_vectors(entries) if e["type"] not in kinds]
        return [e for e in entries if e["body"].get("msg_id") not in unmask]

    path = _rewritten(private, tmp_path / "silent", "graz", silent)
    folders = [path if folder.name == "graz" else folder for folder in private.folders]
    keys = {**private.keys, path: keys_for(path, private.root_key)}
    assert weighty(_verified(path, private).findings) <= company, "by itself it tells nothing"
    assert "SumMismatch" in weighty(cross(folders, keys).joint)
    monkeypatch.setattr(facts, "join_openings", lambda *_: None)
    assert "SumMismatch" in weighty(cross(folders, keys).joint)
    monkeypatch.setattr(facts, "join_uploads", lambda *_: None)
    assert "SumMismatch" not in weighty(cross(folders, keys).joint), "twin"


# What only all logs show together


def _found(federation: Federation) -> set[str]:
    return weighty(cross(federation.folders, federation.keys).findings)


def test_a_cohort_under_two_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """linz goes on under the manifest that suits it, and writes the context of the others."""
    federation = Federation.from_world(World.make(tmp_path / "world", FIVE), tmp_path / "logs", dp_sites=())
    federation.play(1)
    federation.republish(skipped_by=("linz",))
    federation.play(1)
    federation.stop()
    assert _found(federation) == {"SplitCohort"}
    monkeypatch.setattr(facts, "join_manifests", lambda *_: None)
    assert _found(federation) == set(), "twin"


def test_a_run_that_begins_with_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that the coordinator chose, and that every site took."""
    federation = Federation.from_world(World.make(tmp_path / "world"), tmp_path / "logs", dp_sites=())
    federation.model = digest("chosen")
    federation.play(2)
    federation.stop()
    assert _found(federation) == {"MethodMismatch"}
    monkeypatch.setattr(facts, "join_first_models", lambda *_: None)
    assert _found(federation) == set(), "twin"


def test_sums_without_the_votes_that_the_manifest_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.make(tmp_path / "world")
    world.write_plan(PLAN + "[audit]\nstrict = true\nvote_drop = 0.05\n")
    federation = Federation.from_world(world, tmp_path / "logs", dp_sites=())
    assert federation.rules is not None
    federation.rules = replace(federation.rules, vote=False)  # nobody asks
    federation.play(2)
    federation.stop()
    assert _found(federation) == {"StepMissing"}
    monkeypatch.setattr(facts, "join_votes", lambda *_: None)
    assert _found(federation) == set(), "twin"
