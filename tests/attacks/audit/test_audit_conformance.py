"""An intact record of broken rules is not clean: each planted breach gives its own finding, and its twin without it.

The owner of a log writes the breach itself and signs it with its own key, so that nothing but the rule can object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from security.audit import scan
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.audit.completeness import RoundBook
from security.audit.conformance import RULES, breaches
from security.audit.findings import CODES, Concern
from security.audit.scan import Scan
from security.audit.verify import Verified, verify
from security.dp.accountant import dp_sgd_event, rate_at_least
from security.log.keys import EpochKeys
from security.log.reader import LogReader
from tests.support import audit_logs, audit_parties
from tests.support.audit_attacks import Tampering, copied, encode, unchecked, weighty
from tests.support.audit_logs import Federation
from tests.support.audit_parties import digest
from tests.support.consortium_world import DAY, PLAN, PRIVACY, World

Entry = dict[str, Any]
Change = Callable[[Entry], object]
PRIVATE_PLAN = (
    PLAN.replace("steps = 50", "steps = 40")
    + '"dp.steps" = 40\n"dp.rate" = 0.02\n"dp.engine" = "fast"\n'
    + f'[processing]\npackages = ["{digest("package")}"]\nschemas = ["{digest("proto")}"]\n'
    + 'legal_bases = ["consent, study 12"]\n'
    + PRIVACY
)


def _private(folder: Path) -> Federation:
    world = World.make(folder / "world")
    world.write_plan(PRIVATE_PLAN)
    federation = Federation.from_world(world, folder / "logs", dp_sites=("graz", "linz", "vienna"))
    federation.accept_run("graz")
    federation.play(2)
    federation.stop()
    return federation


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Two clean rounds under a manifest that demands differential privacy and lists the software."""
    return _private(tmp_path_factory.mktemp("private"))


NINE = tuple(f"site{number}" for number in range(9))
GROUPS = "\n[aggregation]\ncolluders = 1\nweight_cap = 256\ngroups = 3\n[audit]\nstrict = true\nvote_drop = 0.05\n"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Two clean rounds under a manifest with three groups that were drawn, with votes and a method of its own."""
    folder = tmp_path_factory.mktemp("grouped")
    world = World.make(folder / "world", NINE)
    plan = world.write_plugin(PLAN + GROUPS)
    world.write_plan(plan)
    world.publish()
    secrets = "".join(f'{name} = "{world.identity(name).draw_secret().hex()}"\n' for name in NINE)
    world.write_plan(f"{plan}[aggregation.secrets]\n{secrets}")
    federation = Federation.from_world(world, folder / "logs", dp_sites=())
    federation.play(2)
    federation.stop()
    return federation


def _all(**fields: object) -> Change:
    return lambda entry: entry["body"].update(fields)


def _noise(**fields: object) -> Change:
    def change(entry: Entry) -> None:
        for item in entry["body"]["mechanisms"]:
            item.update(fields)

    return change


def _certificate_over(entry: Entry) -> None:
    entry["ts"] += 400 * DAY


def _manifest_over(entry: Entry) -> None:
    entry["ts"] += 100 * DAY


# Who lies in which entries, how, and what is found. All entries of the type are changed, so that they agree.
CASES: dict[str, tuple[str, str, Change, str]] = {
    "another destination": ("graz", "egress", _all(destination=digest("else")), "DestinationUnknown"),
    "a cohort of two": ("graz", "round.invited", _all(cohort_size=2), "CohortTooSmall"),
    "another method": ("graz", "round.invited", _all(method="fedavg"), "MethodMismatch"),
    "another method trained": ("graz", "train.done", _all(method="fedavg"), "MethodMismatch"),
    "other settings": ("graz", "round.invited", _all(config=digest("else")), "SettingsMismatch"),
    "another layout": ("graz", "model.received", _all(layout=digest("else")), "MethodMismatch"),
    "a model from elsewhere": ("graz", "model.received", _all(sender=digest("else")), "SenderUnlisted"),
    "another run accepted": ("graz", "run.accepted", lambda entry: entry.update(run="run-9"), "RunMismatch"),
    "another initial model": ("graz", "run.accepted", _all(model=digest("else")), "MethodMismatch"),
    "another run": ("graz", "train.done", lambda entry: entry.update(run="run-9"), "RunMismatch"),
    "a round too many": ("graz", "train.done", lambda entry: entry.update(round=900), "RoundsExceeded"),
    "another threshold": ("graz", "secagg.survivors", _all(threshold=2), "ThresholdWrong"),
    "a sum over one": ("graz", "secagg.survivors", _all(count=1, dropouts=["linz", "vienna"]), "SurvivorsTooFew"),
    "masks of one": ("graz", "secagg.unmasked", _all(self_mask=["graz"]), "SurvivorsTooFew"),
    "masks of one, thrice": ("graz", "secagg.unmasked", _all(self_mask=["graz"] * 3), "SurvivorsTooFew"),
    "masks of strangers": ("graz", "secagg.unmasked", _all(self_mask=["graz", "x", "y"]), "SurvivorsTooFew"),
    "masks of the coordinator": ("graz", "secagg.unmasked", _all(self_mask=["graz", "hub", "linz"]), "SurvivorsTooFew"),
    "a published sum of one": ("hub", "aggregate.published", _all(inputs=1), "SurvivorsTooFew"),
    "groups that nobody drew": ("graz", "round.invited", _all(groups=digest("x")), "GroupsMismatch"),
    "insecure": ("graz", "agent.start", _all(insecure=["no TLS"]), "InsecureOption"),
    "other software": ("graz", "agent.start", _all(package=digest("else")), "SoftwareUnlisted"),
    "another schema": ("graz", "agent.start", _all(proto=digest("else")), "SoftwareUnlisted"),
    "marketing": ("graz", "data.opened", _all(purpose="marketing"), "PurposeNotAgreed"),
    "another basis": ("graz", "data.opened", _all(legal_basis="none needed"), "PurposeNotAgreed"),
    "no basis": ("graz", "data.opened", _all(legal_basis="not stated"), "PurposeNotStated"),
    "a blank basis": ("graz", "data.opened", _all(legal_basis="  "), "PurposeNotStated"),
    "little noise": ("graz", "dp.reserved", _noise(sigma="0.1"), "NoiseBelowFloor"),
    "a wide clip": ("graz", "dp.reserved", _noise(sensitivity="4.0", sigma="4.4"), "ClipExceeded"),
    "more steps": ("graz", "dp.reserved", _noise(steps=80), "ScheduleMismatch"),
    "another unit": ("graz", "dp.reserved", _all(unit="image"), "PrivacyTerms"),
    "another delta": ("graz", "dp.reserved", _all(delta="0.1"), "PrivacyTerms"),
    "nothing trained": ("graz", "dp.reserved", _noise(kind="metrics"), "PrivacyMissing"),
    "nothing paid": ("graz", "dp.committed", _noise(kind="metrics"), "PrivacyMissing"),
    "a manifest that ended": ("graz", "*", _manifest_over, "ManifestEnded"),
    "an expired certificate": ("graz", "*", _certificate_over, "CertificateInvalid"),
    "an expired sender": ("hub", "*", _certificate_over, "CertificateInvalid"),
}
# What a lie brings with it: entries that then contradict each other, and that nobody witnessed the changed log.
COMPANY = {"NotWitnessed", "CosignatureMissing", "WitnessClock", "Backdated"}
COMPANY |= {"SumMismatch", "StepMissing", "PrivacyMissing", "ThresholdWrong", "ManifestEnded"}


def _told(federation: Federation, folder: Path, who: str, kind: str, change: Change) -> Path:
    """A copy of a log in which its owner wrote something else, all signed with its own key."""
    member = federation.members[who]
    path = copied(member.folder, folder / who)
    tampering = Tampering(path)
    lines = []
    for line in tampering.lines:
        entry = json.loads(line)
        if kind in (entry["type"], "*"):
            change(entry)
        lines.append(encode(entry))
    _sign(tampering, lines, federation, who)
    return path


def _sign(tampering: Tampering, lines: list[bytes], federation: Federation, who: str) -> None:
    member = federation.members[who]
    tampering.write(lines)
    tampering.folder.cosigned.unlink(missing_ok=True)
    tampering.resign(EpochKeys(member.keys, member.party.origin, federation.rng).load(0))


def _verified(path: Path, federation: Federation) -> Verified:
    return verify(path, keys_for(path, federation.root_key))


def test_kept_rules_are_clean(private: Federation) -> None:
    for folder in private.folders:
        found = _verified(folder, private)
        assert weighty(found.findings) == set() and found.verdict(Concern.RULES) == 0, folder.name


def _rules_off(patch: pytest.MonkeyPatch, kind: str) -> None:
    """No rule looks at entries of this type; for messages, nothing is known of destinations and dates."""
    if kind in RULES:
        patch.setitem(RULES, kind, [])
        return
    patch.setitem(RULES, "round.invited", [])
    take = Scan._take_force

    def ignorant(scan: Scan, digest: str, seq: int) -> None:
        take(scan, digest, seq)
        scan._destinations, scan._windows, scan._own_window = frozenset(), {}, (0, 1 << 62)

    patch.setattr(Scan, "_take_force", ignorant)


@pytest.mark.parametrize("name", CASES)
def test_breach_is_found(name: str, private: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who, kind, change, expected = CASES[name]
    path = _told(private, tmp_path, who, kind, change)
    found = _verified(path, private)
    codes = weighty(found.findings)
    assert expected in codes and codes - {expected} <= COMPANY
    assert found.verdict(Concern.RULES) == 1 and CODES[expected].concern is Concern.RULES
    _rules_off(monkeypatch, kind)
    assert weighty(_verified(path, private).findings) <= COMPANY - {expected}, "twin"


def test_a_sum_over_more_sites_than_agreed_is_found(private: Federation, tmp_path: Path) -> None:
    path = _told(private, tmp_path, "hub", "aggregate.published", _all(inputs=len(private.sites) + 1))
    assert "SumMismatch" in weighty(_verified(path, private).findings)


def _one_fewer(entry: Entry) -> None:
    *kept, lost = entry["body"]["self_mask"]
    entry["body"].update(self_mask=kept, mask_key=[lost])


def _stranger(entry: Entry) -> None:
    entry["body"]["self_mask"].append("wels")


# Of nine sites in three groups none can be missing from its group's sum.
GROUPED: dict[str, tuple[str, str, Change, str]] = {
    "a group of two": ("site0", "secagg.unmasked", _one_fewer, "SurvivorsTooFew"),
    "a group of two at the coordinator": ("hub", "secagg.unmasked", _one_fewer, "SurvivorsTooFew"),
    "a site of no group": ("site0", "secagg.unmasked", _stranger, "GroupsMismatch"),
    "groups that were not drawn": ("site0", "round.invited", _all(groups=digest("others")), "GroupsMismatch"),
    "sums of groups that were not drawn": ("hub", "aggregate.published", _all(groups=digest("x")), "GroupsMismatch"),
    "a model without a quorum for it": ("site0", "result.voted", _all(accepts=5, refusals=4), "VoteWrong"),
    "a model with a quorum for it": ("hub", "result.voted", _all(accepted=False), "VoteWrong"),
    "too few votes": ("site0", "result.voted", _all(accepts=3, threshold=3), "VoteWrong"),
    "another plugin": ("site0", "plugin.loaded", _all(plugin=digest("else")), "PluginMismatch"),
    "a plugin of another run": ("site0", "plugin.loaded", lambda entry: entry.update(run="run-9"), "PluginMismatch"),
    "one sum of everybody": ("hub", "aggregate.published", _all(groups=None), "GroupsMismatch"),
}


def test_kept_groups_are_clean(grouped: Federation) -> None:
    for folder in grouped.folders:
        found = _verified(folder, grouped)
        assert weighty(found.findings) == set() and found.verdict(Concern.RULES) == 0, folder.name


@pytest.mark.parametrize("name", GROUPED)
def test_breach_of_groups_is_found(
    name: str, grouped: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, kind, change, expected = GROUPED[name]
    path = _told(grouped, tmp_path, who, kind, change)
    codes = weighty(_verified(path, grouped).findings)
    assert expected in codes and codes - {expected} <= COMPANY
    _rules_off(monkeypatch, kind)
    assert weighty(_verified(path, grouped).findings) <= COMPANY, "twin"


def test_no_cohort_before_the_draw(grouped: Federation) -> None:
    entry = next(LogReader(grouped.members["site0"].folder).records("round.invited"))
    assert grouped.rules is not None and not list(breaches(entry, grouped.rules))
    undrawn = replace(grouped.rules, groups=None, undrawn=True)
    assert [code for code, _ in breaches(entry, undrawn)] == ["GroupsMismatch"]
    without = replace(entry, body={**entry.body, "groups": None})
    assert [code for code, _ in breaches(without, undrawn)] == ["GroupsMismatch"], "one sum of everybody is none either"


def test_a_vote_that_nobody_asked_for(grouped: Federation) -> None:
    entry = next(LogReader(grouped.members["site0"].folder).records("result.voted"))
    assert grouped.rules is not None and not list(breaches(entry, grouped.rules))
    assert [code for code, _ in breaches(entry, replace(grouped.rules, vote=False))] == ["VoteWrong"]


def test_a_model_that_stands_after_a_vote_against_the_next(grouped: Federation, tmp_path: Path) -> None:
    """The log of the coordinator goes on from the model that its vote names, and from no other."""

    def change(entries: list[Entry]) -> list[Entry]:
        sums = [entry for entry in entries if entry["type"] == "aggregate.published"]
        votes = [entry for entry in entries if entry["type"] == "result.voted"]
        votes[0]["body"].update(accepts=2, refusals=7, accepted=False, model=sums[0]["body"]["previous"])
        return entries

    path = _rewritten(grouped, tmp_path, "hub", change)
    folders = [path if folder.name == "hub" else folder for folder in grouped.folders]
    codes = weighty(cross(folders, {**grouped.keys, path: keys_for(path, grouped.root_key)}).findings)
    assert "ModelInconsistency" in codes, "the second sum is on the model that was voted down"
    assert "SplitCohort" in codes, "and no site has seen such a vote"


def test_a_plugin_that_nobody_agreed(grouped: Federation) -> None:
    entry = next(LogReader(grouped.members["site0"].folder).records("plugin.loaded"))
    assert grouped.rules is not None and not list(breaches(entry, grouped.rules))
    ((code, said),) = breaches(entry, replace(grouped.rules, plugin=None))
    assert code == "PluginMismatch" and entry.body["plugin"] in said and "none" in said


def test_a_vector_without_the_plugin_that_the_manifest_pins(
    grouped: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _rewritten(grouped, tmp_path, "site0", _without_types("plugin.loaded"))
    company = {"NotWitnessed", "CosignatureMissing", "HeadMissing", "SurplusBytes", "AnnexMismatch"}
    codes = weighty(_verified(path, grouped).findings)
    assert "StepMissing" in codes and codes - {"StepMissing"} <= company
    monkeypatch.setattr(RoundBook, "_judge", lambda *_: None)
    assert weighty(_verified(path, grouped).findings) <= company, "twin"


def test_sites_that_saw_other_groups(grouped: Federation, tmp_path: Path) -> None:
    """Between logs it shows without a manifest, too."""
    path = _told(grouped, tmp_path, "site0", "round.invited", _all(groups=digest("others")))
    folders = [path if folder.name == "site0" else folder for folder in grouped.folders]
    assert "SplitCohort" in weighty(cross(folders, {**grouped.keys, path: keys_for(path, grouped.root_key)}).findings)
    assert not weighty(cross(grouped.folders, grouped.keys).findings)


def test_every_rule_has_a_case() -> None:
    """Whoever adds a rule adds a breach of it here."""
    covered = {kind for _, kind, _, _ in (*CASES.values(), *GROUPED.values())}
    assert set(RULES) <= covered


# Rules about several entries


def _without_types(*types: str) -> Callable[[list[Entry]], list[Entry]]:
    return lambda entries: [entry for entry in entries if entry["type"] not in types]


def _without_receipts(*messages: str) -> Callable[[list[Entry]], list[Entry]]:
    def change(entries: list[Entry]) -> list[Entry]:
        ids = {entry["body"]["msg_id"] for entry in entries if entry["body"].get("message") in messages}
        return [entry for entry in entries if entry["type"] != "receipt" or entry["body"]["msg_id"] not in ids]

    return change


def _second_sum(entries: list[Entry]) -> list[Entry]:
    last = max(n for n, entry in enumerate(entries) if entry["type"] == "aggregate.published")
    return [*entries[: last + 1], entries[last], *entries[last + 1 :]]


def _six_sums(entries: list[Entry]) -> list[Entry]:
    """Every round of two gets three copies under other numbers."""
    out = []
    for entry in entries:
        out.append(entry)
        if entry["type"] in ("aggregate.published", "secagg.survivors", "secagg.unmasked"):
            for step in (2, 4):
                body = dict(entry["body"])
                if "context" in body:
                    body["context"] = digest(body["context"], step)
                out.append({**entry, "round": entry["round"] + step, "body": body})
    return out


def _blocked(explained: str | None) -> Callable[[list[Entry]], list[Entry]]:
    def change(entries: list[Entry]) -> list[Entry]:
        base = {**entries[-1], "run": None, "round": None}
        body = {"bytes": 9, "message": "UploadFrame", "rule": "vector does not look masked", "sha256": None}
        seq = len(entries) - 1
        extra = [{**base, "type": "egress.blocked", "body": body}]
        if explained is not None:
            words = {"command": explained.format(seq), "role": "operator"}
            extra.append({**base, "type": "operator.action", "body": words})
        return [*entries[:-1], *extra, entries[-1]]

    return change


def _told_in(kind: str, **fields: object) -> Callable[[list[Entry]], list[Entry]]:
    def change(entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            if entry["type"] == kind:
                entry["body"].update(fields)
        return entries

    return change


WHOLE: dict[str, tuple[str, Callable[[list[Entry]], list[Entry]], str]] = {
    "no DP at all": ("graz", _without_types("dp.reserved", "dp.committed"), "PrivacyMissing"),
    "no training": ("graz", _without_types("train.done"), "StepMissing"),
    "no invitation": ("graz", _without_types("round.invited"), "StepMissing"),
    "no data opened": ("graz", _without_types("data.opened"), "StepMissing"),
    "no agreement": ("graz", _without_types("secagg.survivors"), "StepMissing"),
    "no receipt": ("graz", _without_receipts("UploadFrame"), "StepMissing"),
    "shares not logged": ("graz", _without_types("secagg.unmasked"), "StepMissing"),
    "dropouts left out": ("graz", _told_in("round.invited", cohort_size=4), "ThresholdWrong"),
    "masks of other sites than agreed": (
        "graz",
        _told_in("secagg.unmasked", self_mask=["graz", "hub", "linz", "vienna"]),
        "SumMismatch",
    ),
    "two sums of a round": ("hub", _second_sum, "SecondSum"),
    "more sums than rounds": ("hub", _six_sums, "RoundsExceeded"),
    "a blocked vector": ("graz", _blocked(None), "VectorBlocked"),
    "another entry explained": ("graz", _blocked("entry {}0: a test of the filter"), "VectorBlocked"),
    "no stop": ("graz", _without_types("agent.stop"), "NoStop"),
}


def _rewritten(federation: Federation, folder: Path, who: str, change: Callable[[list[Entry]], list[Entry]]) -> Path:
    path = copied(federation.members[who].folder, folder / who)
    tampering = Tampering(path)
    entries = change([json.loads(line) for line in tampering.lines])
    lines = tampering.renumber([encode(entry) for entry in entries])
    for size in tampering.folder.checkpoint_sizes():
        tampering.folder.checkpoint_path(size).unlink()
    tampering.write(lines)
    tampering.folder.cosigned.unlink(missing_ok=True)
    member = federation.members[who]
    tampering.resign(EpochKeys(member.keys, member.party.origin, federation.rng).load(0), [len(lines)])
    return path


@pytest.mark.parametrize("name", WHOLE)
def test_breach_over_several_entries_is_found(
    name: str, private: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, change, expected = WHOLE[name]
    path = _rewritten(private, tmp_path, who, change)
    company = {"NotWitnessed", "CosignatureMissing", "HeadMissing", "SurplusBytes", "SumMismatch"} | (
        {"AnnexMismatch"} if expected == "StepMissing" else set()
    )
    codes = weighty(_verified(path, private).findings)
    assert expected in codes and codes - {expected} <= company
    if expected == "NoStop":
        monkeypatch.setattr(Scan, "running", property(lambda _: False, lambda *_: None), raising=False)
        monkeypatch.setattr(scan, "OF_AN_AGENT", frozenset())
    else:
        for step in ("_judge", "_agree", "_open", "_sum", "close"):  # nobody compares the steps of a round
            monkeypatch.setattr(RoundBook, step, lambda *_: None)
    assert weighty(_verified(path, private).findings) <= company, "twin"


def test_receipts_that_the_connection_never_brought_are_noted(private: Federation, tmp_path: Path) -> None:
    """Neither vector nor shares have one: the agent stopped before they came."""
    path = _rewritten(private, tmp_path, "graz", _without_receipts("UploadFrame", "Unmask"))
    found = _verified(path, private).findings
    assert "StepMissing" not in weighty(found) and "ReceiptMissing" in {finding.code for finding in found}


def test_other_packages_than_listed_are_noted(private: Federation, tmp_path: Path) -> None:
    def change(entries: list[Entry]) -> list[Entry]:
        body = {"count": 1, "packages": ["numpy: 2.0 is installed, 2.1 is listed"]}
        entry = {**entries[-1], "type": "software.differs", "body": body}
        return [*entries[:-1], entry, entries[-1]]

    found = _verified(_rewritten(private, tmp_path, "graz", change), private).findings
    assert "SoftwareDiffers" in {finding.code for finding in found}


def test_explained_block_is_no_breach(private: Federation, tmp_path: Path) -> None:
    path = _rewritten(private, tmp_path, "graz", _blocked("entry {}: a test of the filter"))
    assert "VectorBlocked" not in weighty(_verified(path, private).findings)


def test_a_run_that_spends_more_epsilon_than_agreed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round is trained 32 times, each time with the least noise that is permitted. The sites raised their caps,
    and their ledgers are in order; only the manifest's bound on a run is not kept.
    """
    often = (dp_sgd_event(multiplier=0.8, clip=1.0, rate=rate_at_least(0.02), steps=40),) * 32
    for module in (audit_logs, audit_parties):
        monkeypatch.setattr(module, "DP_ROUND", often)
    monkeypatch.setattr(audit_parties, "DP", replace(audit_parties.DP, cap=1000.0))
    federation = _private(tmp_path)
    assert weighty(cross(federation.folders, federation.keys).findings) == {"RunEpsilonExceeded"}
    with unchecked("RunEpsilonExceeded"):
        assert weighty(cross(federation.folders, federation.keys).findings) == set(), "twin"
