"""A27: colluders stall, or send what all others must refuse, so that no round ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from protos.loopback import RoundOutcome
from security.crypto import key_agreement
from security.secagg import messages, statements
from security.secagg.certificates import Advert
from security.secagg.context import SumVerdict
from security.secagg.coordinator.rounds import BlameBook
from tests.support.evil import EvilCoordinator, evil
from tests.support.secagg_world import reference_sum


def slow_world() -> EvilCoordinator:
    return evil(7, colluders=2, c=2, wide=False)


def stall_one_after_the_other(run: EvilCoordinator) -> None:
    """In each attempt the first colluder that is in it keeps its shares back."""

    def keep_back(message: messages.Shares, site: str) -> messages.Shares | None:
        cohort = run.planned.attempts[-1].context.sites
        return None if site == next(name for name in run.colluders if name in cohort) else message

    for name in run.colluders:
        run.change(messages.Shares, keep_back, by=name)


def rounds(run: EvilCoordinator, count: int = 3) -> list[RoundOutcome]:
    ended = []
    for number in range(1, count + 1):
        updates = run.updates(number)
        outcome = run.run_round(updates)
        if outcome.total is not None:
            assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
        ended.append(outcome)
    run.check_promises()
    return ended


def test_stalling_costs_c_plus_one_attempts_at_most() -> None:
    run = slow_world()
    stall_one_after_the_other(run)
    for outcome in rounds(run):
        assert outcome.verdict is SumVerdict.GOOD and outcome.attempts <= run.policy.c + 1
        assert set(run.honest) <= set(outcome.survivors), "no honest site is left out for it"


def test_stalling_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without strikes the same site stalls every attempt of every round."""
    monkeypatch.setattr(BlameBook, "missed", lambda self, site: None)
    run = slow_world()
    stall_one_after_the_other(run)
    assert all(outcome.total is None for outcome in rounds(run, 2))


def useless_advert(run: EvilCoordinator, change: Callable[[Advert], Advert]) -> None:
    def forge(advert: Advert, site: str) -> Advert:
        forged = change(advert)
        signed = replace(forged, signature=run.signer(site).sign(statements.advert(run.policy, forged)))
        attempt = run.machine(site).aggregation.attempt
        assert attempt is not None
        attempt.advert = signed
        return signed

    run.change(Advert, forge, by=run.colluders[0])


USELESS: dict[str, Callable[[Advert], Advert]] = {
    "a key of small order": lambda advert: replace(advert, mask_key=bytes(32)),
    "a box key of small order": lambda advert: replace(advert, share_key=(1).to_bytes(32, "little")),
    "one key for both": lambda advert: replace(advert, mask_key=advert.share_key),
    "no ML-KEM key": lambda advert: replace(advert, mask_kem=b"\xff" * len(advert.mask_kem)),
}


@pytest.mark.parametrize("how", list(USELESS))
def test_keys_that_everybody_must_refuse_count_as_missing(how: str) -> None:
    run = slow_world()
    useless_advert(run, USELESS[how])
    for outcome in rounds(run, 2):
        assert outcome.verdict is SumVerdict.GOOD and outcome.attempts <= run.policy.c + 1
        assert set(run.honest) <= set(outcome.survivors)


def test_keys_of_small_order_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as there, such a key makes every honest site abort, and its sender is never missed."""
    monkeypatch.setattr(key_agreement, "require_usable", lambda *_, **__: None)
    run = slow_world()
    useless_advert(run, USELESS["a key of small order"])
    (outcome,) = rounds(run, 1)
    assert outcome.total is None and run.colluders[0] not in run.book.strikes
