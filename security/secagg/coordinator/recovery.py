"""A coordinator after a restart: attempts rebuilt from its records (docs/spec/secure-aggregation.md, section 9).

It shows again what it has shown before, and nothing else. An attempt that had not reached C2 is over: adverts and share
lists were in memory only, and no site has sent anything masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from lazaret.errors import LocalProtocolError, PolicyViolation, VerificationFailed
from security.secagg import records
from security.secagg.certificates import Ack, CheckCertificate
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.publication import Publication, read_sum
from security.secagg.coordinator.rounds import BlameBook, CoordinatorRound, RoundStart
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import Effects
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.messages import Plan, UploadHeader
from security.secagg.transitions import CoordinatorState

_S = CoordinatorState
_OVER = (_S.DEAD, _S.LOST)


def restore_round(
    core: CoordinatorCore,
    book: BlameBook,
    found: Iterable[Wire],
    load_state: Callable[[bytes], Vector],
    *,
    load_check: Callable[[bytes], CheckCertificate | None] = lambda _: None,
) -> CoordinatorRound | None:
    """The newest round in the records, or None if there is none.

    :param load_state: gives a saved state by its hash.
    :param load_check: gives the stored certificate of a result. Once it is there, uploads are deleted: a site that has
        left since, or votes that were waited for no longer, do not make it a result without a certificate again.
    """
    attempts: list[tuple[Plan, list[Wire]]] = []
    for record in found:
        if isinstance(record, records.Planned):
            attempts.append((record.plan, []))
        elif isinstance(record, records.AbortSeen):
            # It may have come when another attempt had begun.
            for plan, following in attempts:
                if plan.context.ctx() == record.abort.ctx:
                    following.append(record)
        elif attempts:
            attempts[-1][1].append(record)
    if not attempts:
        return None
    newest = attempts[-1][0]
    start = RoundStart(
        round=newest.context.round,
        state_hash=newest.context.state_hash,
        config_hash=newest.context.config_hash,
        prev_result=newest.context.prev_result,
        check=newest.check,
    )
    model = load_state(start.state_hash)
    rebuilt = CoordinatorRound(core, book, start, model)
    for plan, following in attempts:
        if plan.context.round == start.round:
            rebuilt.attempts.append(_restore_attempt(core, plan, following, model, load_state, load_check))
    return rebuilt


def _restore_attempt(
    core: CoordinatorCore,
    plan: Plan,
    following: list[Wire],
    model: Vector,
    load_state: Callable[[bytes], Vector],
    load_check: Callable[[bytes], CheckCertificate | None],
) -> CoordinatorAttempt:
    attempt = CoordinatorAttempt(core, plan, model)
    headers: list[UploadHeader] = []
    for record in following:
        if isinstance(record, records.UploadCounted):
            headers.append(record.header)
        else:
            _apply(attempt, record)
    if attempt.state in _OVER or attempt.state in (_S.ADVERTISING, _S.DEALING):
        return attempt
    published = attempt.state is _S.PUBLISHED
    shown = attempt.publication
    covered = shown is not None and (load_check(shown.result_hash) or shown.certificate()) is not None
    if not covered:
        for header in headers:
            attempt.uploads.restore(header, count=not published)
    if published and shown is not None:
        attempt.model = load_state(shown.result.state_hash)
        attempt.state = _S.CERTIFIED if covered else _S.PUBLISHED
    return attempt


def _apply(attempt: CoordinatorAttempt, record: Wire) -> None:
    match record:
        case records.AdvertsShown():
            attempt.dealing.fix_adverts(record.adverts)
            attempt.state = _S.DEALING
        case records.DealShown():
            if attempt.dealing.restore_shares(record.shares):
                attempt.state = _S.UPLOADING
        case records.DisclosureSeen():
            attempt.disputes.settle(record.disclosure)
        case records.SurvivorsShown():
            attempt.survivors = record.survivors
            if len(record.survivors.uploads) == attempt.context.n:
                attempt.put_shares_away()
            attempt.state = _S.AGREEING
        case records.QuorumShown():
            attempt.agreements = {line.site: line.signature for line in record.quorum.agreements}
            attempt.certify(record.quorum)
            attempt.state = _S.UNMASKING
        case records.ResultShown():
            core = attempt.core
            total = read_sum(core.spool, record.result.sum_root, core.policy.layout, core.policy.sums)
            attempt.publication = Publication(core.policy, record.result, attempt.uploads, total)
            attempt.state = _S.PUBLISHED
        case records.AbortSeen():
            attempt.aborts[record.abort.site] = record.abort
        case records.AckSeen():
            _take_ack(attempt, record.ack)
        case records.AttemptClosed():
            attempt.state = CoordinatorState(record.state)
        case _:
            raise LocalProtocolError(f"{type(record).__name__} is not a coordinator's record", where="journal")


def _take_ack(attempt: CoordinatorAttempt, ack: Ack) -> None:
    """An acknowledgement counts under the manifest in force. A site that has left or changed its key is asked again."""
    if attempt.publication is not None:
        with suppress(PolicyViolation, VerificationFailed):
            attempt.publication.take_ack(ack)


def resume(attempt: CoordinatorAttempt) -> Effects:
    """What a restarted coordinator does first: end what was in memory only, ask again for the rest."""
    if attempt.state in (_S.ADVERTISING, _S.DEALING):
        return attempt.give_up()
    return attempt.ask_again()
