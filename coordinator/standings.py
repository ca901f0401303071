"""Where each site stands in the chain of results, and what it was sent to come to its end."""

from __future__ import annotations

from coordinator.chain import Chain
from coordinator.effects import Effects


class Standings:
    """What sites are known to have accepted, and up to which result each was last brought."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._at: dict[str, tuple[int, bytes]] = {}
        self._brought: dict[str, bytes] = {}

    def accepted(self, site: str, round_number: int, result_hash: bytes) -> None:
        self._at[site] = (round_number, result_hash)

    def accepted_head(self, site: str) -> None:
        """A site that is ready has trained on the newest result."""
        if self._chain.head is not None:
            self.accepted(site, self._chain.head.round, self._chain.head.result_hash)

    def greet(self, site: str, round_number: int, result_hash: bytes) -> Effects:
        """A site has connected and says where it stands: what it needs from there on."""
        needed = self._chain.bring(site, round_number=round_number, result_hash=result_hash)
        self.accepted(site, round_number, result_hash)
        covered = self._covered_head()
        if covered is not None:
            self._brought[site] = covered
        return needed

    def fetch(self, site: str) -> Effects | None:
        """For a site that declined because it lacks the model: a newcomer, or one that was left out. Once for each
        result, when it is covered: before that there is nothing that the site could believe.

        :returns: None if it has the model and its own reasons, or nothing can be done now.
        """
        number, result = self._at.get(site, (0, b""))
        covered = self._covered_head()
        # One that has not said where it stands has nothing to be brought on from.
        if not result or covered is None or covered in (result, self._brought.get(site)):
            return None
        self._brought[site] = covered
        return self._chain.bring(site, round_number=number, result_hash=result)

    def _covered_head(self) -> bytes | None:
        head = self._chain.head
        return head.result_hash if head is not None and self._chain.head_check() is not None else None
