"""Who may take part, as the coordinator's log tells it: what one manifest says and the one before did not."""

from __future__ import annotations

from collections.abc import Iterator

from security.audit.event import Event
from security.audit.events import PeerEnrolled, PeerRevoked
from security.consortium.manifest import Manifest, Member


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
