"""Who is there: the sites that are connected, what each has answered in this round, and who can be in a cohort.

A round is ordered only if a cohort can come of it, since every order costs sites work and, under differential privacy,
a part of their budget. `rounds` asks here before it goes from one phase to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from coordinator.phases import RunPlan
from coordinator.results import Chain
from security.identity.membership import AggregationPolicy
from security.secagg.coordinator.rounds import BlameBook
from security.secagg.coordinator.uploads import CoordinatorCore

RETURN_SUMS: Final = 3  # after so many sums without it a site comes back, also without those who left when it did


def held_back(sums: Sequence[Collection[str]], able: Collection[str], there: Collection[str], *, c: int) -> set[str]:
    """Who is left out for now because it would come back to the cohort without others who left.

    Sites that left and come back one after the other are told apart by the differences of the sums: each return shows
    one of them. If they come back together, only their sum is shown. So one that is back early waits for the rest, or
    for c + 2 of them, for as many sums as `RETURN_SUMS` says. One that left alone has nobody to wait for.

    :param sums: who was in the newest sums of the run, newest first.
    :param able: who may be in a cohort; of these, `there` are connected.
    """
    if not sums:
        return set()
    away = {site for sites in sums[1:RETURN_SUMS] for site in sites} & set(able) - set(sums[0])
    back = away & set(there)
    return set() if back == away or len(back) >= c + 2 else away


ASK_AGAIN_MS: Final = 600_000  # a site that declined without saying until when


class Attendance:
    """Who is connected, and what each site has answered in this round.

    :ivar declined: who has said that it does not train now, and when it is asked again.
    :ivar answered: who has answered the newest ping, whose number is `ping`.
    """

    def __init__(self) -> None:
        self.online: set[str] = set()
        self.ready: set[str] = set()
        self.declined: dict[str, int] = {}
        self.answered: set[str] = set()
        self.ping = 0
        self._lasting: set[str] = set()
        self._pinged: set[str] = set()
        self._others_ready_since: int | None = None

    def new_round(self) -> None:
        """Who is connected stays so, and who has said until when it declines; all else is asked anew."""
        self.declined = {site: until for site, until in self.declined.items() if site in self._lasting}
        self.ready, self.answered = set(), set()
        self._others_ready_since = None

    def decline(self, site: str, seconds: int, now_ms: int) -> None:
        """A site does not train.

        :param seconds: when it may be asked again; 0 if that depends on the round.
        """
        self.ready.discard(site)
        self.declined[site] = now_ms + (1000 * seconds or ASK_AGAIN_MS)
        (self._lasting.add if seconds else self._lasting.discard)(site)

    def ask_again(self, now_ms: int) -> list[str]:
        """Whose time is over; they have not declined any more."""
        over = sorted(site for site, until in self.declined.items() if now_ms >= until)
        for site in over:
            del self.declined[site]
        return [site for site in over if site in self.online]

    def gone(self, site: str) -> None:
        """A stream has ended. What the site said in this round it will say again when it is back."""
        self.online.discard(site)
        self.ready.discard(site)
        self.answered.discard(site)
        self.declined.pop(site, None)

    def next_ping(self) -> list[str]:
        """Whom to ask now; older answers count no more."""
        self.ping += 1
        self.answered, self._pinged = set(), set(self.ready)
        return sorted(self.ready)

    @property
    def all_answered(self) -> bool:
        return self.answered >= self._pinged

    @property
    def present(self) -> set[str]:
        """Who can be in an attempt that begins now."""
        return self.ready & self.answered

    @property
    def silent(self) -> set[str]:
        """Who is connected and has not answered the order; sites that came back in an aggregation have not got it."""
        return self.online - self.ready - self.declined.keys()

    @property
    def willing(self) -> set[str]:
        """Who is connected and has not declined."""
        return self.online - self.declined.keys()

    def complete(self, able: Iterable[str], now_ms: int, *, grace_ms: int) -> bool:
        """Whether nobody of those who are able to take part is left to wait for."""
        awaited = set(able) - self.ready - self.declined.keys()
        if not awaited:
            return True
        if awaited & self.online:
            self._others_ready_since = None
            return False
        # Only sites that are not connected are missing: they get a little time to come back.
        self._others_ready_since = self._others_ready_since or now_ms
        return now_ms >= self._others_ready_since + grace_ms


class Candidates:
    """Which of the sites that are there can be in a cohort, and whether they are enough.

    :param sites: who is connected, and what each has answered.
    :param policy_at: the policy at a later instant, if nothing but certificates changes until then.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        book: BlameBook,
        plan: RunPlan,
        chain: Chain,
        sites: Attendance,
        policy_at: Callable[[int], AggregationPolicy] | None = None,
    ) -> None:
        self.core = core
        self.policy_at = policy_at or (lambda _: core.policy)
        self._book = book
        self._plan = plan
        self._chain = chain
        self._sites = sites
        self._sums = chain.cohorts(RETURN_SUMS)
        self._held: set[str] = set()

    def able_until(self, later_ms: int = 0) -> set[str]:
        """Sites that may be in a cohort: listed, not excluded, not waiting for others to come back with it,
        with a certificate that is valid now and then.
        Nobody, if the manifest or the coordinator's own certificate ends before: no site would follow its plan."""
        today, now = self.core.policy, self.core.clock.now_ms()
        then = self.policy_at(now + later_ms) if later_ms else today
        if today.ended(now) or then.ended(now + later_ms):
            return set()
        listed = (entry.site for entry in today.roster)
        barred = set(self._book.excluded) | self._held
        return {site for site in listed if today.lists(site) and then.lists(site)} - barred

    def hold_back(self, *, waiting: bool) -> set[str]:
        """Sites that left come back in batches (section 11), unless there is no cohort without them.

        :param waiting: whether nobody was ordered to train yet; whoever was stays in the round.
        :return: who is not held back any more.
        """
        before, self._held = self._held, set()
        able = self.able_until(self._plan.train_ms)
        there = able & self._sites.willing
        held = held_back(self._sums, able, there, c=self.core.policy.c)
        held = held if waiting else held & before
        self._held = held if self.suffice(there - held) else set()
        return before - self._held

    def summed(self, sites: tuple[str, ...]) -> None:
        """There is a new sum, with these sites in it."""
        self._sums = [sites, *self._sums][:RETURN_SUMS]

    def possible(self, later_ms: int = 0) -> bool:
        """Whether a cohort can come of those who are there, and there is a model that they may train on."""
        if self.core.policy.strict and self._chain.unchecked:
            return False
        return self.suffice(self.able_until(later_ms) & self._sites.willing)

    def enough_ready(self, now_ms: int, deadline_ms: int) -> bool:
        """Enough for a cohort, the sum before checked, and nobody left to wait for."""
        able = self.able_until()
        if self._chain.unchecked or not self.suffice(self._sites.ready & able):
            return False
        return now_ms >= deadline_ms or self._sites.complete(able, now_ms, grace_ms=self._plan.grace_ms)

    def suffice(self, sites: set[str]) -> bool:
        """Whether these are enough for a cohort; with groups, of every one of them."""
        return len(sites) >= self.least and self.core.policy.hides(tuple(sites))

    @property
    def least(self) -> int:
        """The smallest cohort, by the manifest and the operator."""
        two = self.core.policy.allow_two_site and len(self.core.policy.roster) == 2
        return 2 if two else max(self._plan.least, self.core.policy.least_cohort)
