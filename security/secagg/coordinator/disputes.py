"""Disputes about share boxes in one attempt, at the coordinator (docs/spec/secure-aggregation.md, section 11).

A holder accuses a dealer; the dealer answers with the shares in dispute; the holder goes on with them. The coordinator
only passes both on. What it learns from a dealer that does not answer, or answers wrongly, is the name of a liar.
"""

from __future__ import annotations

from collections.abc import Collection

from lazaret.errors import VerificationFailed
from security.secagg import certificate_checks, records, statements
from security.secagg.coordinator.uploads import CoordinatorCore, Dealing
from security.secagg.effects import ANSWERED, Blamed, Effects, Persist, Send
from security.secagg.messages import Accusation, Disclosure
from security.secrets import Secret

Pair = tuple[str, str]  # accuser, dealer


class WrongAnswer(VerificationFailed):
    """A dealer has answered an accusation with shares that it did not deal; its signature is the evidence."""


class Disputes:
    """Accusations of one attempt, and their answers.

    :ivar accused: every pair of which an accusation was ever seen; it lasts in the coordinator's book.
    :ivar open: accusations without an answer.
    :ivar settled: valid answers. The shares in them are public.
    """

    def __init__(self, core: CoordinatorCore, dealing: Dealing) -> None:
        self._core = core
        self._dealing = dealing
        self.accused: set[Pair] = set()
        self.open: dict[Pair, Accusation] = {}
        self.settled: dict[Pair, Disclosure] = {}
        self._due: dict[Pair, int] = {}

    def accusation(self, message: Accusation, *, over: bool) -> Effects:
        """Pass an accusation on to its dealer, which has the time of a step for its answer, whenever it is accused.

        :param over: the accuser waits for no answer any more: it has uploaded or aborted, or the step is over.
        """
        certificate_checks.check_accusation(self._core.policy, self._dealing.context, self._dealing.kx, message)
        pair = message.site, message.dealer
        self.accused.add(pair)
        if pair in self.settled:
            return (Send(self.settled[pair], to=message.site),)
        if over or pair in self.open:
            return ()  # a dealer that reconnects is asked again, and not as often as its accuser likes
        self.open[pair] = message
        self._due[pair] = self._core.clock.mono_ms() + self._core.timeouts.step_ms
        return (Send(message, to=message.dealer),)

    def disclosure(self, message: Disclosure, *, over: bool) -> Effects:
        """Pass a valid answer on to the accuser.

        :raises WrongAnswer: if the dealer has signed an answer that is not what it dealt.
        """
        dealing, holder = self._dealing, message.holder
        if message.kx != dealing.kx:
            raise VerificationFailed("answer is of another attempt", where=f"site {message.site}")
        said = statements.disclose(message.kx, holder, message.b_share, message.s_share, message.pair)
        statements.verify(self._core.policy.entry(message.site), said, message.signature)
        if over or (holder, message.site) not in self.open:
            return ()
        line = dealing.shares[message.site].shares[dealing.context.position(holder) - 1]
        shares = Secret(message.b_share), Secret(message.s_share)
        pair = Secret(message.pair) if message.pair else None
        try:
            certificate_checks.check_dealt_shares(shares, line, kx=dealing.kx, dealer=message.site, holder=holder)
            certificate_checks.check_pair(dealing.context, dealing.adverts[message.site], holder, pair)
        except VerificationFailed as error:
            raise WrongAnswer(error.message, where=error.where) from error
        self.settle(message)
        seen = Persist(records.DisclosureSeen(disclosure=message), dealing.context.round)
        return seen, Blamed(message.site, ANSWERED), Send(message, to=holder)

    def settle(self, disclosure: Disclosure) -> None:
        pair = disclosure.holder, disclosure.site
        self.accused.add(pair)
        self.settled[pair] = disclosure
        self.open.pop(pair, None)

    def withdraw(self, accuser: str) -> None:
        """An accuser that has uploaded or aborted waits for nothing any more."""
        self.open = {pair: said for pair, said in self.open.items() if pair[0] != accuser}

    def of_dealer(self, dealer: str) -> list[Accusation]:
        """What a dealer has not answered yet."""
        return [said for (_, accused), said in self.open.items() if accused == dealer]

    @property
    def deadline(self) -> int | None:
        """When the first open accusation is overdue, on the clock of the coordinator."""
        return min((self._due[pair] for pair in self.open), default=None)

    @property
    def silent(self) -> tuple[str, ...]:
        """The dealers whose time for an answer is over. One that was accused a moment ago is not among them: a liar
        would choose the last moment of a step. If a step is closed before its time, those that were accused first.
        """
        until = max(self._core.clock.mono_ms(), self.deadline or 0)
        return tuple(sorted({pair[1] for pair in self.open if self._due[pair] <= until}))

    def frees(self, dealer: str, aborts: Collection[str], needed: int) -> bool:
        """Whether these aborts keep the dealer's secrets: those of holders whose share is public do not count."""
        public = {accuser for accuser, accused in self.settled if accused == dealer}
        return len(set(aborts) - public) >= needed
