"""Every reachable state of one attempt, for every legal cohort of up to seven sites.

The coordinator may show any set to anyone, colluders sign everything, honest sites may crash or be asked to abort at
any point. Honest sites decide with the production checks; whether a certificate exists is asked of the production
checks as well, with signatures taken as given. Honest sites are alike, so that a state is how many of them are where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from lazaret.errors import PolicyViolation, ToolkitError
from security.identity.membership import AggregationPolicy
from security.secagg import certificate_checks, statements, thresholds
from security.secagg.certificates import AbortCertificate, AbortLine, Signed
from security.secagg.context import RoundContext
from security.secagg.messages import Plan, Quorum
from security.secagg.records import Agreed, AttemptOutcome
from security.secagg.site import checks
from security.secagg.site.journal import AttemptMemory, Journal
from security.secagg.thresholds import Thresholds
from tests.support.secagg_world import federation, random_updates

SETS = (b"A" * 32, b"B" * 32)
Site = tuple[bytes, AttemptOutcome | None]  # the set agreed to, if any, and the outcome
State = tuple[tuple[Site, int], ...]
START: Site = (b"", None)


@cache
def real_plan() -> tuple[AggregationPolicy, Plan]:
    run = federation(7)
    run.begin_round(random_updates(run.policy.layout, run.sites, 1))
    return run.policy, run.planned.next_attempt(list(run.sites)).plan


def cohort(sizes: Thresholds) -> RoundContext:
    plan = real_plan()[1]
    told = {"n": sizes.n, "t": sizes.t, "a": sizes.a, "c": sizes.c, "m": sizes.m}
    return replace(plan.context, members=plan.context.members[: sizes.n], **told)


@pytest.fixture(autouse=True)
def _signatures_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "verify", lambda *_: None)


def memory(context: RoundContext, site: Site) -> AttemptMemory:
    agreed = Agreed(ctx=context.ctx(), survivors=site[0], sites=(), sealed=b"", expires_ms=0) if site[0] else None
    return AttemptMemory(context=context, advert=None, kx=bytes(32), agreed=agreed, outcome=site[1])  # type: ignore[arg-type]


class Attempt:
    """The rules of one attempt, asked of the production checks."""

    def __init__(self, sizes: Thresholds) -> None:
        self.sizes = sizes
        self.context = cohort(sizes)
        self.policy = real_plan()[0]
        self.honest = sizes.n - sizes.c

    def quorum_for(self, state: State, chosen: bytes) -> Quorum:
        agreed = sum(count for (shown, _), count in state if shown == chosen)
        signers = self.context.sites[: self.sizes.c + agreed]
        lines = tuple(Signed(site=site, signature=bytes(64)) for site in signers)
        return Quorum(kx=bytes(32), survivors=chosen, agreements=lines)

    def certified(self, state: State, chosen: bytes) -> bool:
        return passes(lambda: checks.check_quorum(self.policy, self.context, self.quorum_for(state, chosen)))

    def summed(self, state: State, chosen: bytes) -> bool:
        released = sum(count for (shown, end), count in state if shown == chosen and end is AttemptOutcome.RELEASED)
        return released + self.sizes.c >= self.sizes.t

    def aborted(self, state: State) -> bool:
        count = sum(count for (_, end), count in state if end is AttemptOutcome.ABORTED) + self.sizes.c
        lines = tuple(AbortLine(site=site, code=1, signature=bytes(64)) for site in self.context.sites[:count])
        certificate = AbortCertificate(ctx=self.context.ctx(), lines=lines)
        return passes(
            lambda: certificate_checks.check_abort_certificate(self.policy, self.context.sites, self.sizes, certificate)
        )

    def moves(self, state: State, site: Site) -> Iterator[Site]:
        """What an honest site can be brought to do next."""
        known = memory(self.context, site)
        if passes(lambda: checks.check_not_agreed(known)):
            yield from ((chosen, None) for chosen in SETS)
        for chosen in SETS:
            if site[0] and passes(lambda: self.check_release(state, known, chosen)):  # noqa: B023 - called at once
                yield site[0], AttemptOutcome.RELEASED
        journal = Journal(released={self.context.ctx()} if site[1] is AttemptOutcome.RELEASED else set())
        if passes(lambda: checks.check_may_abort(journal, self.context.ctx())):
            yield site[0], AttemptOutcome.ABORTED

    def check_release(self, state: State, known: AttemptMemory, chosen: bytes) -> None:
        assert known.agreed is not None
        quorum = self.quorum_for(state, chosen)
        checks.check_may_release(known)
        checks.check_quorum_is_ours(known.agreed.survivors, quorum)
        checks.check_quorum(self.policy, self.context, quorum)

    def explore(self) -> Iterator[State]:
        start: State = ((START, self.honest),)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            yield state
            for site, _ in state:
                for target in self.moves(state, site):
                    counts = Counter(dict(state))
                    counts[site] -= 1
                    counts[target] += 1
                    following = tuple(sorted((+counts).items(), key=repr))
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)

    def broken(self, state: State) -> str:
        first, second = SETS
        if self.certified(state, first) and self.certified(state, second):
            return "two certificates"
        if self.summed(state, first) and self.summed(state, second):
            return "two sums"
        if self.aborted(state) and any(self.summed(state, chosen) for chosen in SETS):
            return "a sum beside an abort certificate"
        return ""


def passes(check: object) -> bool:
    try:
        check()  # type: ignore[operator]
    except ToolkitError:
        return False
    return True


def legal() -> Iterator[Thresholds]:
    for n in range(3, 8):
        for c in range(n):
            try:
                yield thresholds.derive(n=n, c=c, m=3)
            except PolicyViolation:
                continue


@pytest.mark.parametrize("sizes", list(legal()), ids=lambda s: f"n{s.n}-c{s.c}")
def test_no_state_breaks_the_quorum_rule(sizes: Thresholds) -> None:
    attempt = Attempt(sizes)
    states = list(attempt.explore())
    assert len(states) > 10
    assert [attempt.broken(state) for state in states if attempt.broken(state)] == []
    # The exploration reaches what it is about: sums, and abort certificates.
    assert any(attempt.summed(state, SETS[0]) for state in states)
    assert any(attempt.aborted(state) for state in states)


@pytest.mark.parametrize("sizes", list(legal()), ids=lambda s: f"n{s.n}-c{s.c}")
def test_one_abort_fewer_breaks_it_twin(sizes: Thresholds) -> None:
    attempt = Attempt(replace(sizes, a=sizes.a - 1))
    found = {attempt.broken(state) for state in attempt.explore()}
    assert "a sum beside an abort certificate" in found


@pytest.mark.parametrize("sizes", [s for s in legal() if 2 * (s.t - 1) <= s.n + s.c], ids=lambda s: f"n{s.n}-c{s.c}")
def test_a_smaller_quorum_breaks_it_twin(sizes: Thresholds) -> None:
    attempt = Attempt(replace(sizes, t=sizes.t - 1))
    found = {attempt.broken(state) for state in attempt.explore()}
    assert "two certificates" in found


def test_a_second_agree_breaks_it_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule of one AGREE the same sites certify two sets."""

    def forgetful(known: AttemptMemory) -> None:
        if known.outcome is not None:
            raise ToolkitError("over")

    monkeypatch.setattr(checks, "check_not_agreed", forgetful)
    attempt = Attempt(thresholds.derive(n=4, c=1, m=3))
    ever: set[bytes] = set()
    for state in attempt.explore():
        ever |= {chosen for chosen in SETS if attempt.certified(state, chosen)}
        for site, _ in state:
            if site[0] and site[1] is None:
                assert {target[0] for target in attempt.moves(state, site)} >= set(SETS)
    assert ever == set(SETS)
