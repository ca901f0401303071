"""A26: a second run on the same data and first model, an older manifest in which fewer sites may collude, a newer one
that is withheld, or a coordinator whose certificate has expired."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from security.identity.membership import DAY_MS, AggregationPolicy, BareMandate
from security.secagg import messages
from security.secagg.certificates import Ack
from security.secagg.site import checks, differences
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil
from tests.support.secagg_world import take_policy


def an_older_manifest() -> EvilCoordinator:
    """Version 1 had c = 0; under version 2 the consortium reckons with two colluders. The victim is given version 1."""
    run = evil(7, colluders=2, c=0, single_history=False)
    newer = replace(run.policy, manifest_version=2, manifest_hash=bytes(range(32)), c=2)
    for name in run.honest:
        run._do_site(name, take_policy(run.machine(name), newer))
    run.open_round()
    site = run.sites[VICTIM]
    mandate = BareMandate(run.policy, site.machine.core.signer)
    core = replace(site.machine.core, mandate=mandate, journal=Journal.replay(site.wal))
    try:
        site.machine = SiteMachine(core, run.model)
        run._do_site(VICTIM, site.machine.start())
        assert site.update is not None
        run._do_site(VICTIM, site.machine.load_update(site.update))
    except PolicyViolation as error:
        site.errors.append(error)
        site.online = False
    run.launch(run.plan([VICTIM, *run.colluders]))
    return run


def test_an_older_manifest_is_refused() -> None:
    run = an_older_manifest()
    assert_refused(run, VICTIM, PolicyViolation, "check_manifest_version")
    assert_safe(run)


def test_an_older_manifest_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_manifest_version", lambda *_: None)
    assert_recovered(an_older_manifest())


def a_second_run(run: EvilCoordinator) -> None:
    run.open_round()
    run.secretly()
    run.secretly([name for name in run.sites if name != VICTIM], run="second", attempt=3)


RULES = {
    "check_plan_federation": checks,
    "check_plan_reuse": checks,
    "check_advert_signatures": checks,
    "check_same_state_sums": differences,
}


@pytest.mark.parametrize("left", list(RULES))
def test_a_second_run_on_the_same_update(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rules refuse it, each alone: the manifest names one run, the update was sent, adverts name their run, and
    two sums on one model may not differ by one site."""
    for check, module in RULES.items():
        if check != left:
            monkeypatch.setattr(module, check, lambda *_: None)
    run = evil(5)
    a_second_run(run)
    assert_refused(run, "site-01", VerificationFailed if "advert" in left else PolicyViolation, left)
    assert_safe(run)


def test_a_second_run_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    for check, module in RULES.items():
        monkeypatch.setattr(module, check, lambda *_: None)
    run = evil(5)
    a_second_run(run)
    assert_recovered(run)


def withheld_for(days: int) -> EvilCoordinator:
    """The consortium has revoked site-03; the coordinator, which passes manifests on, keeps the new one to itself."""
    run = evil(wide=False)
    held = replace(run.policy, expires_ms=run.clock.now_ms() + 30 * DAY_MS)
    for name in run.honest:
        run.machine(name).core.mandate.policy = held  # type: ignore[misc]
    run.clock.advance(days * DAY_MS)  # type: ignore[attr-defined]
    run.open_round()
    run.launch(run.plan())
    return run


def test_a_withheld_manifest_is_noticed() -> None:
    assert withheld_for(29).said(Ack), "until then the rounds go on"
    run = withheld_for(30)
    for name in run.honest:
        assert_refused(run, name, PolicyViolation, "check_plan_fresh")
    assert not any(said.site in run.honest for said in run.said(messages.UploadHeader))


def test_a_withheld_manifest_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends: the revoked site stays in every sum for as long as the coordinator likes."""
    monkeypatch.setattr(checks, "check_plan_fresh", lambda *_: None)
    run = withheld_for(3000)
    assert "site-03" in {said.site for said in run.said(messages.UploadHeader)} and run.said(Ack)


def expired_coordinator() -> EvilCoordinator:
    """Its signing certificate has ended: `membership.aggregation_policy` counts it among the revoked."""
    run = evil(wide=False)
    for name in run.honest:
        policy = run.machine(name).core.policy
        lapsed = replace(policy, revoked=policy.revoked | {policy.coordinator.cert})
        run.machine(name).core.mandate.policy = lapsed  # type: ignore[misc]
    run.open_round()
    run.launch(run.plan())
    return run


def test_an_expired_coordinator_is_not_followed() -> None:
    run = expired_coordinator()
    for name in run.honest:
        assert_refused(run, name, PolicyViolation, "check_plan_signature")
    assert not any(said.site in run.honest for said in run.said(messages.UploadHeader))


def test_an_expired_coordinator_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AggregationPolicy, "coordinator_entry", lambda self: self.coordinator)
    assert expired_coordinator().said(Ack)
