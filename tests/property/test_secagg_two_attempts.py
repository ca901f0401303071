"""Every reachable state of an attempt and its retry, with one adversarial site and the coordinator.

Attempt 1 has every member's update in it. Attempt 2 may be any of four: all members again or without the victim, each
after an abort certificate or as an exact repeat of a certified set. The coordinator may show any of them to anyone at
any time, ask for aborts and releases of both attempts in any order, and the adversarial site signs everything. Honest
sites decide with the production checks; signatures are taken as given. What must never be: a sum with the victim and a
sum without it, of the same updates. Their difference would be the victim's.

Honest sites other than the victim are alike, so that a state is the victim's and how many of the others are where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from lazaret.errors import ToolkitError
from security.secagg import context as hashes
from security.secagg import statements, thresholds
from security.secagg.certificates import (
    AbortCertificate,
    AbortLine,
    NamedRoot,
    RepeatCertificate,
    Signed,
)
from security.secagg.context import RepeatOf, RoundContext
from security.secagg.messages import Quorum
from security.secagg.records import Agreed, AttemptOutcome, UploadBound
from security.secagg.site import checks
from security.secagg.site.journal import AttemptMemory, Journal
from tests.support.secagg_world import federation, random_updates

ALL, LESS = "all", "less"  # the sets: everybody, and everybody but the victim
C = 1
KX, DEALS = bytes(32), b"D" * 32
RELEASED, ABORTED = AttemptOutcome.RELEASED, AttemptOutcome.ABORTED


class Part(NamedTuple):
    """An honest site in one attempt: the set it agreed to, how it ended; `kind` is which attempt 2 it joined."""

    kind: str = ""
    agreed: str = ""
    outcome: AttemptOutcome | None = None


class Honest(NamedTuple):
    first: Part
    second: Part | None


State = tuple[Honest, tuple[Honest, ...]]
Counts = tuple[int, int]  # of the set with the victim, and of the one without


def passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except ToolkitError:
        return False
    return True


def _counts(parts: list[Part]) -> Counts:
    return sum(part.agreed == ALL for part in parts), sum(part.agreed == LESS for part in parts)


class Retry:
    """The rules of both attempts, asked of the production checks."""

    def __init__(self, n: int) -> None:
        run = federation(n, c=C, single_history=False)
        run.begin_round(random_updates(run.policy.layout, run.sites, 1))
        self.policy = run.policy
        self.plan = run.planned.next_attempt(list(run.sites)).plan
        self.first = self.plan.context
        self.victim = self.first.sites[0]
        self.sets = {ALL: self.first.sites, LESS: self.first.sites[1:]}
        self.roots = {
            name: tuple(NamedRoot(site=site, root=bytes(32)) for site in sites) for name, sites in self.sets.items()
        }
        self.contexts = {"": self.first}
        for cohort in (ALL, LESS):
            for repeats in ("", ALL, LESS):
                if (context := self._context(cohort, repeats)) is not None:
                    self.contexts[f"{cohort}/{repeats}"] = context
        self.agreements = cache(self._agreements)
        self.may_join = cache(self._may_join)
        self.may_agree = cache(self._may_agree)
        self.moves = cache(self._moves)
        self._ranks: dict[Honest, int] = {}

    def _context(self, cohort: str, repeats: str) -> RoundContext | None:
        members = tuple(member for member in self.first.members if member.site in self.sets[cohort])
        try:
            sizes = thresholds.derive(n=len(members), c=C, m=3)
        except ToolkitError:
            return None
        digest = hashes.survivors_digest(KX, DEALS, [(line.site, line.root) for line in self.roots[repeats or ALL]])
        named = (RepeatOf(ctx=self.first.ctx(), survivors=digest),) if repeats else ()
        told = {"n": sizes.n, "t": sizes.t, "a": sizes.a}
        return replace(self.first, attempt=2, members=members, repeats=named, **told)

    # The production checks, with as many signatures as there can be: those of honest sites and of the adversary.

    def _lines(self, kind: str, count: int) -> tuple[Signed, ...]:
        signers = self.contexts[kind].sites[: count + C]
        return tuple(Signed(site=site, signature=bytes(64)) for site in signers)

    def _agreements(self, kind: str, chosen: str, count: int) -> bool:
        """Whether a set is certified in an attempt."""
        quorum = Quorum(kx=KX, survivors=chosen.encode().ljust(32), agreements=self._lines(kind, count))
        return passes(lambda: checks.check_quorum(self.policy, self.contexts[kind], quorum))

    def _may_agree(self, kind: str, chosen: str) -> bool:
        context, sites = self.contexts[kind], [s for s in self.contexts[kind].sites if s in self.sets[chosen]]

        def check() -> None:
            checks.check_survivors_members(context, sites)
            checks.check_survivors_count(context, sites)

        whole = chosen == LESS or self.victim in context.sites
        return whole and passes(check)

    def _may_join(self, kind: str, aborts: int, agreed_all: int, agreed_less: int) -> bool:
        """The reuse rule, with the best certificates that the coordinator can have by now."""
        ctx, repeats = self.first.ctx(), []
        lines = tuple(
            AbortLine(site=line.site, code=1, signature=bytes(64)) for line in self._lines("", aborts)
        )
        for name, count in ((ALL, agreed_all), (LESS, agreed_less)):
            repeats.append(
                RepeatCertificate(
                    ctx=ctx,
                    kx=KX,
                    deals=DEALS,
                    roots=self.roots[name],
                    agreements=self._lines("", count),
                    frauds=(),
                    pair_frauds=(),
                )
            )
        memory = AttemptMemory(
            context=self.first,
            advert=None,  # type: ignore[arg-type]
            kx=KX,
            upload=UploadBound(ctx=ctx, deals=DEALS, root=bytes(32), state_hash=bytes(32), update=bytes(32)),
        )
        for certificate in repeats:  # one at a time: the check takes the first of an attempt
            plan = replace(
                self.plan,
                context=self.contexts[kind],
                aborts=(AbortCertificate(ctx=ctx, lines=lines),),
                repeats=(certificate,),
            )
            if passes(lambda plan=plan: checks.check_plan_reuse(self.policy, [memory], plan)):  # type: ignore[misc]
                return True
        return False

    # What an honest site can be brought to do next. It depends on the others only through what they have signed.

    def _moves(self, site: Honest, victim: bool, aborts: int, first: Counts, second: Counts) -> tuple[Honest, ...]:
        """:param first: how many honest sites have agreed to each set in attempt 1, `second` in the same attempt 2."""
        found = [Honest(part, site.second) for part in self._steps(site.first, first, closed=site.second is not None)]
        if site.second is not None:
            return (*found, *(Honest(site.first, part) for part in self._steps(site.second, second, closed=False)))
        if not site.first.agreed and site.first.outcome is None:
            return tuple(found)  # an open attempt before AGREE: no Plan is taken (transitions)
        kinds = (kind for kind, context in self.contexts.items() if kind and (not victim or context.n == self.first.n))
        return (*found, *(Honest(site.first, Part(kind)) for kind in kinds if self.may_join(kind, aborts, *first)))

    def _steps(self, part: Part, counts: Counts, *, closed: bool) -> Iterator[Part]:
        agreed = Agreed(ctx=bytes(32), survivors=part.agreed.encode().ljust(32), sites=(), sealed=b"", expires_ms=0)
        known = AttemptMemory(
            context=self.first,
            advert=None,  # type: ignore[arg-type]
            kx=KX,
            agreed=agreed if part.agreed else None,
            outcome=part.outcome,
        )
        if not closed and passes(lambda: checks.check_not_agreed(known)):
            yield from (part._replace(agreed=chosen) for chosen in (ALL, LESS) if self.may_agree(part.kind, chosen))
        certified = part.agreed and self.agreements(part.kind, part.agreed, counts[part.agreed == LESS])
        if certified and passes(lambda: checks.check_may_release(known)):
            yield part._replace(outcome=RELEASED)
        # An abort of attempt 2 would be of use for a third one only: it certifies nothing that is asked for here.
        journal = Journal(released={KX} if part.outcome is RELEASED else set())
        if not part.kind and passes(lambda: checks.check_may_abort(journal, KX)):
            yield part._replace(outcome=ABORTED)

    def explore(self) -> Iterator[State]:
        fresh = Honest(Part(), None)
        start: State = (fresh, (fresh,) * (self.first.n - C - 1))
        seen, todo = {self._packed(start)}, [start]
        while todo:
            state = todo.pop()
            yield state
            for following in self._following(state):
                packed = self._packed(following)
                if packed not in seen:
                    seen.add(packed)
                    todo.append(following)

    def _packed(self, state: State) -> int:
        """One number for a state, however the others are ordered: millions of them are remembered."""
        packed = self._rank(state[0])
        for rank in sorted(map(self._rank, state[1])):
            packed = packed << 12 | rank
        return packed

    def _following(self, state: State) -> Iterator[State]:
        victim, others = state
        sites = (victim, *others)
        aborts = sum(site.first.outcome is ABORTED for site in sites)
        first = _counts([site.first for site in sites])
        of_kind: dict[str, list[Part]] = {}
        for site in sites:
            if site.second is not None:
                of_kind.setdefault(site.second.kind, []).append(site.second)
        second = {kind: _counts(parts) for kind, parts in of_kind.items()}
        for index, site in enumerate(sites):
            if site in sites[1:index]:
                continue  # an honest site like another one
            own = second[site.second.kind] if site.second is not None else (0, 0)
            for target in self.moves(site, index == 0, aborts, first, own):
                if index == 0:
                    yield target, others
                else:
                    yield victim, (*others[: index - 1], target, *others[index:])

    def _rank(self, site: Honest) -> int:
        """Any fixed order will do."""
        return self._ranks.setdefault(site, len(self._ranks))

    def sums(self, state: State) -> set[str]:
        """The sets whose sums somebody can have."""
        found = set()
        for kind, context in self.contexts.items():
            for chosen in (ALL, LESS):
                parts = [site.second if kind else site.first for site in (state[0], *state[1])]
                released = sum(
                    part is not None and part.kind == kind and part.agreed == chosen and part.outcome is RELEASED
                    for part in parts
                )
                if released and released + C >= context.t:
                    found.add(chosen if self.victim in context.sites else LESS)
        return found


@pytest.fixture(autouse=True)
def _signatures_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "verify", lambda *_: None)


LARGEST = pytest.param(5, marks=pytest.mark.long)


@pytest.mark.parametrize("n", [3, 4, LARGEST])
def test_no_state_has_a_sum_with_and_a_sum_without_the_victim(n: int) -> None:
    retry = Retry(n)
    reached: set[frozenset[str]] = set()
    second = 0
    for state in retry.explore():
        reached.add(frozenset(retry.sums(state)))
        second += any(site.second is not None and site.second.outcome is RELEASED for site in (state[0], *state[1]))
    assert frozenset({ALL, LESS}) not in reached
    assert frozenset({ALL}) in reached and second, "the exploration reaches sums, and releases of a retry"


def broken(n: int = 4) -> bool:
    retry = Retry(n)
    return any(retry.sums(state) == {ALL, LESS} for state in retry.explore())


def test_without_the_reuse_rule_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_reuse", lambda *_: None)
    assert broken()


def test_repeats_of_another_set_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_plan_repeats_set", lambda *_: None)
    assert broken()
