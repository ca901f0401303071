"""What a site accepts, refuses, repeats and remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lazaret.errors import LocalProtocolError, PolicyViolation, RemoteProtocolError, ToolkitError, VerificationFailed
from protos.loopback import sent_message
from security.clock import ManualClock
from security.secagg import messages, records, statements
from security.secagg.certificates import AbortCode, Advert
from security.secagg.context import RoundContext
from security.secagg.effects import REFUSED, Compact, Ended, Leave, Log, Persist, Send, SendUpload
from security.secagg.fields import Wire
from security.secagg.messages import Plan
from security.secagg.site import checks
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from security.secagg.transitions import SiteState
from tests.support.secagg_world import RecordedFederation, federation, names, random_updates, take_policy


def stopped_before(
    kind: type[Wire], count: int = 4, *, cohort: int | None = None, **options: Any
) -> tuple[RecordedFederation, SiteMachine, Wire]:
    """A round in which site-00 never gets its first message of a kind; returns that message."""
    run = federation(count, **options)
    run.transcript = []
    held: list[Wire] = []

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        if receiver == "site-00" and (held or isinstance(message, kind)):
            held.append(message)
            return []
        return [message]

    run.hook = hook
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    attempt = run.planned.next_attempt(list(run.sites)[:cohort])
    run._do_coordinator(attempt.start())
    run.pump()
    return run, run.sites["site-00"].machine, held[0]


def planned() -> tuple[RecordedFederation, SiteMachine, Plan]:
    run, machine, plan = stopped_before(messages.Plan)
    assert isinstance(plan, Plan)
    return run, machine, plan


def resigned(made: RecordedFederation, plan: Plan, changes: dict[str, Any]) -> Plan:
    context = replace(plan.context, **changes)
    return replace(plan, context=context, signature=made.core.signer.sign(statements.plan(context)))


PLAN_FAULTS: dict[str, Callable[[RecordedFederation, RoundContext], dict[str, Any]]] = {
    "another protocol version": lambda run, c: {"version": 2},
    "another federation": lambda run, c: {"federation": "elsewhere"},
    "another manifest": lambda run, c: {"manifest_hash": bytes(32)},
    "another run": lambda run, c: {"run": "second"},
    "another coordinator": lambda run, c: {"coordinator_cert": bytes(32)},
    "another layout": lambda run, c: {"layout_hash": bytes(32)},
    "another certificate": lambda run, c: {"members": (replace(c.members[0], cert=bytes(32)), *c.members[1:])},
    "an unlisted site": lambda run, c: {
        "members": (*c.members[:-1], replace(c.members[-1], site="zz", cert=bytes(32)))
    },
    "without this site": lambda run, c: {"members": c.members[1:], "n": 3, "t": 3, "a": 2},
    "a smaller quorum": lambda run, c: {"t": c.t - 1, "a": c.a + 1},
    "a smaller abort quorum": lambda run, c: {"a": c.a - 1},
    "fewer colluders": lambda run, c: {"c": 0},
    "a far-off round": lambda run, c: {"round": 2**63},
    "a far-off attempt": lambda run, c: {"attempt": 2**31},
    "round zero": lambda run, c: {"round": 0, "attempt": 0},
    "another history": lambda run, c: {"prev_result": bytes(32)},
    "another model": lambda run, c: {"state_hash": bytes(32)},
    "another configuration": lambda run, c: {"config_hash": bytes(32)},
    "another round than trained": lambda run, c: {"round": 2},
}


@pytest.mark.parametrize("fault", list(PLAN_FAULTS))
def test_a_plan_with_a_fault_is_refused_and_leaves_no_trace(fault: str) -> None:
    run, machine, plan = planned()
    written = list(run.written["site-00"])
    effects = machine.receive(resigned(run, plan, PLAN_FAULTS[fault](run, plan.context)))
    assert [type(effect) for effect in effects] == [Log, Send, Ended]
    assert isinstance(effects[1], Send) and isinstance(effects[1].message, messages.Refusal)
    assert machine.state is SiteState.IDLE and run.written["site-00"] == written
    assert machine.core.journal.high_water == (0, 0)
    accepted = machine.receive(plan)
    assert [type(effect) for effect in accepted] == [Persist, Log, Send], "the right plan is still accepted"


def test_a_plan_not_signed_by_the_coordinator_is_refused() -> None:
    _run, machine, plan = planned()
    (*_, refused) = machine.receive(replace(plan, signature=bytes(64)))
    assert isinstance(refused, Ended) and refused.reason == REFUSED and isinstance(refused.error, VerificationFailed)


def test_a_revoked_member_is_refused() -> None:
    run, machine, plan = planned()
    machine.core.mandate.policy = replace(run.policy, revoked=frozenset({plan.context.members[2].cert}))
    (*_, refused) = machine.receive(plan)
    assert isinstance(refused, Ended) and refused.reason == REFUSED and "revoked" in str(refused.error)


def test_a_small_cohort_leaves_room_for_a_second_history() -> None:
    run = federation(7, c=0)
    updates = random_updates(run.policy.layout, list(run.sites)[:3], 1)
    run.begin_round(updates)
    run.core.mandate.policy = replace(run.policy, single_history=False)
    run.run_attempt(run.planned.next_attempt(list(updates)))
    assert "second history" in str(run.sites["site-00"].errors[0])


def test_without_an_update_there_is_nothing_to_join() -> None:
    _run, machine, plan = planned()
    machine.aggregation.update = None
    (*_, refused) = machine.receive(plan)
    assert isinstance(refused, Ended) and refused.reason == REFUSED and "no update" in str(refused.error)


def test_the_same_question_gets_the_same_bytes() -> None:
    """Adverts, shares, uploads and agreements are repeated word for word, and written down once."""
    run = federation(4)
    run.transcript = []
    run.hook = _twice
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    answers: dict[type, set[bytes]] = {}
    for sender, _, data in run.transcript:
        message = sent_message(sender, data)
        if sender == "site-00" and isinstance(
            message, Advert | messages.Shares | messages.UploadHeader | messages.Agree | messages.Unmask
        ):
            answers.setdefault(type(message), set()).add(message.to_bytes())
    assert len(answers) == 5 and all(len(different) == 1 for different in answers.values())
    run.check_promises()


def _twice(sender: str, receiver: str, message: Wire) -> list[Wire]:
    asked = messages.Plan | messages.Adverts | messages.Deliver | messages.Survivors | messages.Quorum
    return [message, message] if isinstance(message, asked) else [message]


def test_another_set_after_agree_is_refused_and_the_first_answer_stands() -> None:
    run, machine, survivors = stopped_before(messages.Survivors, count=5)
    assert isinstance(survivors, messages.Survivors)
    first = machine.receive(survivors)
    run._do_site("site-00", first)
    assert machine.state is SiteState.AGREED
    smaller = replace(survivors, uploads=survivors.uploads[:-1])
    with pytest.raises(RemoteProtocolError, match="agreed to another set"):
        machine.receive(smaller)
    again = machine.receive(survivors)
    assert [e for e in first if isinstance(e, Log | Send)] == list(again)
    run.restart_site("site-00")
    restarted = run.sites["site-00"].machine
    assert restarted.state is SiteState.AGREED
    assert restarted.receive(survivors) == again
    with pytest.raises(RemoteProtocolError, match="agreed to another set"):
        restarted.receive(smaller)


@pytest.mark.parametrize("fault", ["too few", "not a member", "twice", "out of order", "own root", "unsigned", "keys"])
def test_survivors_with_a_fault_end_the_attempt(fault: str) -> None:
    _run, machine, survivors = stopped_before(messages.Survivors, count=5)
    assert isinstance(survivors, messages.Survivors)
    lines = list(survivors.uploads)
    changed: list[messages.SignedRoot] = {
        "too few": lines[:3],
        "not a member": [*lines[:-1], replace(lines[-1], site="zz")],
        "twice": [*lines[:-1], lines[0]],
        "out of order": lines[::-1],
        "own root": [replace(lines[0], root=bytes(32)), *lines[1:]],
        "unsigned": [*lines[:-1], replace(lines[-1], signature=bytes(64))],
        "keys": lines,
    }[fault]
    kx = bytes(32) if fault == "keys" else survivors.kx
    effects = machine.receive(messages.Survivors(kx=kx, uploads=tuple(changed)))
    assert machine.state is SiteState.IDLE
    ended = next(effect for effect in effects if isinstance(effect, Ended))
    assert isinstance(ended.error, ToolkitError)
    aborts = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, messages.Abort)]
    assert [abort.code for abort in aborts] == [AbortCode.FAILED_CHECK]
    assert isinstance(effects[0], Persist), "written before it is said"


ADVERT_FAULTS = (
    "swapped key", "missing", "own changed", "own signed again", "same key", "same kem key", "too few hashes",
    "other context", "unsigned", "a site of no cohort",
)  # fmt: skip


@pytest.mark.parametrize("fault", ADVERT_FAULTS)
def test_adverts_with_a_fault_end_the_attempt(fault: str) -> None:
    run, machine, adverts = stopped_before(messages.Adverts, 5, cohort=4)
    assert isinstance(adverts, messages.Adverts)
    first, second, *rest = adverts.adverts

    def signed(advert: Advert = second, **changes: Any) -> Advert:
        changed = replace(advert, **changes)
        signer = run.sites[changed.site].machine.core.signer
        return replace(changed, signature=signer.sign(statements.advert(run.policy, changed)))

    changed: list[Advert] = {
        "swapped key": [first, replace(second, mask_key=bytes(32)), *rest],
        "missing": [first, *rest],
        "own changed": [replace(first, log_size=9), second, *rest],
        "own signed again": [signed(first, log_size=9), second, *rest],
        "same key": [first, signed(mask_key=first.mask_key), *rest],
        "same kem key": [first, signed(mask_kem=first.share_kem), *rest],
        "too few hashes": [first, signed(pair_hashes=second.pair_hashes[1:]), *rest],
        "other context": [first, signed(ctx=bytes(32)), *rest],
        "unsigned": [first, replace(second, signature=bytes(64)), *rest],
        "a site of no cohort": [first, second, *rest[:-1], signed(rest[-1], site="site-04")],
    }[fault]
    effects = machine.receive(replace(adverts, adverts=tuple(changed)))
    assert machine.state is SiteState.IDLE
    assert any(isinstance(e, Ended) and isinstance(e.error, VerificationFailed) for e in effects)


@pytest.mark.parametrize("fault", ["a root is missing", "out of order", "own root", "unsigned"])
def test_roots_with_a_fault_end_the_attempt(fault: str) -> None:
    _run, machine, deliver = stopped_before(messages.Deliver)
    assert isinstance(deliver, messages.Deliver)
    roots = list(deliver.roots)
    changed = {
        "a root is missing": roots[:-1],
        "out of order": roots[::-1],
        "own root": [replace(roots[0], root=bytes(32)), *roots[1:]],
        "unsigned": [*roots[:-1], replace(roots[-1], signature=bytes(64))],
    }[fault]
    effects = machine.receive(replace(deliver, roots=tuple(changed)))
    assert machine.state is SiteState.IDLE
    assert any(isinstance(e, Ended) and isinstance(e.error, ToolkitError) for e in effects)


def test_a_peer_that_was_set_back_is_shown_its_own_advert_and_halts() -> None:
    """A restored backup advertises an old number; its peers refuse, it sees its own signature and stops."""
    run = federation(4)
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    backup = list(run.sites["site-01"].wal)
    saved = dict(run.sites["site-01"].saved)
    run.run_round(random_updates(run.policy.layout, run.sites, 2))
    site = run.sites["site-01"]
    core = site.machine.core
    newest = core.journal.peers["site-01"]
    old = Journal.replay(backup)
    restored = SiteMachine(replace(core, journal=old), saved[old.head(run.policy).state_hash])
    restored.start()
    effects = restored.receive(messages.Rollback(advert=newest))
    assert any(isinstance(effect, Leave) for effect in effects)
    assert restored.state is SiteState.HALTED
    again = SiteMachine(restored.core, restored.intake.model)
    assert [type(effect) for effect in again.start()] == [Leave] and again.state is SiteState.HALTED
    own = run.sites["site-00"].machine.core.journal.peers["site-00"]
    assert run.sites["site-00"].machine.receive(messages.Rollback(advert=own)) == (), "one that it remembers"
    with pytest.raises(VerificationFailed, match="another site's"):
        run.sites["site-00"].machine.receive(messages.Rollback(advert=newest))


def test_peers_refuse_a_sequence_number_they_have_seen() -> None:
    run = federation(4)
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    for site in run.sites.values():
        if site is not run.sites["site-01"]:
            known = replace(site.machine.core.journal.peers["site-01"], sequence=7)
            signature = run.sites["site-01"].machine.core.signer.sign(statements.advert(run.policy, known))
            site.machine.core.journal.peers["site-01"] = replace(known, signature=signature)
    assert (run.run_round(random_updates(run.policy.layout, run.sites, 2))).total is not None
    assert run.planned.attempts[0].publication is None, "the others refuse its old number"
    assert "site-01" not in run.planned.attempts[1].context.sites
    assert run.book.excluded == {"site-01": "restored from an old copy"}


def test_a_gap_in_the_sequence_is_accepted() -> None:
    run = federation(4)
    run.sites["site-01"].machine.core.journal.sequence = 40
    assert run.run_round(random_updates(run.policy.layout, run.sites, 1)).total is not None


def test_patience_ends_before_agree_and_never_after() -> None:
    clock = ManualClock()
    run, machine, survivors = stopped_before(messages.Survivors, clock=clock)
    assert machine.tick() == ()
    clock.advance(machine.core.patience_ms)
    effects = machine.tick()
    assert machine.state is SiteState.IDLE
    assert any(isinstance(e, Ended) and e.reason == "timed_out" for e in effects)

    run, machine, survivors = stopped_before(messages.Survivors, clock=clock)
    machine.receive(survivors)
    clock.advance(10 * machine.core.patience_ms)
    assert machine.tick() == () and machine.state is SiteState.AGREED
    clock.advance(run.policy.secret_ttl_ms)
    effects = machine.tick()
    assert machine.state is SiteState.IDLE
    kept = next(effect for effect in effects if isinstance(effect, Compact)).records
    assert not any(isinstance(record, records.Agreed) for record in kept), "the sealed answer is erased"


def test_a_released_answer_is_erased_at_its_time() -> None:
    clock = ManualClock()
    run, machine, _result = stopped_before(messages.Result, clock=clock)
    assert machine.state is SiteState.RELEASED
    clock.advance(run.policy.secret_ttl_ms)
    effects = machine.tick()
    kept = next(effect for effect in effects if isinstance(effect, Compact)).records
    assert not any(isinstance(record, records.Agreed) for record in kept)
    assert machine.core.journal.released


def test_at_agree_keys_shares_and_vector_are_dropped() -> None:
    """What is left answers one set only: the sealed box of the journal."""
    _run, machine, _quorum = stopped_before(messages.Quorum)
    assert machine.state is SiteState.AGREED and machine.aggregation.attempt is None


def test_abort_after_agree_on_request_only_and_never_after_release() -> None:
    run, machine, quorum = stopped_before(messages.Quorum)
    attempt = run.planned.attempts[0]
    request = attempt.abort_request()
    with pytest.raises(VerificationFailed):
        machine.receive(replace(request, signature=bytes(64)))
    machine.receive(request)
    assert machine.state is SiteState.IDLE
    with pytest.raises(RemoteProtocolError, match="did not agree"):
        machine.receive(quorum)

    run, machine, _result = stopped_before(messages.Result)
    request = run.planned.attempts[0].abort_request()
    with pytest.raises(RemoteProtocolError, match="not allowed in state released"):
        machine.receive(request)
    run.restart_site("site-00")
    with pytest.raises(RemoteProtocolError):
        run.sites["site-00"].machine.receive(request)


@pytest.mark.parametrize(
    ("message", "state"), [(messages.Quorum, SiteState.AGREED), (messages.Result, SiteState.RELEASED)]
)
def test_a_newer_manifest_comes_into_force_where_the_site_only_waits(message: type[Wire], state: SiteState) -> None:
    """A coordinator under the newer manifest has closed the round, and never asks for the end of the attempt."""
    run, machine, late = stopped_before(message)
    assert machine.state is state
    newer = replace(run.policy, manifest_version=run.policy.manifest_version + 1, manifest_hash=bytes([9]) * 32)
    machine.admit(newer)
    assert machine.state is SiteState.IDLE
    if state is SiteState.AGREED:  # what it has promised stays
        assert any(isinstance(effect, Send) for effect in machine.receive(late))
    assert machine.core.journal.released


def test_before_agree_a_newer_manifest_waits() -> None:
    run, machine, _survivors = stopped_before(messages.Survivors)
    newer = replace(run.policy, manifest_version=run.policy.manifest_version + 1, manifest_hash=bytes([9]) * 32)
    with pytest.raises(LocalProtocolError, match="between attempts"):
        machine.admit(newer)
    assert machine.state is SiteState.UPLOADED


def test_a_site_aborts_attempts_that_it_never_joined() -> None:
    run, machine, plan = planned()
    request = run.planned.attempts[0].abort_request()
    effects = machine.receive(request)
    assert any(isinstance(e, Send) and isinstance(e.message, messages.Abort) for e in effects)
    assert machine.core.journal.high_water == (1, 1)
    (*_, refused) = machine.receive(plan)
    assert isinstance(refused, Ended), "having promised not to release, it does not join"
    assert refused.reason == REFUSED
    again = machine.receive(request)
    assert not any(isinstance(e, Persist) for e in again)


def test_a_quorum_with_a_fault_releases_nothing() -> None:
    _run, machine, quorum = stopped_before(messages.Quorum, count=5)
    assert isinstance(quorum, messages.Quorum)
    lines = quorum.agreements
    for wrong in (
        replace(quorum, agreements=lines[:3]),
        replace(quorum, agreements=(*lines[:-1], lines[0])),
        replace(quorum, agreements=(*lines[:-1], replace(lines[-1], signature=bytes(64)))),
        replace(quorum, survivors=bytes(32)),
        replace(quorum, kx=bytes(32)),
    ):
        with pytest.raises(RemoteProtocolError):
            machine.receive(wrong)
        assert machine.state is SiteState.AGREED
    machine.receive(quorum)
    assert machine.state is SiteState.RELEASED


def test_one_update_for_each_round() -> None:
    run = federation(4)
    updates = random_updates(run.policy.layout, run.sites, 1)
    run.begin_round(updates)
    machine = run.sites["site-00"].machine
    pending = run.sites["site-00"].update
    assert pending is not None
    assert machine.load_update(pending) == (), "the same one again, after a restart, is fine"
    other = replace(pending, words=updates["site-01"])
    with pytest.raises(PolicyViolation, match="already has another update"):
        machine.load_update(other)
    with pytest.raises(PolicyViolation, match="newest model"):
        machine.load_update(replace(pending, state_hash=bytes(32)))
    with pytest.raises(LocalProtocolError, match="one vector of the layout"):
        machine.load_update(replace(pending, words=np.zeros(3, dtype=np.uint32)))


def test_three_updates_on_a_standing_model_are_enough() -> None:
    """Void rounds leave the model where it is; the fourth fresh update on it is refused without noise."""
    for private in (False, True):
        run = federation(4, dp_active=private)
        verdicts = []
        for number in range(4):
            updates = random_updates(run.policy.layout, run.sites, number)
            updates["site-00"][run.policy.layout.slot("weight")] = run.policy.layout.half_ring
            verdicts.append(run.run_round(updates).verdict)
        if private:
            assert None not in verdicts
        else:
            assert verdicts[:3] == [verdicts[0]] * 3 and verdicts[3] is None
            assert "different updates were already sent" in str(run.sites["site-01"].errors[-1])


def test_an_older_manifest_is_refused() -> None:
    run = federation(4)
    machine = run.sites["site-00"].machine
    newer = replace(run.policy, manifest_version=3, manifest_hash=bytes(32))
    assert take_policy(machine, newer)
    for version, digest in ((2, bytes(32)), (3, bytes([1]) * 32)):
        with pytest.raises(PolicyViolation, match="does not follow"):
            take_policy(machine, replace(newer, manifest_version=version, manifest_hash=digest))
    run.sites["site-01"].machine.state = SiteState.UPLOADED
    with pytest.raises(LocalProtocolError, match="between attempts"):
        take_policy(run.sites["site-01"].machine, newer)


def test_the_manifest_holds_for_a_whole_round() -> None:
    _run, machine, _ = stopped_before(messages.Survivors)
    earlier = machine.core.journal.of_round(1)
    context = replace(earlier[0].context, manifest_hash=bytes(32))
    with pytest.raises(PolicyViolation, match="changed inside a round"):
        checks.check_plan_manifest_of_round(earlier, context)


def test_garbage_ends_the_open_attempt_before_agree_only() -> None:
    _run, machine, _survivors = stopped_before(messages.Survivors)
    error = VerificationFailed("garbage")
    assert any(isinstance(e, Ended) and e.error is error for e in machine.reject(error))
    assert machine.state is SiteState.IDLE and machine.reject(error) == ()


def test_an_upload_resumes_at_a_frame_with_the_same_bytes() -> None:
    run, machine, survivors = stopped_before(messages.Survivors)
    assert isinstance(survivors, messages.Survivors)
    (effect,) = machine.receive(messages.UploadResume(kx=survivors.kx, next_frame=0))
    assert isinstance(effect, SendUpload)
    sent = [frame.data for frame in effect.frames()]
    uploads = [sent_message(sender, data) for sender, _, data in run.transcript or () if sender == "site-00"]
    assert sent == [frame.data for frame in uploads if isinstance(frame, messages.UploadFrame)]
    with pytest.raises(RemoteProtocolError, match="no such frame"):
        machine.receive(messages.UploadResume(kx=survivors.kx, next_frame=99))


def test_secrets_do_not_print() -> None:
    run, machine, _survivors = stopped_before(messages.Survivors)
    attempt = machine.aggregation.attempt
    assert attempt is not None
    shown = repr(attempt) + repr(machine.core) + repr(run.sites["site-00"].update)
    for secret in (attempt.seed.reveal(), attempt.mask_seed.reveal(), machine.core.storage_key.reveal()):
        assert repr(secret) not in shown and secret.hex() not in shown
    assert "redacted" in shown and names(1)[0] in shown
