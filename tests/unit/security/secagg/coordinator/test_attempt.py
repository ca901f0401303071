"""What a coordinator accepts from sites, whom it blames, and when it stops waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lazaret.errors import RemoteProtocolError, VerificationFailed
from security.clock import ManualClock
from security.secagg import certificate_checks, messages, records, statements
from security.secagg.certificates import AbortCertificate, Ack, Advert, Opened
from security.secagg.context import RepeatOf
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.recovery import restore_round
from security.secagg.coordinator.rounds import BlameBook, CoordinatorRound, abort_certificate
from security.secagg.effects import Blamed, Ended, Send
from security.secagg.fields import Wire
from security.secagg.records import AttemptOutcome
from security.secagg.site import checks
from security.secagg.site.attempt import deal_root
from security.secagg.site.journal import Journal
from security.secagg.transitions import CoordinatorState, SiteState
from security.secrets import Secret
from tests.support.secagg_world import RecordedFederation, federation, random_updates

Change = Callable[[RecordedFederation, Any], list[Wire]]


def run_with(kind: type[Wire], change: Change, *, sender: str = "site-01", count: int = 5) -> RecordedFederation:
    """A round in which one site's first message of a kind is replaced on its way."""
    run = federation(count)
    done: list[bool] = []

    def hook(source: str, receiver: str, message: Wire) -> list[Wire]:
        if source == sender and isinstance(message, kind) and not done:
            done.append(True)
            return change(run, message)
        return [message]

    run.hook = hook
    run.transcript = []
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    assert done
    run.check_promises()
    return run


def signed(run: RecordedFederation, site: str, statement: statements.Statement) -> bytes:
    return run.sites[site].machine.core.signer.sign(statement)


def paused(state: CoordinatorState, count: int = 5) -> tuple[RecordedFederation, CoordinatorAttempt]:
    """A federation whose coordinator waits in a state, because the wire loses what it waits for."""
    run = federation(count, clock=ManualClock())
    lost = {
        CoordinatorState.ADVERTISING: Advert,
        CoordinatorState.DEALING: messages.Shares,
        CoordinatorState.UPLOADING: messages.UploadHeader,
        CoordinatorState.AGREEING: messages.Agree,
        CoordinatorState.UNMASKING: messages.Unmask,
        CoordinatorState.PUBLISHED: Ack,
    }[state]
    run.hook = lambda sender, receiver, message: [] if isinstance(message, lost) else [message]
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    attempt = run.planned.next_attempt(list(run.sites))
    run._do_coordinator(attempt.start())
    run.pump()
    assert attempt.state is state
    run.hook = None
    return run, attempt


def two_uploads(run: RecordedFederation, header: messages.UploadHeader) -> list[Wire]:
    other = statements.upload(header.kx, header.deals, header.length, bytes(32))
    return [header, replace(header, root=bytes(32), signature=signed(run, header.site, other))]


def two_deals(run: RecordedFederation, shares: messages.Shares) -> list[Wire]:
    lines = (replace(shares.shares[0], b_hash=bytes(32)), *shares.shares[1:])
    root = deal_root(shares.kx, shares.site, run.planned.attempts[-1].dealing.shown().adverts, lines)
    second = replace(shares, shares=lines, signature=signed(run, shares.site, statements.deal(shares.kx, root)))
    return [shares, second]


def test_two_answers_to_one_question_exclude_their_signer() -> None:
    assert run_with(messages.UploadHeader, two_uploads).book.excluded == {"site-01": "two uploads"}
    assert run_with(messages.Shares, two_deals).book.excluded == {"site-01": "two share lists"}


def test_an_upload_without_its_root_is_not_in_the_sum() -> None:
    def change(run: RecordedFederation, frame: messages.UploadFrame) -> list[Wire]:
        return [replace(frame, data=bytes(len(frame.data)))]

    run = run_with(messages.UploadFrame, change)
    assert run.book.excluded == {"site-01": "upload without its root"}
    publication = run.planned.attempts[0].publication
    assert publication is not None and "site-01" not in publication.survivors


UNSIGNED: dict[type[Wire], Callable[[Any], Wire]] = {
    Advert: lambda m: replace(m, ctx=bytes(32)),
    messages.Shares: lambda m: replace(m, shares=m.shares[:-1]),
    messages.UploadHeader: lambda m: replace(m, length=m.length + 4),
    messages.Agree: lambda m: replace(m, survivors=bytes(32)),
    messages.Unmask: lambda m: replace(m, survivors=bytes(32)),
    Ack: lambda m: replace(m, result=bytes(32)),
}


@pytest.mark.parametrize("kind", list(UNSIGNED), ids=lambda kind: kind.__name__)
def test_answers_that_do_not_fit_are_not_counted(kind: type[Wire]) -> None:
    """Forged, or honestly signed but of something else: the coordinator goes on without them."""
    for sign in (False, True):

        def change(run: RecordedFederation, message: Any, sign: bool = sign) -> list[Wire]:
            changed: Any = UNSIGNED[kind](message)
            if sign:
                made = {
                    Advert: lambda: statements.advert(run.policy, changed),
                    messages.Shares: lambda: statements.deal(changed.kx, bytes(32)),
                    messages.UploadHeader: lambda: statements.upload(
                        changed.kx, changed.deals, changed.length, changed.root
                    ),
                    messages.Agree: lambda: statements.agree(changed.kx, changed.survivors),
                    messages.Unmask: lambda: statements.unmask(changed.kx, changed.survivors, changed.shares),
                    Ack: lambda: statements.ack(changed.result, changed.state_hash, changed.bitmap),
                }[kind]()
                changed = replace(changed, signature=signed(run, message.site, made))
            return [changed]

        run = run_with(kind, change)
        assert run.planned.current is not None and run.planned.current.publication is not None


def test_each_step_waits_its_time_and_then_goes_on() -> None:
    for state, after in (
        (CoordinatorState.ADVERTISING, CoordinatorState.DEAD),
        (CoordinatorState.DEALING, CoordinatorState.ABORTING),
        (CoordinatorState.UPLOADING, CoordinatorState.ABORTING),
        (CoordinatorState.AGREEING, CoordinatorState.ABORTING),
        (CoordinatorState.UNMASKING, CoordinatorState.ABORTING),
    ):
        run, attempt = paused(state)
        assert attempt.tick() == () and attempt.deadline is not None
        clock = run.clock
        assert isinstance(clock, ManualClock)
        clock.advance(attempt.deadline - clock.mono_ms())
        attempt.tick()
        assert attempt.state is after, state
    _, attempt = paused(CoordinatorState.PUBLISHED)
    assert attempt.deadline is None and attempt.tick() == () and attempt.close_step() == ()


def test_giving_up_twice_is_the_end() -> None:
    _, attempt = paused(CoordinatorState.ADVERTISING)
    effects = attempt.give_up()
    assert attempt.state is CoordinatorState.DEAD and any(isinstance(e, Ended) for e in effects)
    assert not [e for e in effects if isinstance(e, Blamed)], "nobody is to blame"
    _run, attempt = paused(CoordinatorState.AGREEING)
    attempt.give_up()
    attempt.give_up()
    assert attempt.state is CoordinatorState.LOST


@pytest.mark.parametrize(
    ("state", "asked"),
    [
        (CoordinatorState.ADVERTISING, messages.Plan),
        (CoordinatorState.DEALING, messages.Adverts),
        (CoordinatorState.UPLOADING, messages.Deliver),
        (CoordinatorState.AGREEING, messages.Survivors),
        (CoordinatorState.UNMASKING, messages.Quorum),
        (CoordinatorState.PUBLISHED, messages.Result),
    ],
)
def test_a_site_that_comes_back_is_asked_again_and_the_round_ends(state: CoordinatorState, asked: type[Wire]) -> None:
    run, attempt = paused(state)
    for name, site in run.sites.items():
        effects = run.planned.receive(name, site.machine.hello())
        assert [type(e.message) for e in effects if isinstance(e, Send)] == [asked]
        run._do_coordinator(effects)
    run.pump()
    assert attempt.state is CoordinatorState.CERTIFIED


def test_a_site_that_comes_back_to_a_dead_attempt_closes_it() -> None:
    run, attempt = paused(CoordinatorState.DEALING)
    run.hook = lambda sender, receiver, message: [] if isinstance(message, messages.AbortRequest) else [message]
    run._do_coordinator(attempt.close_step())
    run.pump()
    site = run.sites["site-00"].machine
    assert site.state is SiteState.DEALT
    run.hook = None
    run._do_coordinator(run.planned.receive("site-00", site.hello()))
    run.pump()
    assert site.state is SiteState.IDLE


def test_statements_about_another_attempt_are_refused() -> None:
    run, attempt = paused(CoordinatorState.UPLOADING)
    kx, zero = attempt.dealing.kx, bytes(32)

    def sent(message: Wire) -> None:
        attempt.receive("site-00", message)

    accuse = statements.accuse(zero, "site-01")
    with pytest.raises(VerificationFailed, match="another attempt"):
        sent(messages.Accusation(site="site-00", kx=zero, dealer="site-01", signature=signed(run, "site-00", accuse)))
    abort = signed(run, "site-00", statements.abort(zero, 1))
    with pytest.raises(VerificationFailed, match="another attempt"):
        sent(messages.Abort(site="site-00", ctx=zero, code=1, signature=abort))
    with pytest.raises(VerificationFailed, match="no evidence against"):
        sent(messages.Rollback(advert=attempt.dealing.adverts["site-01"]))
    with pytest.raises(RemoteProtocolError, match="not allowed in state uploading"):
        sent(messages.ChunkRequest(site="site-00", result=zero, chunk=0))
    unmask = messages.Unmask(site="site-00", kx=kx, survivors=zero, shares=(), signature=bytes(64))
    with pytest.raises(RemoteProtocolError, match="not allowed"):
        sent(unmask)
    run, attempt = paused(CoordinatorState.ADVERTISING)
    assert attempt.receive("site-00", messages.Refusal(site="site-00", ctx=zero)) == ()
    assert attempt.receive("site-00", run.sites["site-00"].machine.hello()) != ()


def test_chunks_are_served_to_roster_sites_only() -> None:
    _run, attempt = paused(CoordinatorState.PUBLISHED)
    assert attempt.publication is not None
    result = attempt.publication.result_hash
    for request in (
        messages.ChunkRequest(site="site-00", result=bytes(32), chunk=0),
        messages.ChunkRequest(site="site-00", result=result, chunk=99),
    ):
        with pytest.raises(RemoteProtocolError, match="no such chunk"):
            attempt.receive("site-00", request)
    with pytest.raises(RemoteProtocolError, match="not in the cohort"):
        attempt.receive("stranger", messages.ChunkRequest(site="stranger", result=result, chunk=0))
    with pytest.raises(RemoteProtocolError, match="no such chunk"):
        list(attempt.uploads.pieces(result, 99, ["site-00"]))


def test_a_restarted_coordinator_remembers_ends_and_aborts() -> None:
    run, attempt = paused(CoordinatorState.AGREEING)
    run._do_coordinator(attempt.close_step())
    run.pump()
    assert attempt.state is CoordinatorState.DEAD
    stored = {attempt.context.state_hash: run.model}
    found = restore_round(run.core, BlameBook(), run.coordinator_wal, lambda digest: stored[digest])
    assert found is not None and found.attempts[0].state is CoordinatorState.DEAD
    assert abort_certificate(found.attempts[0]) == abort_certificate(attempt)
    assert restore_round(run.core, BlameBook(), [], lambda digest: stored[digest]) is None
    with pytest.raises(Exception, match="not a coordinator's record"):
        restore_round(
            run.core,
            BlameBook(),
            [*run.coordinator_wal, records.ResultCertified(result=bytes(32))],
            lambda digest: stored[digest],
        )
    empty = CoordinatorRound(run.core, BlameBook(), found.start, run.model)
    with pytest.raises(RemoteProtocolError, match="no attempt is open"):
        empty.receive("site-00", run.sites["site-00"].machine.hello())


def tampered_delivery(change: Callable[[messages.Deliver], messages.Deliver]) -> RecordedFederation:
    run = federation(4)
    run.hook = lambda sender, receiver, message: [
        change(message) if receiver == "site-00" and isinstance(message, messages.Deliver) else message
    ]
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    run.run_attempt(run.planned.next_attempt(list(run.sites)))
    return run


def swapped_boxes(deliver: messages.Deliver) -> messages.Deliver:
    one, two, *rest = deliver.shares
    return replace(deliver, shares=(replace(one, share=two.share), replace(two, share=one.share), *rest))


@pytest.mark.parametrize(
    "change",
    [
        swapped_boxes,
        lambda d: replace(d, shares=d.shares[1:]),
        lambda d: replace(d, roots=d.roots[1:]),
        lambda d: replace(d, roots=(replace(d.roots[0], root=bytes(32)), *d.roots[1:])),
        lambda d: replace(d, kx=bytes(32)),
        lambda d: replace(d, shares=(replace(d.shares[0], path=d.shares[0].path[1:]), *d.shares[1:])),
    ],
    ids=["swapped boxes", "a box less", "a root less", "own root", "other keys", "short path"],
)
def test_a_tampered_delivery_ends_the_attempt_and_accuses_nobody(
    change: Callable[[messages.Deliver], messages.Deliver],
) -> None:
    run = tampered_delivery(change)
    ends = [record for record in run.written["site-00"] if isinstance(record, records.AttemptEnded)]
    assert [(record.ctx, record.outcome) for record in ends] == [(run.planned.attempts[0].ctx, AttemptOutcome.ABORTED)]
    assert not run.planned.attempts[0].disputes.accused
    assert not any(isinstance(record, records.UploadBound) for record in run.written["site-00"])


def test_rules_that_no_honest_path_meets() -> None:
    """Second lines of defence: what they refuse cannot come about while the first ones hold."""
    run, attempt = paused(CoordinatorState.UNMASKING)
    machine = run.sites["site-00"].machine
    memory = machine.core.journal.attempts[attempt.ctx]
    with pytest.raises(RemoteProtocolError, match="already decided"):
        checks.check_not_agreed(memory)
    with pytest.raises(RemoteProtocolError, match="has aborted"):
        checks.check_may_release(replace(memory, outcome=AttemptOutcome.ABORTED))
    with pytest.raises(RemoteProtocolError, match="has released"):
        checks.check_may_abort(Journal(released={attempt.ctx}), attempt.ctx)
    with pytest.raises(VerificationFailed, match="own upload was changed"):
        checks.check_own_upload("site-00", bytes(32), attempt.survivors.uploads if attempt.survivors else ())
    with pytest.raises(VerificationFailed, match="own advert was changed"):
        checks.check_own_advert(attempt.dealing.adverts["site-00"], ())
    repeated = replace(attempt.context, repeats=(RepeatOf(ctx=attempt.ctx, survivors=attempt.survivors_hash()),))
    with pytest.raises(VerificationFailed, match="needs every member"):
        checks.check_survivors_members(repeated, attempt.context.sites[:-1])
    with pytest.raises(VerificationFailed, match="fewer than the abort quorum"):
        certificate_checks.check_abort_certificate(
            run.policy, attempt.context.sites, attempt.context.thresholds, AbortCertificate(ctx=attempt.ctx, lines=())
        )
    other = Secret(b"\xff" * 32)
    for kind in Opened:
        assert not certificate_checks.opens(attempt.context, kind, other, attempt.dealing.adverts["site-00"])
