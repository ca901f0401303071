"""What a party is in its consortium: everything it takes from the manifest in force, in one frozen object.

`Membership` follows from the manifest, the party's signing key, one local setting and the time, and from nothing else.
A running party has one `Seat`, which holds one membership. Whoever needs the manifest, the policy, the roster, the
layout, the signing key or the destination reads them through the seat. So a newer manifest is adopted by one
assignment, `Seat.take`, and a certificate that begins or ends in mid-run takes the same way.

What belongs to one attempt (`OpenAttempt`, `Dealing`, `Opening`) keeps the key or the policy it began under: a
membership changes between attempts only.

A party takes all of it from the manifest and its own configuration, never from the coordinator; everything that the
coordinator proposes is compared with it (docs/spec/secure-aggregation.md, section 2).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from lazaret.errors import ConfigError, PolicyViolation
from security.crypto.encoding import MAX_INT
from security.crypto.key_agreement import SUITE, SUITES
from security.crypto.signing import VerifyKey
from security.identity.manifest import Aggregation, Manifest, Member
from security.log.roster import Roster, audit_roster
from security.secagg import thresholds
from security.secagg.groups import Groups, drawn
from security.secagg.layout import MAX_ROSTER, Layout
from security.secagg.state import CEILINGS_ALONE, MovementRule
from security.secagg.thresholds import Thresholds

if TYPE_CHECKING:
    from security.secagg.statements import Signer  # which itself verifies against entries of the roster


# The policy of the aggregation.

DAY_MS = 24 * 3600 * 1000
COVERED_ROSTER = 20  # above this, re-deriving every chunk costs the coordinator more traffic than the rounds


class AuditMode(StrEnum):
    """How a sum is checked before the next aggregation (section 10)."""

    COVERED = "covered"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterEntry:
    """A party, the SHA-256 of its signing certificate, and the key in it."""

    site: str
    cert: bytes
    key: VerifyKey


@dataclass(frozen=True, kw_only=True)
class AggregationPolicy:
    """One manifest version, as the protocol needs it.

    :param c: how many sites of the whole roster may collude with the coordinator.
    :param m: the least number of survivors in a sum.
    :param single_history: refuse cohorts so small that two histories could live side by side.
    :param dp_active: whether this site's own privacy ledger is in force; the only local field besides `revoked`.
    :param method: how the federation trains, as entries of the privacy log name it.
    :param suite: how keys are agreed on; part of every context, so that nobody can be brought to use another one.
    :param strict: do not even train on a state whose sum has not been checked.
    :param movement: how far a tensor may move in a round, beside its ceiling in the layout.
    :param groups: of sites whose sums are opened apart and combined by a median; None: one sum of all.
    :param vote: sites vote on each model before anybody trains on it (section 10, "Votes").
    :param undrawn: the manifest asks for groups, and not all sites have opened their secrets for the draw: no cohort.
    :param expires_ms: until when the manifest holds; afterwards a site sends nothing under it.
    :param scorers: the sites that add a score to the sum; all others add zeros to those slots.
    """

    federation: str
    manifest_version: int
    manifest_hash: bytes
    run: str
    roster: tuple[RosterEntry, ...]
    coordinator: RosterEntry
    initial_state_hash: bytes
    config_hashes: frozenset[bytes]
    layout: Layout
    c: int
    m: int = thresholds.LEAST_SURVIVORS
    single_history: bool = True
    allow_two_site: bool = False
    dp_active: bool = False
    audit: AuditMode = AuditMode.COVERED
    spot_check_chunks: int = 1
    secret_ttl_ms: int = DAY_MS
    revoked: frozenset[bytes] = frozenset()
    strict: bool = False
    method: str = "none"
    suite: str = SUITE
    expires_ms: int = MAX_INT
    movement: MovementRule = CEILINGS_ALONE
    groups: Groups | None = None
    undrawn: bool = False
    vote: bool = False
    scorers: frozenset[str] = frozenset()
    _by_site: dict[str, RosterEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        everyone = (*self.roster, self.coordinator)
        if len({entry.site for entry in everyone}) != len(everyone):
            raise ConfigError("two parties have the same id", where="manifest [roster]")
        if len({entry.cert for entry in everyone}) != len(everyone):
            raise ConfigError("two parties have the same certificate", where="manifest [roster]")
        if len({entry.key.raw for entry in everyone}) != len(everyone):
            raise ConfigError("two parties have the same signing key", where="manifest [roster]")
        if self.layout.roster_size < len(self.roster):
            # The proof that no sum wraps counts on it (section 7).
            raise ConfigError("the layout was made for a smaller roster", where="manifest [layout]")
        if self.c < 0 or (self.m < thresholds.LEAST_SURVIVORS and not self.allow_two_site) or self.m < 2:
            raise ConfigError("c must not be negative and m at least 3", where="manifest [thresholds]")
        if self.groups is not None:
            self.groups.check_layout(self.layout)
        if self.vote and not (self.strict and self.single_history and not self.dp_active):
            raise ConfigError(
                "a vote needs strict and single_history, and is not for differential privacy",
                where="manifest [audit] vote_drop",
            )
        object.__setattr__(self, "_by_site", {entry.site: entry for entry in self.roster})

    def entry(self, site: str) -> RosterEntry:
        """The roster's entry of a site in good standing.

        :raises PolicyViolation: if the site is unlisted or its certificate is revoked.
        """
        found = self._by_site.get(site)
        if found is None:
            raise PolicyViolation("site is not in the roster", where=f"site {site}")
        if found.cert in self.revoked:
            raise PolicyViolation("signing certificate is revoked", where=f"site {site}")
        return found

    def coordinator_entry(self) -> RosterEntry:
        """The coordinator's entry, while its signing certificate is valid.

        :raises PolicyViolation: if it has expired.
        """
        if self.coordinator.cert in self.revoked:
            raise PolicyViolation(
                "the coordinator's signing certificate has expired or is not valid yet",
                where="coordinator",
                hint="the consortium renews it and publishes a new manifest",
            )
        return self.coordinator

    def check_fresh(self, now_ms: int) -> None:
        """Raise if the manifest has expired."""
        if now_ms >= self.expires_ms:
            raise PolicyViolation(
                f"manifest version {self.manifest_version} has expired",
                where="manifest",
                hint="the coordinator may not have forwarded a newer version: get it from the consortium "
                "and install it with `site-agent join --manifest FILE`",
            )

    def ended(self, at_ms: int) -> str | None:
        """What does not hold for anybody at an instant, so that no cohort can be; None if all does."""
        if at_ms >= self.expires_ms:
            return f"manifest version {self.manifest_version}"
        return "the coordinator's certificate" if self.coordinator.cert in self.revoked else None

    def lists(self, site: str) -> bool:
        """Whether a site is on the roster and not revoked."""
        found = self._by_site.get(site)
        return found is not None and found.cert not in self.revoked

    @cached_property
    def least_cohort(self) -> int:
        """The smallest cohort this policy allows; more than there can be, while groups are not drawn."""
        if self.undrawn:
            return MAX_ROSTER + 1
        roster = len(self.roster) if self.single_history else None
        return thresholds.least_cohort(c=self.c, m=self.m, roster=roster, groups=self.sums)

    def thresholds(self, n: int) -> Thresholds:
        """The thresholds of a cohort of `n`.

        :raises PolicyViolation: if such a cohort is not allowed.
        """
        if n == 2:
            return self._two_sites()
        return thresholds.derive(n=n, c=self.c, m=self.m)

    def check_single_history(self, n: int) -> None:
        """Raise if a cohort of `n` is so small that another one could hold a quorum without an honest site of it."""
        least = thresholds.single_history_cohort(roster=len(self.roster), c=self.c)
        if self.single_history and n < least:
            raise PolicyViolation(
                f"a cohort of {n} is too small: a second history of results would be possible",
                where="thresholds",
                hint=f"the manifest demands at least {least} sites",
            )

    def check_cohort(self, n: int) -> None:
        """Raise unless a cohort of `n` is allowed."""
        self.thresholds(n)
        self.check_single_history(n)

    def _two_sites(self) -> Thresholds:
        """Each of two sites learns the other's update; only noise that is already in it protects anybody."""
        if not (self.allow_two_site and self.dp_active):
            raise PolicyViolation(
                "a cohort of two would show each site the other's update",
                where="thresholds",
                hint="the manifest must allow two sites and this site must train with differential privacy",
            )
        return thresholds.derive(n=2, c=self.c, m=2)

    @property
    def chunks(self) -> int:
        """How many chunks of a sum there are to check: the frames of a vector; with groups, of every sum at once."""
        return self.layout.frames

    @property
    def sums(self) -> int:
        """How many sums a round has."""
        return 1 if self.groups is None else len(self.groups.members)

    def sum_of(self, site: str) -> int:
        """The number of the sum that a site's vector goes into."""
        return 0 if self.groups is None else self.groups.number(site)

    def parts(self, sites: Sequence[str]) -> list[tuple[str, ...]]:
        """These sites by the sum that their vectors go into."""
        return [tuple(sites)] if self.groups is None else self.groups.parts(sites)

    def check_groups(self, sites: Sequence[str], where: str) -> None:
        """Raise if a group among these sites would be too small to hide each of them."""
        if self.undrawn:
            raise PolicyViolation(
                "the groups of this run are not drawn yet",
                where=where,
                hint="each site prints its secret with `site-agent draw`, and the consortium publishes them",
            )
        if self.groups is not None:
            self.groups.check_sites(sites, where)

    def hides(self, sites: Sequence[str]) -> bool:
        """Whether every group among these sites is large enough."""
        try:
            self.check_groups(sites, "thresholds")
        except PolicyViolation:
            return False
        return True


def aggregation_policy(manifest: Manifest, *, now_ms: int, dp_active: bool = False) -> AggregationPolicy:
    """The manifest as the aggregation protocol reads it.

    Members whose signing certificate is not valid today count as revoked, until a renewal is published.
    """
    lapsed = {one.signing_sha256 for one in manifest.members if not one.valid_ms[0] <= now_ms <= one.valid_ms[1]}
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
        method=manifest.training.method,
        suite=SUITES[numbers.key_agreement],
        expires_ms=manifest.expires_at_ms,
        movement=movement_rule(numbers),
        groups=groups_of(numbers),
        undrawn=numbers.groups is not None and not numbers.groups.secrets,
        vote=audit.vote_drop is not None,
        scorers=frozenset(member.id for member in manifest.roster if manifest.scored(member.id)),
    )


def groups_of(numbers: Aggregation) -> Groups | None:
    """The groups that were drawn; None without groups, and before the draw."""
    table = numbers.groups
    if table is None or table.shown is None:
        return None
    secrets = {site: bytes.fromhex(text) for site, text in table.secrets.items()}
    members = drawn(secrets, table.count, bytes.fromhex(table.shown))
    return Groups(members, c=numbers.colluders, m=numbers.least_survivors, combine=table.combine)


def movement_rule(numbers: Aggregation) -> MovementRule:
    """The movement caps beside the ceilings of the layout."""
    return MovementRule(numbers.movement_window, Fraction(numbers.movement_factor))


def _certificate_dates(manifest: Manifest) -> list[int]:
    """The instants at which somebody's standing changes: a certificate begins, or has ended."""
    windows = [member.valid_ms for member in manifest.members]
    return sorted({first for first, _ in windows} | {last + 1 for _, last in windows})


def _entry(member: Member) -> RosterEntry:
    cert = bytes.fromhex(member.signing_sha256)
    return RosterEntry(site=member.id, cert=cert, key=VerifyKey(member.signing_key))






# One membership, and the one place where a party keeps it.


class Mandate(Protocol):
    """What a machine of the aggregation protocol reads: the policy in force, and the key it signs with."""

    @property
    def policy(self) -> AggregationPolicy: ...

    @property
    def signer(self) -> Signer: ...


@dataclass
class BareMandate:
    """A mandate without a manifest behind it: for machines that run in memory, in benchmarks and tests."""

    policy: AggregationPolicy
    signer: Signer


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One party under one manifest, as long as nobody's standing changes.

    :param roster: the parties and the keys of their privacy logs.
    :param since_ms: the last instant, before this was made, at which a certificate began or ended.
    :param until_ms: the next such instant; from then on `at` gives another membership.
    """

    manifest: Manifest
    signer: Signer
    policy: AggregationPolicy
    roster: Roster
    since_ms: float
    until_ms: float

    @classmethod
    def of(cls, manifest: Manifest, signer: Signer, *, now_ms: int, dp_active: bool = False) -> Membership:
        """The membership of the signer's party at an instant.

        :param dp_active: whether the party's own privacy ledger is in force; the one thing that is not in the manifest.
        """
        dates = [-math.inf, *_certificate_dates(manifest), math.inf]
        place = bisect_right(dates, now_ms)
        return cls(
            manifest=manifest,
            signer=signer,
            policy=aggregation_policy(manifest, now_ms=now_ms, dp_active=dp_active),
            roster=audit_roster(manifest),
            since_ms=dates[place - 1],
            until_ms=dates[place],
        )

    def at(self, now_ms: int) -> Membership:
        """The membership at another instant: this one, unless a certificate has begun or ended in between."""
        if self.since_ms <= now_ms < self.until_ms:
            return self
        return Membership.of(self.manifest, self.signer, now_ms=now_ms, dp_active=self.policy.dp_active)

    @property
    def layout(self) -> Layout:
        """Where each value stands in an aggregated vector."""
        return self.policy.layout

    @property
    def destination(self) -> str:
        """SHA-256 of the coordinator's TLS key, as entries of a site's log name it."""
        return self.manifest.coordinator.tls_keys[-1]

    @cached_property
    def coordinator_log(self) -> str:
        """The origin of the coordinator's privacy log."""
        return self.roster.by_name[self.manifest.coordinator.id].origin


class Seat:
    """The one place where a running party keeps its membership; it has no other reference to one.

    A machine takes it as its mandate.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def take(self, membership: Membership) -> None:
        """Go on under another membership: the one assignment of a party."""
        self._membership = membership

    def renew(self, now_ms: int) -> None:
        """Go on under the membership of this instant."""
        self.take(self._membership.at(now_ms))

    @property
    def membership(self) -> Membership:
        return self._membership

    @property
    def manifest(self) -> Manifest:
        return self._membership.manifest

    @property
    def policy(self) -> AggregationPolicy:
        return self._membership.policy

    @property
    def roster(self) -> Roster:
        return self._membership.roster

    @property
    def layout(self) -> Layout:
        return self._membership.layout

    @property
    def signer(self) -> Signer:
        return self._membership.signer

    @property
    def destination(self) -> str:
        return self._membership.destination
