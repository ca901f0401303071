"""What a coordinator holds against sites, and whom it leaves out for it (docs/spec/secure-aggregation.md, section 11).

Leaving a site out is the coordinator's choice and cannot be checked by the sites; they only see it and log it. The book
is kept over rounds, so that c sites that stall one after the other cost at most c + 1 attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_PAUSE = 32


@dataclass
class BlameBook:
    """Strikes for absence, accusations inside a round, and sites excluded until the consortium clears them."""

    strikes: dict[str, int] = field(default_factory=dict)
    pause: dict[str, int] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    accusations: set[tuple[str, str]] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)

    def to_dict(self) -> dict[str, Any]:
        """What must outlive a restart, as JSON can carry it."""
        return {"strikes": self.strikes, "pause": self.pause, "excluded": self.excluded}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> BlameBook:
        return cls(strikes=dict(told["strikes"]), pause=dict(told["pause"]), excluded=dict(told["excluded"]))

    def missed(self, site: str) -> None:
        """Absence proves nothing: the site sits out this round and the next 1, 2, 4, ... 32 cohorts.

        Were it taken back within the round, sites that stall in turn would use all its attempts up.
        """
        self.absent.add(site)
        self.strikes[site] = self.strikes.get(site, 0) + 1
        self.pause[site] = min(MAX_PAUSE, 2 ** (self.strikes[site] - 1))

    def took_part(self, site: str) -> None:
        """A site that carried a round through starts with a clean slate."""
        self.strikes.pop(site, None)
        self.pause.pop(site, None)
        self.absent.discard(site)

    def exclude(self, site: str, reason: str) -> None:
        """Something the site itself signed is against it."""
        self.excluded[site] = reason

    def clear(self, site: str) -> None:
        """The consortium has looked into it."""
        self.excluded.pop(site, None)
        self.took_part(site)

    def accuse(self, accuser: str, dealer: str, *, c: int) -> None:
        """Dealer or accuser lies. More than c edges cannot all be lies of others about one honest site."""
        self.accusations.add((accuser, dealer))
        for site in (accuser, dealer):
            accused_by = {a for a, d in self.accusations if d == site}
            accuses = {d for a, d in self.accusations if a == site}
            if len(accused_by) > c or len(accuses) > c:
                self.exclude(site, "accusations")

    def new_round(self) -> None:
        """Pairs that accused each other, and who missed a step, were left out for one round only."""
        self.accusations.clear()
        self.absent.clear()

    def eligible(self, sites: Iterable[str]) -> list[str]:
        """Who may be in the next cohort."""
        quarrel = {
            site
            for accuser, dealer in self.accusations
            if accuser not in self.excluded and dealer not in self.excluded
            for site in (accuser, dealer)
        }
        barred = quarrel | self.absent | set(self.excluded) | {site for site, left in self.pause.items() if left > 0}
        return sorted(site for site in sites if site not in barred)

    def cohort_formed(self) -> None:
        """One more cohort was planned: pauses run down."""
        self.pause = {site: left - 1 for site, left in self.pause.items() if left > 1}
