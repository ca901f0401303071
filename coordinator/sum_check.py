"""The check of the newest published sum, while the next round trains (docs/spec/secure-aggregation.md, section 10).

Sites ask for chunks of all uploads, add them up and sign. Who is to look at which chunk follows from the cohort; what
absent sites owe is handed to others, so that no single site can hold the certificate up.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.effects import Effect, Effects, of_round
from security.errors import RemoteProtocolError
from security.secagg import messages
from security.secagg.certificates import Ack, CheckCertificate
from security.secagg.coordinator import CoordinatorAttempt
from security.secagg.coordinator_core import CoordinatorCore
from security.secagg.effects import Certified, Send
from security.secagg.publication import Publication
from security.secagg.rounds import CoordinatorRound
from security.secagg.wire import Wire

QUESTIONS = (messages.ChunkRequest, Ack)


class SumCheck:
    """One published sum and the acknowledgements it still lacks.

    :ivar round: the round whose sum is, or was last, under check.
    :ivar open: whether it lacks its certificate.
    """

    def __init__(self, core: CoordinatorCore, patience_ms: int) -> None:
        self._core = core
        self._patience_ms = patience_ms
        self.round: CoordinatorRound | None = None
        self.open = False
        self.deadline = 0
        self._named: set[str] | None = None  # whom the last order called absent, if nothing came since

    def watch(self, published: CoordinatorRound | None) -> None:
        """Begin with the sum of a round. After a restart it may turn out to be covered already."""
        self.round, self._named = published, None
        self.open = self.certificate() is None
        self._wait()

    def _wait(self) -> None:
        self.deadline = self._core.clock.mono_ms() + self._patience_ms

    @property
    def _attempt(self) -> CoordinatorAttempt | None:
        return self.round.current if self.round is not None and self.open else None

    def receive(self, site: str, message: Wire) -> Effects:
        """A request for a chunk, or an acknowledgement. One for a sum that is covered already is late, and dropped."""
        attempt = self._attempt
        if attempt is None or getattr(message, "result", b"") != publication_of(attempt).result_hash:
            return ()
        self._wait()
        self._named = None
        effects: list[Effect] = list(of_round(attempt.context.round, attempt.receive(site, message)))
        if any(isinstance(effect, Certified) for effect in effects):
            self.open = False
        return tuple(effects)

    def certificate(self) -> tuple[bytes, CheckCertificate] | None:
        """The result that was checked and its certificate, once it is covered."""
        attempt = self.round.current if self.round is not None else None
        if attempt is None or attempt.publication is None:
            return None
        check = attempt.publication.certificate()
        return (attempt.publication.result_hash, check) if check is not None else None

    def press(self, online: Collection[str]) -> Effects:
        """Nothing came for a while: hand the chunks of members that are not there to the next in line.

        A member that has left the federation is not there either. If that was said before and helped nothing, those
        who are connected but silent are called absent too.
        """
        attempt = self._attempt
        if attempt is None or self._core.clock.mono_ms() < self.deadline:
            return ()
        self._wait()
        published, policy = publication_of(attempt), self._core.policy
        owing = {site for site in attempt.context.sites if site not in published.acks or not policy.lists(site)}
        gone = {site for site in owing if site not in online or not policy.lists(site)}
        self._named = owing if gone == self._named else gone
        order = messages.AuditOrder(result=published.result_hash, absent=tuple(sorted(self._named)))
        return tuple(Send(order, to=site) for site in sorted(online))


def publication_of(attempt: CoordinatorAttempt) -> Publication:
    """The result of an attempt that has one."""
    if attempt.publication is None:
        raise RemoteProtocolError("there is no result to check", where="audit")
    return attempt.publication
