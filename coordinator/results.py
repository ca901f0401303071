"""The chain of published results, how far each site has followed it, and the check of the newest sum.

Each result names the one before it. Sums are kept for the last few rounds only; a site that is further behind gets one
covered state in their place. Sections are those of docs/spec/secure-aggregation.md: 10 for the check of a sum, 11 for
sites that catch up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from coordinator.effects import Effect, Effects
from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from security.crypto.ring import frames_of
from security.identity.membership import Mandate
from security.secagg import certificate_checks, messages
from security.secagg.certificates import Ack, CheckCertificate
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.publication import Publication, read_sum, sum_frames
from security.secagg.coordinator.rounds import CoordinatorRound
from security.secagg.coordinator.spool import Spool
from security.secagg.coordinator.uploads import CoordinatorCore
from security.secagg.effects import Certified, Discard, Send, SendFrames
from security.secagg.fields import Wire
from security.secagg.layout import Vector
from security.secagg.messages import Jump, Result, ResultCertificate, StateFrame

KEPT_SUMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One result of the chain; what it says is read from storage when it is needed."""

    round: int
    result_hash: bytes
    prev_result: bytes
    state_hash: bytes
    sum_root: bytes

    @classmethod
    def of(cls, published: Publication) -> Link:
        result = published.result
        return cls(
            round=result.context.round,
            result_hash=published.result_hash,
            prev_result=result.context.prev_result,
            state_hash=result.state_hash,
            sum_root=result.sum_root,
        )


class Chain:
    """All results, oldest first.

    :param mandate: the policy in force. A site reads results by it: sums of an older manifest cannot be replayed,
        and a state of another layout cannot be taken.
    :param spool: has the newest sums.
    """

    def __init__(
        self,
        links: list[Link],
        mandate: Mandate,
        spool: Spool,
        *,
        load_result: Callable[[bytes], Result],
        load_check: Callable[[bytes], CheckCertificate | None],
        load_state: Callable[[bytes], Vector],
    ) -> None:
        self.links = links
        self._mandate = mandate
        self._spool = spool
        self._load_result = load_result
        self._load_check = load_check
        self._load_state = load_state
        self._head_check = load_check(links[-1].result_hash) if links else None

    @property
    def head(self) -> Link | None:
        return self.links[-1] if self.links else None

    def head_check(self) -> CheckCertificate | None:
        """The certificate of the newest result, if there is one. Asked at every tick, hence in memory."""
        return self._head_check

    def cover(self, result_hash: bytes, check: CheckCertificate) -> None:
        """A result has its certificate."""
        if self.links and self.links[-1].result_hash == result_hash:
            self._head_check = check
            if not self._follows(len(self.links) - 1):
                standing = self._load_result(result_hash).context.state_hash
                self.links[-1] = replace(self.links[-1], state_hash=standing)

    @property
    def follow(self) -> bytes | None:
        """What the next context names: the newest result or, where sites vote, together with its vote set."""
        if self.head is None:
            return None
        return certificate_checks.link_after(self._mandate.policy, self.head.result_hash, self._head_check)

    def _follows(self, number: int) -> bool:
        """Whether the model of a link follows: not if the sites have voted against it."""
        if not self._mandate.policy.vote or (check := self._check(number)) is None:
            return True
        quorum = self._load_result(self.links[number].result_hash).context.t
        return certificate_checks.accepted(check.acks, quorum)

    def standing(self) -> Vector | None:
        """The newest model that stands; None: the first model."""
        newest = self._newest_standing()
        return None if newest is None else self._load_state(newest.state_hash)

    def movements(self) -> bytes:
        """The lengths of steps up to the newest model that stands."""
        newest = self._newest_standing()
        return b"" if newest is None else self._load_result(newest.result_hash).movements

    def _newest_standing(self) -> Link | None:
        return next((self.links[n] for n in range(len(self.links) - 1, -1, -1) if self._follows(n)), None)

    def cohorts(self, most: int) -> list[tuple[str, ...]]:
        """Who is in the newest sums, newest first."""
        newest = reversed(self.links[-most:])
        return [tuple(line.site for line in self._load_result(link.result_hash).uploads) for link in newest]

    def vote_on(self, result_hash: bytes, check: CheckCertificate) -> tuple[Result, bool]:
        """A result and whether its model follows."""
        result = self._load_result(result_hash)
        return result, certificate_checks.accepted(check.acks, result.context.t)

    def add(self, link: Link) -> None:
        """Append a result."""
        self.links.append(link)
        self._head_check = None

    @property
    def unchecked(self) -> bool:
        """Whether the newest sum lacks its certificate."""
        return self.head is not None and self.head_check() is None

    def tidy(self, spool: Spool, *under_way: CoordinatorAttempt) -> Effects:
        """Everything leaves the spool but sums that a late site may ask for, and uploads that are still needed."""
        kept = self.kept_sums()
        for attempt in under_way:
            kept |= set(attempt.uploads.discard().keys)
        stale = tuple(key for key in spool.vectors() if key not in kept)
        return (Discard(stale),) if stale else ()

    def kept_sums(self) -> set[bytes]:
        """The roots of the sums that sites may still ask for."""
        return {link.sum_root for link in self.links[-KEPT_SUMS:]}

    def bring(self, site: str, *, round_number: int, result_hash: bytes) -> Effects:
        """What a site whose newest result is `result_hash` needs to reach the end of the chain."""
        place = self._place(site, round_number, result_hash)
        effects: list[Effect] = []
        if len(self.links) - place > KEPT_SUMS or not self._replayable(place):
            place = self._jump(site, max(0, place), effects)
        elif place and place == len(self.links) and self.head_check() is None:
            # It may have restarted in the middle of the check of this very sum, and needs it once more.
            place -= 1
        for number in range(place, len(self.links)):
            self._certify(site, number - 1, effects)
            link = self.links[number]
            effects += [Send(self._load_result(link.result_hash), to=site)]
            effects += [SendFrames(site, partial(self._sum, link))]
        self._certify(site, len(self.links) - 1, effects)
        return tuple(effects)

    def _place(self, site: str, round_number: int, result_hash: bytes) -> int:
        """How many links the site has already."""
        for number, link in enumerate(self.links):
            if link.result_hash == result_hash:
                return number + 1
        if round_number != 0:
            raise RemoteProtocolError("the newest result of the site is unknown here", where=f"site {site}")
        # At the very start. A site enrolled later starts from a newer manifest than the first round did: no sum of the
        # old ones leads on from there, only a covered state does.
        fresh = not self.links or self.links[0].prev_result == result_hash
        return 0 if fresh else -len(self.links) - KEPT_SUMS

    def _replayable(self, place: int) -> bool:
        """Whether a site can continue from a place, result by result: all were made under the manifest in force, and
        the certificate of its newest result still counts, though sites have left or have other keys since.
        """
        rest = [self._load_result(link.result_hash) for link in self.links[max(0, place) :]]
        if any(result.context.manifest_hash != self._mandate.policy.manifest_hash for result in rest):
            return False
        return not rest or place <= 0 or self._counts(place - 1)

    def _counts(self, number: int) -> bool:
        link = self.links[number]
        result = self._load_result(link.result_hash)
        try:
            certificate_checks.check_certificate(
                self._mandate.policy,
                self._check(number),
                result=link.result_hash,
                state_hash=result.state_hash,
                quorum=result.context.t,
            )
        except (PolicyViolation, VerificationFailed):
            return False
        return True

    def _check(self, number: int) -> CheckCertificate | None:
        """The certificate of a link; the newest one may not be in storage yet."""
        last = number == len(self.links) - 1
        return self._head_check if last else self._load_check(self.links[number].result_hash)

    def _jump(self, site: str, place: int, effects: list[Effect]) -> int:
        """Send the newest covered state beyond its place; returns how many links the site then has."""
        for number in range(len(self.links) - 1, place - 1, -1):
            link, check = self.links[number], self._check(number)
            if check is None or not self._follows(number):
                continue
            result = self._load_result(link.result_hash)
            if result.context.layout_hash != self._mandate.policy.layout.layout_hash or not self._counts(number):
                break
            effects += [Send(Jump(result=result, check=check), to=site)]
            effects += [SendFrames(site, partial(self._state, link.state_hash))]
            return number + 1 if self._replayable(number + 1) else len(self.links)
        # There is nothing yet that this site could verify. It is fetched when the next result is covered.
        return len(self.links)

    def _sum(self, link: Link) -> Iterator[Wire]:
        """The sum of an older result, read when its first frame is sent."""
        words = read_sum(self._spool, link.sum_root, self._mandate.policy.layout, self._mandate.policy.sums)
        yield from sum_frames(link.result_hash, words, self._mandate.policy.layout)

    def _state(self, state_hash: bytes) -> Iterator[Wire]:
        """A whole state, for a site that was away for too long to replay the sums."""
        state = self._load_state(state_hash)
        for index, part in frames_of(state.view(np.uint8)):
            yield StateFrame(state_hash=state_hash, index=index, data=part)

    def _certify(self, site: str, number: int, effects: list[Effect]) -> None:
        if number >= 0 and (check := self._check(number)) is not None:
            effects.append(Send(ResultCertificate(result=self.links[number].result_hash, check=check), to=site))


# How far each site has followed the chain, and what it was sent to catch up.


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
        # One for whom there was nothing that it could verify is not brought anywhere, and may ask again.
        if covered is not None and _brings(needed):
            self._brought[site] = covered
        return needed

    def fetch(self, site: str) -> Effects | None:
        """For a site that declined because it lacks the model: a newcomer, or one that was left out. Once for each
        result, when it is covered: before that there is nothing that the site could verify.

        :returns: None if it has the model and its own reasons, or nothing can be done now.
        """
        number, result = self._at.get(site, (0, b""))
        covered = self._covered_head()
        # One that has not said where it stands has nothing to be brought on from.
        if not result or covered is None or covered in (result, self._brought.get(site)):
            return None
        needed = self._chain.bring(site, round_number=number, result_hash=result)
        if not _brings(needed):
            return None
        self._brought[site] = covered
        return needed

    def _covered_head(self) -> bytes | None:
        head = self._chain.head
        return head.result_hash if head is not None and self._chain.head_check() is not None else None


def _brings(effects: Effects) -> bool:
    """Whether a result or a state is among them. A certificate alone brings nobody on."""
    return any(isinstance(effect, SendFrames) for effect in effects)


# The check of the newest published sum, while the next round trains (section 10). Sites ask for chunks of all uploads,
# add them and sign. The cohort decides which site checks which chunk; chunks of absent sites go to others, so that no
# single site can delay the certificate.

QUESTIONS = (messages.ChunkRequest, Ack)


class SumCheck:
    """One published sum and the acknowledgements it still lacks.

    :ivar round: the round whose sum is, or was last, under check.
    :ivar open: whether it lacks its certificate.
    :param vote_ms: how long votes are waited for while they do not decide; sites look at the model on their own data.
    """

    def __init__(self, core: CoordinatorCore, patience_ms: int, vote_ms: int) -> None:
        self._core = core
        self._patience_ms = patience_ms
        self._vote_ms = vote_ms
        self._votes_due = 0
        self.round: CoordinatorRound | None = None
        self.open = False
        self.deadline = 0
        self._named: set[str] | None = None  # whom the last order called absent, if nothing came since
        self._asked: set[tuple[str, int]] = set()  # who has asked for which chunk

    def watch(self, published: CoordinatorRound | None) -> None:
        """Begin with the sum of a round. After a restart it may turn out to be covered already."""
        self.round, self._named, self._asked = published, None, set()
        self.open = self.certificate() is None
        self._votes_due = self._core.clock.mono_ms() + self._vote_ms
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
        if self._is_new(publication_of(attempt), site, message):
            self._wait()
            self._named = None
        effects: list[Effect] = list(attempt.receive(site, message))
        if any(isinstance(effect, Certified) for effect in effects):
            self.open = False
        return tuple(effects)

    def _is_new(self, published: Publication, site: str, message: Wire) -> bool:
        """Whether the check goes on: who says the same again, as every site does that is told who is absent, or asks
        for the same chunk again, keeps nobody waiting."""
        if isinstance(message, messages.ChunkRequest):
            told = (site, message.chunk)
            new = told not in self._asked
            self._asked.add(told)
            return new
        return published.acks.get(site) != message

    def certificate(self) -> Certified | None:
        """The result that was checked and its certificate, once it is covered."""
        attempt = self.round.current if self.round is not None else None
        if attempt is None or attempt.publication is None:
            return None
        check = attempt.publication.certificate()
        return Certified(attempt.publication.result_hash, check) if check is not None else None

    def press(self, online: Collection[str]) -> Effects:
        """Nothing came for a while: hand the chunks of members that are not there to the next in line.

        A member that has left the federation is not there either. If that was said before and helped nothing, those
        who are connected but silent are called absent too. Votes that have not come are not waited for any longer.
        """
        attempt = self._attempt
        if attempt is None or self._core.clock.mono_ms() < self.deadline:
            return ()
        self._wait()
        late = self._core.clock.mono_ms() >= self._votes_due
        if late and (closed := attempt.close_vote()):
            self.open = False
            return closed
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
