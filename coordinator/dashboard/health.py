"""One sentence that tells an operator whether all is well, and what to look at if it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from coordinator.dashboard.history import PUBLISHED, Told
from coordinator.dashboard.live import AWAY, EXCLUDED, Live
from coordinator.phases import Phase

GOOD, LOOK, BAD = "good", "look", "bad"
_ORDER: Final = (GOOD, LOOK, BAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`level` is the worst of the remarks."""

    level: str
    sentence: str
    remarks: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        remarks = [{"level": level, "text": text} for level, text in self.remarks]
        return {"level": self.level, "sentence": self.sentence, "remarks": remarks}


def judge(live: Live, told: Told) -> Health:
    """Pure: the same picture gives the same words."""
    remarks = [*_of_sites(live, told), *_of_rounds(live, told)]
    level = max((level for level, _ in remarks), key=_ORDER.index, default=GOOD)
    return Health(level=level, sentence=_sentence(live), remarks=tuple(remarks))


def _sentence(live: Live) -> str:
    connected = [site for site in live.sites if site.state not in (AWAY, EXCLUDED)]
    ready = sum(site.state == "ready" for site in live.sites)
    match live.phase:
        case Phase.DONE:
            return f"All {live.planned} rounds are published"
        case Phase.BURST if live.burst is not None:
            return f"Round {live.round}: summing over {live.burst.members} sites, {live.burst.step}"
        case Phase.PINGING:
            return f"Round {live.round}: asking {ready} sites whether they are there"
        case _:
            return f"Round {live.round}: training, {ready} of {len(connected)} connected sites are ready"


def _of_sites(live: Live, told: Told) -> list[tuple[str, str]]:
    remarks = [(BAD, f"{name} is excluded: {reason}") for name, reason in sorted(told.excluded.items())]
    there = sum(site.state not in (AWAY, EXCLUDED) for site in live.sites)
    away = [site.name for site in live.sites if site.state == AWAY]
    if there < live.least and live.phase is not Phase.DONE:
        remarks.append((BAD, f"{there} sites are connected; a round needs {live.least}"))
    elif away:
        remarks.append((LOOK, f"not connected: {', '.join(away)}"))
    paused = [f"{site.name} ({site.pause})" for site in live.sites if site.pause]
    if paused:
        remarks.append((LOOK, f"sitting out after a silence, for so many cohorts: {', '.join(paused)}"))
    declined = [site.name for site in live.sites if site.state == "declined"]
    if declined:
        remarks.append((LOOK, f"declined this round: {', '.join(declined)}"))
    return remarks


def _of_rounds(live: Live, told: Told) -> list[tuple[str, str]]:
    remarks = []
    ended = [row for row in told.rounds if row[3] is not None]
    if ended and ended[-1][3] != PUBLISHED:
        two = len(ended) > 1 and ended[-2][3] != PUBLISHED
        remarks.append((BAD if two else LOOK, f"round {ended[-1][0]} gave no model: {ended[-1][3]}"))
    failed = [abort for abort in told.aborts if abort["attempt"] is not None and abort["round"] >= live.round - 1]
    if failed:
        names = f" ({', '.join(failed[0]['missing'])})" if failed[0]["missing"] else ""
        remarks.append((LOOK, f"an attempt of round {failed[0]['round']} failed: {failed[0]['reason']}{names}"))
    return remarks
