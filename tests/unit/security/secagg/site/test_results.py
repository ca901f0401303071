"""Results: the sum is checked by those it concerns, the model follows from it, and late sites catch up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from protos.loopback import Drop
from security.crypto.ring import FRAME_BYTES
from security.identity.membership import AuditMode
from security.secagg import certificate_checks, messages, published, records, statements
from security.secagg import state as states
from security.secagg.certificates import Ack, CheckCertificate
from security.secagg.context import SumVerdict
from security.secagg.effects import Advanced, DraftState, Effect, SaveState
from security.secagg.fields import Wire
from security.secagg.layout import WEIGHT, Layout
from security.secagg.site import result_checks
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from security.secagg.site.result_checks import assigned_chunks
from security.secagg.transitions import CoordinatorState, SiteState
from security.secrets import Secret
from tests.support.secagg_world import RecordedFederation, federation, random_updates, small_layout

CHUNKS = 5
KEY = Secret(bytes(32))


@cache
def long_layout(roster: int) -> Layout:
    """A vector of several chunks."""
    return small_layout(roster, words=CHUNKS * FRAME_BYTES // 3 - 60_000)


def changing_one(chunk: int) -> Callable[..., states.SumOutcome]:
    """The coordinator, first to look at the sum, changes one coordinate, consistently in everything it signs."""
    original = states.next_state

    def next_state(layout: Layout, state: Any, total: Any, **rules: Any) -> states.SumOutcome:
        if not changed:
            changed.append(True)
            total[chunk * layout.ring.frame_words] += 1
        return original(layout, state, total, **rules)

    changed: list[bool] = []
    return next_state


@pytest.mark.parametrize("ring_bits", [32, 64])
def test_every_chunk_is_covered_by_c_plus_one_sites(ring_bits: int) -> None:
    run = federation(4, layout=small_layout(4, words=150_000, ring_bits=ring_bits))
    assert run.policy.chunks >= 3
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    publication = run.planned.attempts[0].publication
    assert publication is not None and run.check is not None
    counts = [0] * run.policy.chunks
    for ack in run.check.acks:
        for chunk in certificate_checks.chunks_in(ack.bitmap, run.policy.chunks):
            counts[chunk] += 1
    assert min(counts) > run.policy.c
    assert run.planned.attempts[0].state is CoordinatorState.CERTIFIED


def test_a_changed_coordinate_is_found_and_stops_the_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    run = federation(4, layout=long_layout(4))
    monkeypatch.setattr(states, "next_state", changing_one(chunk=2))
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    assert run.check is None, "no certificate for a wrong sum"
    halted = [name for name, site in run.sites.items() if site.machine.state is SiteState.HALTED]
    assert len(halted) > run.policy.c
    for name in halted:
        site = run.sites[name]
        assert isinstance(site.errors[-1], result_checks.WrongSum)
        assert "not through the coordinator" in str(site.errors[-1].hint)
        assert isinstance(site.wal[-1], records.Stopped)
        with pytest.raises(RemoteProtocolError, match="not allowed in state halted"):
            site.machine.receive(run.planned.attempts[0].plan)


def test_without_a_certificate_nobody_enters_the_next_aggregation() -> None:
    run = federation(4)
    run.hook = lambda sender, receiver, message: [] if isinstance(message, Ack) else [message]
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    assert run.check is None
    run.hook = None
    outcome = run.run_round(random_updates(run.policy.layout, run.sites, 2))
    assert outcome.total is None
    assert "without its check certificate" in str(run.sites["site-00"].errors[-1])


def test_training_on_a_provisional_model_is_forbidden_only_when_strict() -> None:
    run = federation(4)
    run.hook = lambda sender, receiver, message: [] if isinstance(message, Ack) else [message]
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    updates = random_updates(run.policy.layout, run.sites, 2)
    run.sites["site-00"].machine.core.mandate.policy = replace(run.policy, strict=True)
    with pytest.raises(PolicyViolation, match="has no check certificate"):
        run.begin_round(updates)


def test_sampled_audit_asks_for_a_quorum_of_acknowledgements() -> None:
    run = federation(4, layout=long_layout(4), audit=AuditMode.SAMPLED)
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    assert run.check is not None and len(run.check.acks) >= run.policy.thresholds(4).t
    looked = [certificate_checks.chunks_in(ack.bitmap, run.policy.chunks) for ack in run.check.acks]
    assert all(len(chunks) == run.policy.spot_check_chunks for chunks in looked)


def test_the_chunks_of_absent_sites_are_taken_over() -> None:
    run = federation(5, layout=long_layout(5))
    run.run_round(random_updates(run.policy.layout, run.sites, 1), drops={"site-04": Drop(messages.ChunkRequest)})
    assert run.check is not None
    assert "site-04" not in {ack.site for ack in run.check.acks if any(ack.bitmap)}


def test_chunks_are_shared_out_evenly() -> None:
    run = federation(5, layout=long_layout(5))
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    header = run.sites["site-00"].machine.intake.audit
    assert header is not None
    shares = [
        assigned_chunks(run.policy, header.header, name, KEY) for name in header.header.result.context.sites
    ]
    assert sum(len(share) for share in shares) == run.policy.chunks * (run.policy.c + 1)
    assert assigned_chunks(run.policy, header.header, "stranger", KEY) == []


def test_a_manifest_with_more_colluders_has_more_sites_check_a_sum_that_was_made_before_it() -> None:
    """Else a sum that waits for its certificate when the roster grows never gets it, and the run stands still."""
    run = federation(6, layout=long_layout(6))
    run.hook = lambda sender, receiver, message: [] if isinstance(message, Ack) else [message]
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    newer = replace(run.policy, c=run.policy.c + 1)
    checked: Counter[int] = Counter()
    for site in run.sites.values():
        machine = site.machine
        audit = machine.intake.audit
        assert audit is not None and not audit.todo
        machine.core.mandate.policy = newer
        machine.receive(messages.AuditOrder(result=audit.header.result_hash, absent=()))
        checked.update({*audit.good, *audit.todo})
    assert set(checked.values()) == {newer.c + 1} and len(checked) == newer.chunks


def good_round(**options: Any) -> RecordedFederation:
    run = federation(4, **options)
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    return run


@pytest.mark.parametrize("fault", ["twice", "other result", "other state", "forged", "short", "beyond", "stranger"])
def test_a_check_certificate_with_a_fault(fault: str) -> None:
    run = good_round()
    assert run.check is not None
    head = run.sites["site-00"].machine.core.head
    acks = list(run.check.acks)
    first = acks[0]
    acks[0] = {
        "twice": acks[1],
        "other result": replace(first, result=bytes(32)),
        "other state": replace(first, state_hash=bytes(32)),
        "forged": replace(first, signature=bytes(64)),
        "short": replace(first, bitmap=b""),
        "beyond": replace(first, bitmap=b"\xff"),
        "stranger": replace(first, site="stranger"),
    }[fault]
    check = CheckCertificate(acks=tuple(acks[: run.policy.c + 1] if fault == "stranger" else acks))
    with pytest.raises(VerificationFailed):
        certificate_checks.check_certificate(
            run.policy, check, result=head.result, state_hash=head.state_hash, quorum=head.quorum
        )


def test_signatures_of_revoked_sites_no_longer_count() -> None:
    run = good_round()
    head = run.sites["site-00"].machine.core.head
    told = {"result": head.result, "state_hash": head.state_hash, "quorum": head.quorum}
    certificate_checks.check_certificate(run.policy, run.check, **told)
    gone = frozenset(entry.cert for entry in run.policy.roster[:3])
    with pytest.raises(VerificationFailed, match="do not cover"):
        certificate_checks.check_certificate(replace(run.policy, revoked=gone), run.check, **told)


def test_a_sum_out_of_range_is_void_everywhere_and_the_model_stays() -> None:
    run = federation(4)
    updates = random_updates(run.policy.layout, run.sites, 1)
    updates["site-00"][run.policy.layout.slot("weight")] = run.policy.layout.half_ring
    before = states.state_hash(run.model)
    outcome = run.run_round(updates)
    assert outcome.verdict is SumVerdict.VOID
    assert states.state_hash(run.model) == before
    heads = {site.machine.core.head for site in run.sites.values()}
    assert len(heads) == 1 and next(iter(heads)).state_hash == before
    assert run.run_round(random_updates(run.policy.layout, run.sites, 2)).verdict is SumVerdict.GOOD


@pytest.mark.parametrize(
    "change",
    ["signature", "sum", "state", "verdict", "seed", "seeds", "survivors", "agreements", "adverts", "deals", "history"],
)
def test_a_result_header_with_a_fault_is_refused(change: str) -> None:
    """The coordinator signs whatever it likes; the site still refuses everything but the truth."""
    run = federation(4)
    held: list[messages.Result] = []

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        if receiver == "site-00" and isinstance(message, messages.Result):
            held.append(message)
            return []
        return [] if receiver == "site-00" and isinstance(message, messages.SumFrame) else [message]

    run.hook = hook
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    result = held[0]
    faults: dict[str, dict[str, Any]] = {
        "signature": {},
        "sum": {"sum_root": bytes(32)},
        "state": {"state_hash": bytes(32)},
        "verdict": {"verdict": 1},
        "seed": {"seeds": (bytes(32), *result.seeds[1:])},
        "seeds": {"seeds": result.seeds[1:]},
        "survivors": {"uploads": result.uploads[1:]},
        "agreements": {"agreements": result.agreements[: run.policy.thresholds(4).t - 1]},
        "adverts": {"adverts": (replace(result.adverts[0], commitment=bytes(32)), *result.adverts[1:])},
        "deals": {"deals": bytes(32)},
        "history": {"context": replace(result.context, prev_result=bytes(32))},
    }
    forged = replace(result, **faults[change])
    if change == "signature":
        forged = replace(forged, signature=bytes(64))
    else:
        _, _, result_hash = published.result_digests(forged)
        forged = replace(forged, signature=run.core.signer.sign(statements.result(result_hash)))
    site = run.sites["site-00"].machine
    head, state = site.core.head, site.state
    publication = run.planned.attempts[0].publication
    assert publication is not None
    _, _, result_hash = published.result_digests(forged)

    def receive_all() -> None:
        site.receive(forged)
        for frame in publication.sum_to("site-00").frames():
            site.receive(replace(frame, result=result_hash))

    with pytest.raises((VerificationFailed, PolicyViolation)):
        receive_all()
    assert site.core.head == head and site.state is state
    site.receive(result)
    for frame in publication.sum_to("site-00").frames():
        site.receive(frame)
    assert site.core.head.result == publication.result_hash, "the right one is still accepted"


def test_frames_come_in_order_and_whole() -> None:
    run = federation(4, layout=long_layout(4))
    run.hook = lambda s, r, m: [] if r == "site-00" and isinstance(m, messages.SumFrame) else [m]
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    publication = run.planned.attempts[0].publication
    assert publication is not None
    site = run.sites["site-00"].machine
    frames = list(publication.sum_to("site-00").frames())
    for wrong in (frames[1], replace(frames[0], data=frames[0].data[:-4]), replace(frames[0], result=bytes(32))):
        with pytest.raises(RemoteProtocolError):
            site.receive(wrong)
    for frame in frames:
        site.receive(frame)
    assert site.core.head.result == publication.result_hash
    with pytest.raises(RemoteProtocolError, match="without a header"):
        site.receive(frames[0])


def test_the_next_model_is_drafted_while_its_sum_comes_and_kept_when_it_is_right() -> None:
    run = federation(4, layout=long_layout(4))
    held: list[messages.Result] = []

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        if receiver == "site-00" and isinstance(message, messages.Result):
            held.append(message)
        return [] if receiver == "site-00" and isinstance(message, messages.SumFrame) else [message]

    run.hook = hook
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    publication, layout = run.planned.attempts[0].publication, run.policy.layout
    assert publication is not None
    machine = run.sites["site-00"].machine
    first, *others = publication.sum_to("site-00").frames()
    weight = layout.slot(WEIGHT).start // layout.ring.frame_words
    assert first.index == weight > 0, "the weight comes first, wherever it lies"
    spoiled = replace(others[-1], data=bytes(len(others[-1].data)))

    def drafts(frames: Sequence[messages.SumFrame]) -> list[Effect]:
        return [effect for frame in frames for effect in machine.receive(frame)]

    assert drafts([first]) == [], "nothing before the first word is there"
    with pytest.raises(VerificationFailed, match="announced root"):
        drafts([*others[:-1], spoiled])
    assert machine.core.head.round == 0
    assert machine.receive(held[0]) == ()
    effects = drafts([first, *others])
    values = np.empty(layout.state_words, dtype="<f4")
    place = 0
    for effect in effects:
        if isinstance(effect, DraftState):
            assert effect.start == place, "a spoiled draft is begun anew"
            place += len(effect.values)
            values[effect.start : place] = effect.values
    saved = [effect for effect in effects if isinstance(effect, SaveState)]
    assert place == layout.state_words and [effect.drafted for effect in saved] == [True]
    assert states.state_hash(values) == saved[0].state_hash == publication.result.state_hash


def fresh_site(run: RecordedFederation, name: str, model: Any) -> SiteMachine:
    core = replace(run.sites[name].machine.core, journal=Journal())
    machine = SiteMachine(core, model)
    machine.start()
    return machine


def test_a_site_that_was_away_replays_the_sums() -> None:
    run = federation(5)
    first = run.model
    history = []
    for number in range(3):
        run.run_round(random_updates(run.policy.layout, run.sites, number))
        publication = run.planned.attempts[-1].publication
        assert publication is not None
        history.append((publication, run.check))
    late = fresh_site(run, "site-04", first)
    for publication, check in history:
        late.receive(publication.result)
        for frame in publication.sum_to("site-04").frames():
            late.receive(frame)
        with pytest.raises(PolicyViolation, match=r"no check certificate|follow"):
            late.receive(history[-1][0].result if publication is not history[-1][0] else history[0][0].result)
        assert check is not None
        late.receive(messages.ResultCertificate(result=publication.result_hash, check=check))
    assert late.core.head == run.sites["site-00"].machine.core.head or late.core.head.certified
    assert late.intake.model.tobytes() == run.model.tobytes()


def test_a_new_site_starts_from_a_certified_state() -> None:
    run = federation(5, movement=states.MovementRule(3))
    first = run.model
    for number in range(2):
        run.run_round(random_updates(run.policy.layout, run.sites, number))
    publication = run.planned.attempts[-1].publication
    assert publication is not None and run.check is not None
    late = fresh_site(run, "site-04", first)
    jump = messages.Jump(result=publication.result, check=run.check)
    frame = messages.StateFrame(state_hash=publication.result.state_hash, index=0, data=run.model.tobytes())
    with pytest.raises(RemoteProtocolError, match="not the next one"):
        late.receive(frame)
    late.receive(jump)
    with pytest.raises(RemoteProtocolError, match="wrong length"):
        late.receive(replace(frame, data=frame.data[:-4]))
    effects = late.receive(frame)
    assert any(isinstance(effect, SaveState) for effect in effects)
    assert any(isinstance(effect, Advanced) for effect in effects)
    assert late.core.head.certified and late.core.head.result == publication.result_hash
    assert late.intake.model.tobytes() == run.model.tobytes()
    assert any(late.core.head.movements) and late.core.head.movements == run.core.movements, "it has the same caps"
    with pytest.raises(PolicyViolation, match="not newer"):
        late.receive(jump)


@pytest.mark.parametrize(
    ("last", "left"),
    [
        (messages.Survivors, SiteState.UPLOADED),
        (messages.Quorum, SiteState.AGREED),
        (messages.Result, SiteState.RELEASED),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_site_that_left_in_the_middle_of_a_round_and_was_long_away_takes_a_certified_state(
    last: type[Wire], left: SiteState, restarted: bool
) -> None:
    """The sum of its own round is no longer kept then: the certified state ends the round that it left open."""
    run = federation(5)
    silent: list[Wire] = []

    def hook(_sender: str, receiver: str, message: Wire) -> list[Wire]:
        if receiver == "site-04" and (silent or isinstance(message, last)):
            silent.append(message)
            return []
        return [message]

    run.hook = hook
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    publication = run.planned.attempts[-1].publication
    assert publication is not None and run.check is not None
    assert run.sites["site-04"].machine.state is left
    if restarted:
        run.restart_site("site-04")
    away = run.sites["site-04"].machine
    assert away.state is (SiteState.IDLE if restarted and left is SiteState.UPLOADED else left)
    away.receive(messages.Jump(result=publication.result, check=run.check))
    away.receive(messages.StateFrame(state_hash=publication.result.state_hash, index=0, data=run.model.tobytes()))
    assert away.state is SiteState.IDLE and away.core.head.certified and away.aggregation.update is None
    assert away.intake.model.tobytes() == run.model.tobytes()
    assert not away.core.journal.attempts, "no answer of the round is kept"


@pytest.mark.parametrize("fault", ["uncovered", "wrong state", "other run", "forged"])
def test_a_jump_with_a_fault_is_refused(fault: str) -> None:
    run = federation(5)
    first = run.model
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    publication = run.planned.attempts[-1].publication
    assert publication is not None and run.check is not None
    late = fresh_site(run, "site-04", first)
    jump = messages.Jump(result=publication.result, check=run.check)
    state = run.model.copy()
    if fault == "uncovered":
        jump = replace(jump, check=CheckCertificate(acks=run.check.acks[: run.policy.c]))
    elif fault == "wrong state":
        state[0] += 1
    elif fault == "other run":
        late.core.mandate.policy = replace(run.policy, run="another")
    else:
        jump = replace(jump, result=replace(publication.result, signature=bytes(64)))

    def receive_all() -> None:
        late.receive(jump)
        late.receive(messages.StateFrame(state_hash=jump.result.state_hash, index=0, data=state.tobytes()))

    with pytest.raises((VerificationFailed, PolicyViolation)):
        receive_all()
    assert late.core.head.round == 0


def test_a_restarted_site_takes_up_its_audit() -> None:
    """All sites die while they check the sum; asked again, they check it again, and the round is covered."""
    run = federation(4, layout=long_layout(4))
    run.hook = lambda s, r, m: [] if isinstance(m, messages.ChunkPiece) else [m]
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    assert run.check is None
    run.hook = None
    for name in run.sites:
        run.restart_site(name)
    run.pump()
    publication = run.planned.attempts[0].publication
    assert publication is not None and publication.certificate() is not None


def test_a_result_that_is_certified_is_not_taken_again() -> None:
    """It would end whatever attempt of the next round is open."""
    run = federation(4)
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    publication, machine = run.planned.attempts[-1].publication, run.sites["site-00"].machine
    assert publication is not None and run.check is not None
    machine.receive(messages.ResultCertificate(result=publication.result_hash, check=run.check))
    with pytest.raises(PolicyViolation, match="does not follow"):
        machine.receive(publication.result)


def test_acknowledgements_go_on_only_for_the_newest_round() -> None:
    run = good_round()
    journal, head = run.sites["site-00"].machine.core.journal, run.sites["site-00"].machine.core.head
    result_checks.check_may_ack(journal, head)
    with pytest.raises(PolicyViolation, match="another result"):
        result_checks.check_may_ack(replace(journal, acked=bytes(32)), head)
    with pytest.raises(PolicyViolation, match="later round"):
        result_checks.check_may_ack(replace(journal, high_water=(9, 1)), head)


def test_pieces_are_of_the_chunk_that_was_asked_for() -> None:
    run = federation(4, layout=long_layout(4))
    held: list[tuple[str, messages.ChunkPiece]] = []

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        # Whoever is asked first: which site looks at which chunk follows from the hash of the result, and one in
        # twenty times a given site looks at none.
        if isinstance(message, messages.ChunkPiece) and receiver == (held[0][0] if held else receiver):
            held.append((receiver, message))
            return []
        return [message]

    run.hook = hook
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    name, piece = held[0]
    site = run.sites[name].machine
    assert site.intake.audit is not None
    for wrong in (
        replace(piece, chunk=piece.chunk + 1),
        replace(piece, site="stranger"),
        replace(piece, data=bytes(len(piece.data))),
        replace(piece, path=piece.path[:-1]),
    ):
        with pytest.raises((RemoteProtocolError, VerificationFailed)):
            site.receive(wrong)
    site.receive(piece)
    with pytest.raises(RemoteProtocolError, match="came before"):
        site.receive(piece)
    assert site.receive(replace(piece, result=bytes(32))) == ()
