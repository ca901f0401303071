"""What the coordinator writes into its privacy log, the receipts for it, and the byte counts of this start.

Every message of a site is logged with the bytes that arrived, before anything is done with it. Receipts are given in
batches: one signed checkpoint covers many entries, and the inclusion path shows a site the place of its own message
(docs/spec/audit-log.md). `changes` logs what a new manifest changes in the roster.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from lazaret.errors import CodecError
from security.identity.manifest import Manifest, Member
from security.log.events import (
    AggregatePublished,
    CheckpointSeen,
    Ingress,
    IngressPartial,
    PeerEnrolled,
    PeerRevoked,
    SecaggSurvivors,
    SecaggUnmasked,
)
from security.log.schema import COUNT, MAX_COUNT, TOKEN, Event
from security.log.writer import AuditLog
from security.secagg import certificate_checks, relay
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.rounds import CoordinatorRound
from security.secagg.effects import Certified
from security.secagg.fields import Wire
from security.secagg.messages import UploadFrame
from security.secagg.registry import REGISTRY, Filing
from security.secagg.relay import Receipt, SignedHead
from security.secagg.site import entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """One message as it came: its place on its stream, its bytes and their digest."""

    site: str
    session: int
    sequence: int
    message: Wire
    size: int
    digest: str

    @classmethod
    def of(cls, site: str, session: int, sequence: int, message: Wire, data: bytes) -> Arrived:
        # An upload is logged as a whole, by its root.
        digest = "" if isinstance(message, UploadFrame) else sha256(data).hexdigest()
        return cls(site=site, session=session, sequence=sequence, message=message, size=len(data), digest=digest)


@dataclass
class _Upload:
    """Frames of one upload on one stream: logged as a whole, by the root that the site signed."""

    session: int
    sequence: int
    size: int = 0


class IngressLog:
    """The coordinator's own log of what it receives."""

    def __init__(self, log: AuditLog, run: str) -> None:
        self.log = log
        self._run = run
        self._seen: dict[str, int] = {}
        self._uploads: dict[str, _Upload] = {}
        self._owed: dict[str, list[tuple[int, int]]] = defaultdict(list)

    @property
    def head(self) -> SignedHead:
        """What every message carries."""
        return SignedHead.of(self.log.newest_checkpoint)

    def write(self, event: Event, *, round_number: int | None = None) -> int:
        return self.log.append(event, run=self._run, round=round_number)

    def arrived(self, item: Arrived, *, round_number: int | None) -> None:
        """Log a message, before it is acted upon. Frames are counted, and logged by `upload_complete`.

        A site sends the frames of an upload without a break. So whatever follows them settles what did not become one.
        """
        if isinstance(item.message, UploadFrame):
            upload = self._uploads.setdefault(item.site, _Upload(item.session, item.sequence))
            upload.size += item.size
            return
        self._settle(item.site)
        self._ingress(item, round_number=round_number)

    def upload_complete(self, site: str, session: int, root: bytes, *, round_number: int) -> None:
        """The last frame of an upload has come."""
        upload = self._uploads.pop(site, None)
        if upload is None:
            return
        item = Arrived(
            site=site,
            session=session,
            sequence=upload.sequence,
            message=UploadFrame(kx=bytes(32), index=0, data=b""),
            size=upload.size,
            digest=root.hex(),
        )
        self._ingress(item, round_number=round_number)

    def _settle(self, site: str) -> None:
        """Log frames that did not become an upload: every byte that reached us has an entry."""
        upload = self._uploads.pop(site, None)
        if upload is not None:
            self.refused(site, upload.session, upload.sequence, upload.size)

    def refused(self, site: str, session: int, sequence: int, size: int) -> None:
        """Log bytes that are no message, or none that was taken. The site's log has to explain them all the same."""
        name = relay.message_id(site, session, sequence, from_site=True)
        self.write(IngressPartial(msg_id=name, sender=site, bytes=size))

    def forget_stream(self, site: str) -> None:
        """A stream has ended: what was under way is settled, and receipts for it come with nothing."""
        self._settle(site)
        self._owed.pop(site, None)

    def _ingress(self, item: Arrived, *, round_number: int | None) -> None:
        kind = REGISTRY[type(item.message)]
        number = round_number if kind.filing is Filing.ATTEMPT else kind.round_of(item.message)
        if number is not None:
            number = min(number, MAX_COUNT)  # a site's lie about it must not end the log
        entry = self.write(
            Ingress(
                msg_id=relay.message_id(item.site, item.session, item.sequence, from_site=True),
                sender=item.site,
                message=type(item.message).__name__,
                bytes=item.size,
                sha256=item.digest,
            ),
            round_number=number,
        )
        self._owed[item.site].append((item.sequence, entry))

    def saw_head(self, head: SignedHead) -> None:
        """Log the newest checkpoint of a site, if it has grown."""
        if self._seen.get(head.origin, -1) < head.size:
            if not (TOKEN.accepts(head.origin) and COUNT.accepts(head.size)):
                raise CodecError("an impossible checkpoint", where="log head")  # false data must not end our log
            self._seen[head.origin] = head.size
            self.write(CheckpointSeen(origin=head.origin, size=head.size, root=head.root.hex()))

    def receipts(self) -> dict[str, Iterator[Receipt]]:
        """Sign a checkpoint over everything so far, and send the receipts that are due."""
        if not any(self._owed.values()):
            return {}
        self.log.checkpoint()
        owed, self._owed = self._owed, defaultdict(list)
        return {site: self._shown(entries) for site, entries in owed.items()}

    def _shown(self, owed: list[tuple[int, int]]) -> Iterator[Receipt]:
        """Each is made when its turn comes to be sent: its path must lead to the head that travels with it."""
        for sequence, entry in owed:
            yield Receipt(sequence=sequence, entry=entry, path=self.log.inclusion_path(entry, self.head.size))

    # What happened in a round.

    def survivors(self, attempt: CoordinatorAttempt) -> None:
        shown = {line.site for line in attempt.survivors.uploads} if attempt.survivors else set()
        self.write(
            SecaggSurvivors(
                attempt=attempt.context.attempt,
                context=attempt.ctx.hex(),
                survivors=attempt.survivors_hash().hex(),
                count=len(shown),
                threshold=attempt.context.t,
                dropouts=tuple(site for site in attempt.context.sites if site not in shown),
            ),
            round_number=attempt.context.round,
        )

    def published(self, attempt: CoordinatorAttempt) -> None:
        if attempt.publication is None:
            return
        result, number = attempt.publication.result, attempt.context.round
        groups = attempt.core.policy.groups
        alive = attempt.publication.survivors
        self.write(
            SecaggUnmasked(
                attempt=attempt.context.attempt,
                context=attempt.ctx.hex(),
                self_mask=alive,
                mask_key=tuple(site for site in attempt.context.sites if site not in alive),
            ),
            round_number=number,
        )
        self.write(
            AggregatePublished(
                inputs=len(alive),
                groups=None if groups is None else groups.digest,
                sum=result.sum_root.hex(),
                model=result.state_hash.hex(),
                previous=attempt.context.state_hash.hex(),
            ),
            round_number=number,
        )

    def voted(self, published: CoordinatorRound | None, covered: Certified) -> None:
        """The vote set on a result, where the manifest asks for one."""
        attempt = published.current if published is not None else None
        if attempt is None or attempt.publication is None or not attempt.core.policy.vote:
            return
        result, context = attempt.publication.result, attempt.context
        accepted = certificate_checks.accepted(covered.check.acks, context.t)
        event = entries.vote_event(
            context.t, covered.check, accepted=accepted, model=result.state_hash, before=context.state_hash
        )
        self.write(event, round_number=context.round)


# Changes of the roster: what a manifest says and the one before did not.


def changes(old: Manifest | None, new: Manifest) -> Iterator[Event]:
    """An entry for each site that came, left, or has other keys. With no manifest before, everybody came."""
    before = {member.id: member for member in old.roster} if old else {}
    after = {member.id: member for member in new.roster}
    reasons = {revocation.member: revocation.reason for revocation in new.revocations}
    for name, member in before.items():
        if name not in after:
            reason = reasons.get(name, "no longer in the roster")
            yield PeerRevoked(site=name, spki=member.tls_keys[-1], reason=reason)
    for name, member in after.items():
        if name not in before or _keys(before[name]) != _keys(member):
            yield PeerEnrolled(site=name, spki=member.tls_keys[-1], vkey=str(member.audit_root))


def _keys(member: Member) -> tuple[str, str]:
    return member.tls_keys[-1], str(member.audit_root)


# Bytes received and sent since this start, by type of message.


class Traffic:
    """Counts what passes the network's edge."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._marked = (0, 0)

    def since_last(self) -> tuple[int, int]:
        """Bytes in and out since this was last asked."""
        now = (self.received.total(), self.sent.total())
        passed = (now[0] - self._marked[0], now[1] - self._marked[1])
        self._marked = now
        return passed
