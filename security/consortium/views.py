"""What other parts of the toolkit need of a manifest, in their own words."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from security.audit.note import VerifierKey
from security.audit.roster import COORDINATOR, SITE, Party, Roster
from security.consortium.manifest import Manifest, Member
from security.secagg.policy import AggregationPolicy, AuditMode, RosterEntry
from security.signing import VerifyKey

if TYPE_CHECKING:
    import datetime as dt


def aggregation_policy(manifest: Manifest, *, now_ms: int, dp_active: bool = False) -> AggregationPolicy:
    """The manifest as the aggregation protocol reads it.

    Members whose signing certificate is not valid today count as revoked, until a renewal is published.
    """
    lapsed = {member.signing_sha256 for member in manifest.roster if not _valid_at(member, now_ms)}
    numbers, audit = manifest.aggregation, manifest.audit
    return AggregationPolicy(
        federation=manifest.federation,
        manifest_version=manifest.version,
        manifest_hash=manifest.digest,
        run=manifest.run,
        roster=tuple(_entry(member) for member in manifest.roster),
        coordinator=_entry(manifest.coordinator),
        initial_state_hash=bytes.fromhex(manifest.model.initial_state),
        config_hashes=frozenset(bytes.fromhex(text) for text in manifest.training.config_hashes),
        layout=numbers.layout,
        c=numbers.colluders,
        m=numbers.least_survivors,
        single_history=numbers.single_history,
        allow_two_site=numbers.allow_two_sites,
        dp_active=dp_active,
        audit=AuditMode(audit.mode),
        spot_check_chunks=max(1, audit.chunks_per_site),
        secret_ttl_ms=manifest.timing.secret_ttl * 1000,
        revoked=frozenset(bytes.fromhex(text) for text in manifest.revoked | lapsed),
        strict=audit.strict,
    )


class Standing:
    """Who is in good standing under one manifest as time goes by: certificates begin and end in mid-run."""

    def __init__(self, manifest: Manifest, *, now_ms: int, dp_active: bool = False) -> None:
        self._manifest = manifest
        self._dp_active = dp_active
        certificates = [member.certificate for member in manifest.roster]
        self._dates = sorted(
            {_ms(found.not_valid_before_utc) for found in certificates}
            | {_ms(found.not_valid_after_utc) + 1 for found in certificates}
        )
        self._seen = self._passed(now_ms)

    def _passed(self, now_ms: int) -> int:
        return bisect_right(self._dates, now_ms)

    def changed(self, now_ms: int) -> AggregationPolicy | None:
        """The policy in force now, if a certificate has begun or ended since this was last asked."""
        passed = self._passed(now_ms)
        if passed == self._seen:
            return None
        self._seen = passed
        return aggregation_policy(self._manifest, now_ms=now_ms, dp_active=self._dp_active)


def _entry(member: Member) -> RosterEntry:
    cert = bytes.fromhex(member.signing_sha256)
    return RosterEntry(site=member.id, cert=cert, key=VerifyKey(member.signing_key))


def _valid_at(member: Member, now_ms: int) -> bool:
    certificate = member.certificate
    return _ms(certificate.not_valid_before_utc) <= now_ms <= _ms(certificate.not_valid_after_utc)


def _ms(instant: dt.datetime) -> int:
    return int(instant.timestamp() * 1000)


def audit_roster(manifest: Manifest) -> Roster:
    """The parties and the keys that speak for their privacy logs. A log's origin is the name of its root key."""
    parties = [_party(manifest.coordinator, COORDINATOR), *(_party(member, SITE) for member in manifest.roster)]
    vector = manifest.aggregation.layout.byte_length
    return Roster(parties=tuple(parties), digest=manifest.digest.hex(), vector_bytes=vector)


def _party(member: Member, role: str) -> Party:
    root, cosigner = VerifierKey.parse(member.audit_root), VerifierKey.parse(member.cosigner)
    return Party(name=member.id, role=role, origin=root.name, root=root, cosigner=cosigner)
