"""The chain of published results, and how a site that was away is brought to its end.

Each result names the one before it. Sums are kept for the last few rounds only; a site that is further behind gets one
covered state in their place (docs/spec/secure-aggregation.md, section 11).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.effects import Effect, Effects, ReplaySum, SendState
from security.errors import RemoteProtocolError
from security.secagg.certificates import CheckCertificate
from security.secagg.effects import Send
from security.secagg.messages import Jump, Result, Vouched

KEPT_SUMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One result of the chain; what it says is read from storage when it is needed."""

    round: int
    result_hash: bytes
    prev_result: bytes
    state_hash: bytes
    sum_root: bytes


class Chain:
    """All results, oldest first."""

    def __init__(
        self,
        links: list[Link],
        load_result: Callable[[bytes], Result],
        load_check: Callable[[bytes], CheckCertificate | None],
    ) -> None:
        self.links = links
        self._load_result = load_result
        self._load_check = load_check

    @property
    def head(self) -> Link | None:
        return self.links[-1] if self.links else None

    def head_check(self) -> CheckCertificate | None:
        """The certificate of the newest result, if there is one."""
        return self._load_check(self.links[-1].result_hash) if self.links else None

    def add(self, link: Link) -> tuple[bytes, ...]:
        """Append a result; returns the roots of sums that need not be kept any longer."""
        self.links.append(link)
        return (self.links[-KEPT_SUMS - 1].sum_root,) if len(self.links) > KEPT_SUMS else ()

    def bring(self, site: str, *, round_number: int, result_hash: bytes) -> Effects:
        """What a site that stands at `result_hash` needs to come to the end of the chain."""
        place = self._place(site, round_number, result_hash)
        effects: list[Effect] = []
        if len(self.links) - place > KEPT_SUMS:
            place = self._jump(site, effects)
        elif place and place == len(self.links) and self.head_check() is None:
            # It may have restarted in the middle of the check of this very sum, and needs it once more.
            place -= 1
        for number in range(place, len(self.links)):
            self._vouch(site, number - 1, effects)
            link = self.links[number]
            effects += [Send(self._load_result(link.result_hash), to=site)]
            effects += [ReplaySum(site, link.result_hash, link.sum_root)]
        self._vouch(site, len(self.links) - 1, effects)
        return tuple(effects)

    def _place(self, site: str, round_number: int, result_hash: bytes) -> int:
        """How many links the site has already."""
        for number, link in enumerate(self.links):
            if link.result_hash == result_hash:
                return number + 1
        if round_number != 0:
            raise RemoteProtocolError("site stands on a result that is not in this chain", where=f"site {site}")
        # At the very start. A site enrolled later starts from a newer manifest than the first round did: no sum of the
        # old ones leads on from there, only a covered state does.
        fresh = not self.links or self.links[0].prev_result == result_hash
        return 0 if fresh else -len(self.links) - KEPT_SUMS

    def _jump(self, site: str, effects: list[Effect]) -> int:
        """Send the newest covered state; returns how many links the site then has."""
        for number in range(len(self.links) - 1, -1, -1):
            link = self.links[number]
            check = self._load_check(link.result_hash)
            if check is not None:
                effects.append(Send(Jump(result=self._load_result(link.result_hash), check=check), to=site))
                effects.append(SendState(site, link.state_hash))
                return number + 1
        # Nothing is covered yet, so that there is nothing this site could believe. It waits for the next hello.
        return len(self.links)

    def _vouch(self, site: str, number: int, effects: list[Effect]) -> None:
        if number >= 0 and (check := self._load_check(self.links[number].result_hash)) is not None:
            effects.append(Send(Vouched(result=self.links[number].result_hash, check=check), to=site))
