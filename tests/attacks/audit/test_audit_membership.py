"""Hospitals leave, join and are revoked, and manifests are renewed: each entry is judged under the version in force."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from security.audit.agreement import keys_for
from security.audit.compare import Comparison, cross
from security.audit.completeness import IsolationBook
from security.audit.findings import Concern
from security.audit.verify import verify
from security.identity import acceptance
from security.identity.acceptance import unseal
from security.log import events as ev
from security.log.store import LogFolder
from security.log.writer import AuditLog
from tests.support import audit_logs
from tests.support.audit_attacks import Tampering, copied, unchecked, weighty
from tests.support.audit_logs import Federation
from tests.support.audit_parties import FIVE
from tests.support.consortium_world import PLAN, PRIVACY, World


def _changing(folder: Path) -> Federation:
    """One leaves, one joins, one is revoked, a manifest is renewed, and a second run begins under DP."""
    federation = Federation.from_world(World.make(folder / "world", FIVE), folder / "logs", dp_sites=())
    world = federation.world
    assert world is not None
    federation.play(1)
    world.authority.revoke("steyr", reason="left", now_ms=world.now)
    federation.republish()
    federation.play(1)
    world.enroll("krems")
    federation.republish()
    federation.play(1)
    world.authority.revoke("wels", reason="key lost", now_ms=world.now)
    federation.republish()
    federation.play(1)
    federation.republish()  # renewed, with nothing else in it
    federation.play(1)
    return federation


def _crossed(federation: Federation) -> Comparison:
    return cross(federation.folders, federation.keys)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    federation = _changing(tmp_path_factory.mktemp("changed"))
    federation.stop()
    return federation


def test_membership_changes_audit_clean(changed: Federation) -> None:
    result = _crossed(changed)
    assert weighty(result.findings) == set() and result.exit_code == 0
    assert {len(log.agreements.versions) for log in result.logs if log.role == "coordinator"} == {5}
    assert result.matched == sum(log.ledger.count for log in result.logs)


def test_only_the_newest_manifest_is_not_enough(changed: Federation, tmp_path: Path) -> None:
    """Without the versions that were in force, nothing is decided; it is never clean, and nobody is accused."""
    path = copied(changed.hub.folder, tmp_path / "hub")
    newest = (path / "manifest.json").read_bytes()
    for file in LogFolder(path).manifests.iterdir():
        if file.read_bytes() != newest:
            file.unlink()
    found = cross([path], {path: keys_for(path, changed.root_key)})
    assert "ManifestMissing" in weighty(found.findings)


def test_two_manifests_of_one_version_are_found(changed: Federation, tmp_path: Path) -> None:
    """The consortium's key signs a second version 5, and one hospital has it: both files are the proof."""
    path = copied(changed.members["graz"].folder, tmp_path / "graz")
    world = changed.world
    assert world is not None
    newest, _ = unseal(world.published())
    other = newest.model_copy(update={"issued_at_ms": world.now + 1})
    data = world.signed(other)
    LogFolder(path).manifest_path(sha256(data).hexdigest()).write_bytes(data)
    folders = [path if one.name == "graz" else one for one in changed.folders]
    keys = {one: keys_for(one, changed.root_key) for one in folders}
    assert "ManifestConflict" in weighty(cross(folders, keys).findings)
    with unchecked("ManifestConflict"):
        assert weighty(cross(folders, keys).findings) == set(), "twin"


def test_forged_manifest_is_rejected(changed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(changed.members["graz"].folder, tmp_path / "graz")
    data = (path / "manifest.json").read_bytes().replace(b'"rounds":5', b'"rounds":9')
    LogFolder(path).manifest_path(sha256(data).hexdigest()).write_bytes(data)
    found = cross([path], {path: keys_for(path, changed.root_key)})
    assert "ManifestRejected" in weighty(found.findings)
    monkeypatch.setattr(acceptance, "check_signature", lambda *_: None)
    codes = weighty(cross([path], {path: keys_for(path, changed.root_key)}).findings)
    assert "ManifestRejected" not in codes and "ManifestConflict" in codes, "twin: the forgery is believed"


def test_surplus_is_not_forgiven_by_a_newer_manifest(tmp_path: Path) -> None:
    """Forty megabytes beyond the layout, then a renewal: the entry is judged under the version it was written under."""
    federation = Federation.from_world(World.make(tmp_path / "world"), tmp_path / "logs", dp_sites=())
    site = federation.members["graz"]
    append = site.log.append

    def larger(event: ev.Event, **scope: object) -> int:
        if isinstance(event, ev.Egress) and event.message == "UploadHeader":
            body = event.body()
            shape = {**body["shape"], "vector_bytes": 40_000_000}
            event = ev.Egress(**{**body, "shape": shape})
        return append(event, **scope)  # type: ignore[arg-type]  # the scope of the real one

    site.log.append = larger  # type: ignore[method-assign]  # one site that lies
    federation.play(1)
    del site.log.append
    federation.republish()
    federation.play(1)
    federation.stop()
    assert weighty(_crossed(federation).findings) == {"LayoutMismatch"}
    with unchecked("LayoutMismatch"):
        assert weighty(_crossed(federation).findings) == set(), "twin"


def test_a_run_without_dp_before_one_with_it_is_clean(tmp_path: Path) -> None:
    world = World.make(tmp_path / "world")
    federation = Federation.from_world(world, tmp_path / "logs", dp_sites=())
    federation.play(2)
    settings = '"dp.steps" = 40\n"dp.rate" = 0.02\n"dp.engine" = "fast"\n'
    world.write_plan(PLAN.replace('"run-1"', '"run-2"').replace("steps = 50", "steps = 40") + settings + PRIVACY)
    federation.dp_sites = ("graz", "linz", "vienna")
    federation.republish()
    federation.model = federation.rules.initial_state if federation.rules else ""
    federation.round = 0
    federation.play(2)
    federation.stop()
    assert weighty(_crossed(federation).findings) == set()


def test_a_revoked_site_that_goes_on_is_found(tmp_path: Path) -> None:
    """The coordinator takes messages of a site that the manifest in force does not list any more."""
    federation = Federation.from_world(World.make(tmp_path / "world", FIVE), tmp_path / "logs", dp_sites=())
    world = federation.world
    assert world is not None
    federation.play(1)
    world.authority.revoke("wels", reason="key lost", now_ms=world.now)
    gone = federation.members["wels"]
    federation.republish()
    federation.reopen(gone)
    federation._start(gone)
    federation.play(1)
    federation.send(gone, "Ready", 2)
    federation.give_receipts()
    gone.log.append(ev.AgentStop(reason="end"))
    gone.log.close()
    federation.stop()
    assert weighty(_crossed(federation).findings) == {"SenderUnlisted"}
    with unchecked("SenderUnlisted"):
        assert weighty(_crossed(federation).findings) == set(), "twin"


@pytest.fixture(scope="module")
def less_isolated(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Processes that could open a connection, which the first manifest permits and the second does not."""
    folder = tmp_path_factory.mktemp("isolated")
    world = World.make(folder / "world")

    def weak(log: AuditLog) -> None:
        walls = dict.fromkeys(("network_namespace", "seccomp", "landlock", "connection"), True)
        log.append(ev.TrainerIsolated(asked="best", keys=False, ranks=False, **walls))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_logs, "sees_no_image", weak)
        federation = Federation.from_world(world, folder / "logs", dp_sites=())
    federation.play(1)
    world.write_plan(PLAN.replace("steps = 50", 'steps = 50\nisolation = "required"'))
    federation.republish()
    federation.play(1)
    federation.stop()
    return federation


def test_isolation_that_a_later_manifest_demands(less_isolated: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _crossed(less_isolated)
    assert weighty(found.findings) == {"IsolationWeak"}
    trained = next(finding for finding in found.findings if finding.code == "IsolationWeak")
    assert trained.detail.endswith("trained with connection true, keys false"), "only what the second one governs"
    monkeypatch.setattr(IsolationBook, "trained", lambda *_: None)
    assert weighty(_crossed(less_isolated).findings) == set(), "twin"


def test_adopting_survives_a_crash_between_entry_and_file(tmp_path: Path) -> None:
    """The entry is written, the copy is not: the next start goes on without a contradiction in the log."""
    federation = Federation.from_world(World.make(tmp_path / "world"), tmp_path / "logs", dp_sites=())
    federation.play(1)
    federation.republish()
    site = federation.members["graz"]
    old = min(LogFolder(site.folder).manifests.iterdir(), key=lambda path: b'"version":2' in path.read_bytes())
    (site.folder / "manifest.json").write_bytes(old.read_bytes())
    site.log.adopt_manifest(federation.manifest, 2, federation.roster)
    federation.play(1)
    federation.stop()
    result = _crossed(federation)
    assert weighty(result.findings) == set()
    assert next(log for log in result.logs if log.origin.startswith("graz")).types["manifest.adopted"] == 1


def test_every_version_is_judged_by_its_own_numbers(changed: Federation) -> None:
    """Five, four and three sites have other thresholds; each is right at its time."""
    result = _crossed(changed)
    hub = next(log for log in result.logs if log.role == "coordinator")
    cohorts = {one.version: len(one.roster.sites) for one in hub.agreements.versions}
    assert cohorts == {1: 5, 2: 4, 3: 5, 4: 4, 5: 4}
    assert hub.verdict(Concern.RULES) == 0 and hub.verdict(Concern.RECORD) == 0


def test_rewritten_version_in_the_entry_is_found(changed: Federation, tmp_path: Path) -> None:
    path = copied(changed.members["graz"].folder, tmp_path / "graz")
    seq = next(n for n, line in enumerate(Tampering(path).lines) if b'"type":"manifest.adopted"' in line)
    Tampering(path).edit(seq, lambda entry: entry["body"].update(version=77))
    codes = weighty(cross([path], {path: keys_for(path, changed.root_key)}).findings)
    assert {"ManifestMismatch", "RootMismatch"} <= codes


@pytest.mark.parametrize("back", [False, True])
def test_manifests_follow_each_other(changed: Federation, tmp_path: Path, back: bool) -> None:
    """An entry that replaces another manifest than the one in force, or goes back to the first version."""
    path = copied(changed.hub.folder, tmp_path / "hub")
    lines = Tampering(path).lines
    last = max(number for number, line in enumerate(lines) if b'"type":"manifest.adopted"' in line)
    first = json.loads(lines[0])["body"]["manifest"]
    change = {"new": first, "version": 1} if back else {"old": "00" * 32}
    Tampering(path).edit(last, lambda entry: entry["body"].update(change))
    said = [one.detail for one in verify(path, keys_for(path, changed.root_key)).findings]
    expected = "goes from version 4 to 1" if back else "replaces another manifest than the one in force"
    assert any(expected in detail for detail in said), said
