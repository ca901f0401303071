"""What a manifest must be in itself. Each rule is a function of its own that returns or raises; none returns a verdict.

Who signed it, and which one may follow another, is in acceptance.py. Dates of members' certificates are not checked
here but when a member acts: one hospital's lapsed certificate must not stop the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Final

from cryptography import x509

from lazaret.errors import ConfigError, ManifestRejected, PolicyViolation
from security.dp.filter import check_delta
from security.dp.noise import SharedNoise
from security.dp.planner import PrivateSettings, Schedule
from security.identity import pki
from security.identity.manifest import Manifest, Member, real
from security.identity.peers import check_issuers
from security.identity.pki import Purpose, Role, Subject
from security.log.note import KeyType, VerifierKey
from security.secagg import groups, thresholds
from security.secagg.layout import SCORE_MAXIMA
from security.secagg.scores import score_slots
from security.secagg.state import MAX_MOVEMENTS

CLOCK_SKEW_MS: Final = 3_600_000
LONGEST_VALIDITY_MS: Final = 366 * 24 * 3_600_000
OTHER_FEDERATION: Final = "is this the right folder, and the right consortium's manifest?"
TWO_SITES_HINT: Final = (
    "with two sites each learns the other's update: set allow_two_sites = true and a [privacy] table, or enrol a third"
)












def check_federation(manifest: Manifest, root: x509.Certificate) -> None:
    names = root.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATION_NAME)
    if [name.value for name in names] != [manifest.federation]:
        raise ManifestRejected(
            f"belongs to another federation, {manifest.federation!r}", where=where_of(manifest), hint=OTHER_FEDERATION
        )


def check_clock(manifest: Manifest, root: x509.Certificate, now_ms: int) -> None:
    pki.check_dates(root, now_ms, "root certificate")
    if manifest.issued_at_ms > now_ms + CLOCK_SKEW_MS:
        raise ManifestRejected(
            "was issued in the future, by this machine's clock",
            where=where_of(manifest),
            hint="set this machine's clock",
        )


def check_certificates(manifest: Manifest, root: x509.Certificate) -> None:
    """Every signing certificate is from this root, for signing, and of the member it is listed under."""
    for member, role in _members(manifest):
        where = f"{where_of(manifest)}, {role} {member.id}"
        certificate = member.certificate
        pki.check_issuer(certificate, root, where)
        pki.check_revoked(certificate, manifest.revoked, where)
        pki.check_purpose(certificate, Purpose.SIGNING, role, where)
        pki.check_subject(certificate, Subject(federation=manifest.federation, role=role, member=member.id), where)


# Rules about one manifest in itself.


def check_roster(manifest: Manifest) -> None:
    ids = manifest.sites
    if any(low >= high for low, high in itertools.pairwise(ids)) or manifest.coordinator.id in ids:
        raise ManifestRejected("member ids must be distinct and sorted", where=where_of(manifest))
    if manifest.aggregation.layout.roster_size < len(ids):
        raise ManifestRejected("the layout was made for a smaller roster", where=where_of(manifest))


def check_distinct_keys(manifest: Manifest) -> None:
    """One key, one member, one purpose: a key in two places could speak for two."""
    keys = [key for member in manifest.members for key in (member.signing_key, *_note_keys(member))]
    keys += [key.public for key in _observers(manifest)]
    pins = [pin for member in manifest.members for pin in member.tls_keys]
    pins += [key for key in (manifest.root_ml_dsa, *log_keys(manifest)) if key is not None]
    if len(set(keys)) != len(keys) or len(set(pins)) != len(pins):
        raise ManifestRejected("a key appears twice", where=where_of(manifest))


def _observers(manifest: Manifest) -> list[VerifierKey]:
    """Witnesses without a log, each under a name of its own: with a member's name it could pass for that member."""
    found = [VerifierKey.parse(key) for key in manifest.audit.witnesses]
    taken = {f"{member.id}.{manifest.federation}/witness" for member in manifest.members}
    names = [key.name for key in found]
    ending = f".{manifest.federation}/witness"
    if any(key.kind is not KeyType.COSIGNER or not key.name.endswith(ending) for key in found):
        raise ManifestRejected(
            f"the key of a witness is no cosigner key under a name {ending!r}", where=where_of(manifest)
        )
    if taken & set(names) or len(set(names)) != len(names):
        raise ManifestRejected("a witness has the name of a member or of another witness", where=where_of(manifest))
    return found


def _note_keys(member: Member) -> tuple[bytes, bytes]:
    root, cosigner = VerifierKey.parse(member.audit_root), VerifierKey.parse(member.cosigner)
    if (root.kind, cosigner.kind) != (KeyType.LOG, KeyType.COSIGNER):
        raise ManifestRejected("audit root and cosigner keys are mixed up", where=member.id)
    return root.public, cosigner.public


def check_two_sites(manifest: Manifest) -> None:
    two = len(manifest.roster) == 2
    if two and not (manifest.aggregation.allow_two_sites and manifest.privacy is not None):
        raise PolicyViolation("a federation of two sites is refused", where=where_of(manifest), hint=TWO_SITES_HINT)
    if manifest.aggregation.least_survivors < (2 if two else thresholds.LEAST_SURVIVORS):
        raise PolicyViolation("least_survivors must be 3 or more", where=where_of(manifest))


def check_thresholds(manifest: Manifest) -> None:
    """With every site alive a round must be possible, or the federation could never move."""
    numbers = manifest.aggregation
    sites = len(manifest.roster)
    least = thresholds.least_cohort(
        c=numbers.colluders, m=numbers.least_survivors, roster=sites if numbers.single_history else None
    )
    if least > sites:
        raise PolicyViolation(
            f"no round is possible: {sites} sites, but a cohort needs {least}",
            where=where_of(manifest),
            hint="lower colluders or least_survivors, or enrol more sites",
        )


def check_audit(manifest: Manifest) -> None:
    if (manifest.audit.mode == "sampled") != (manifest.audit.chunks_per_site > 0):
        what = "chunks_per_site belongs to audit mode sampled, and only to it"
        raise ManifestRejected(what, where=where_of(manifest))


def check_vote(manifest: Manifest) -> None:
    """Votes are for one history, of models that nobody has trained on yet; under differential privacy each one would
    have to be booked (section 10, "Votes")."""
    if manifest.audit.vote_drop is None:
        return
    needs = {
        "[audit] strict = true": manifest.audit.strict,
        "[aggregation] single_history = true": manifest.aggregation.single_history,
        "no [privacy]: a vote tells of the validation side": manifest.privacy is None,
    }
    if missing := [name for name, holds in needs.items() if not holds]:
        raise PolicyViolation(f"a vote needs {missing[0]}", where=f"{where_of(manifest)} [audit] vote_drop")
    if not 0 <= real(manifest.audit.vote_drop) < 1:
        raise ManifestRejected("vote_drop must be from 0 to below 1", where=where_of(manifest))


def check_privacy(manifest: Manifest) -> None:
    """Delta is the chance of no protection at all (docs/spec/differential-privacy.md, section 1)."""
    if manifest.privacy is not None:
        least = manifest.privacy.least_patients
        check_delta(real(manifest.privacy.delta), least_patients=least, where=f"{where_of(manifest)} [privacy] delta")
        least_noise(manifest)


def check_labels(manifest: Manifest) -> None:
    """Several labels of an image have no private form: the noise of class counts is for one class of each."""
    if manifest.privacy is not None and labels_of(manifest) == "many":
        raise PolicyViolation(
            "several labels of an image cannot be trained under differential privacy: a patient would count in more "
            "classes than the noise is for",
            where=f"{where_of(manifest)} [training.settings] labels",
            hint='labels = "one", or no [privacy]',
        )


def labels_of(manifest: Manifest) -> object:
    return manifest.training.settings.get("labels", "one")


def least_noise(manifest: Manifest) -> Schedule | None:
    """The whole run with the noise that no site may be below. With more of it the ring may be too small."""
    if manifest.privacy is None:
        return None
    return private_schedule(manifest, multiplier=real(manifest.privacy.noise_floor))


def private_schedule(
    manifest: Manifest, *, multiplier: float, metrics_sigma: float | None = None
) -> Schedule | None:
    """The whole run as a manifest has it, at this much gradient noise; None without differential privacy.

    :raises ConfigError: where ring, cohorts or settings are not fit for shared noise (section 4).
    """
    settings = PrivateSettings.of(manifest.training.settings)
    if settings is None or manifest.privacy is None:
        return None
    clip = real(manifest.privacy.clip)
    shared = None if settings.noise == "site" else _shared_by_sites(manifest, settings, clip)
    if shared is not None:
        shared.saturation(shared.sigma(multiplier))
    return settings.schedule(
        rounds=manifest.training.rounds, multiplier=multiplier, clip=clip, metrics_sigma=metrics_sigma, shared=shared
    )


def _shared_by_sites(manifest: Manifest, settings: PrivateSettings, clip: float) -> SharedNoise:
    numbers, training = manifest.aggregation, manifest.training
    if numbers.groups is not None:
        raise ConfigError(
            "shared noise counts on the noise of all sites in one sum, and the sums of groups are opened apart",
            where=f"{where_of(manifest)} [aggregation] groups",
            hint='dp.noise = "site" under [training.settings], or no groups',
        )
    honest = thresholds.least_honest(
        roster=len(manifest.roster),
        c=numbers.colluders,
        m=numbers.least_survivors,
        single_history=numbers.single_history,
    )
    return settings.shared_noise(
        numbers.layout, clip=clip, settings=training.settings, weights=training.weights, honest=honest
    )


def check_movement(manifest: Manifest) -> None:
    """Caps that follow the history must let it go on: below one, every round would move less than the one before."""
    numbers = manifest.aggregation
    if Fraction(numbers.movement_factor) < 1:
        raise ManifestRejected("movement_factor must be 1 or more", where=where_of(manifest))
    if len(numbers.layout.state_blocks) * numbers.movement_window * 8 > MAX_MOVEMENTS:
        raise ManifestRejected("movement_window is too long for so many tensors", where=where_of(manifest))


def check_expiry(manifest: Manifest) -> None:
    """A manifest holds for a while, no longer than a year: a party that gets no newer one notices that something is
    withheld from it. Whether it has expired is asked when a party acts, so that old logs can still be read."""
    if not 0 < manifest.expires_at_ms - manifest.issued_at_ms <= LONGEST_VALIDITY_MS:
        raise ManifestRejected("must expire after it was issued, and within a year", where=where_of(manifest))


def check_version_one(manifest: Manifest) -> None:
    if (manifest.version == 1) != (manifest.previous is None):
        raise ManifestRejected("version 1, and only it, has no predecessor", where=where_of(manifest))


def check_scores(manifest: Manifest) -> None:
    """Slots for scores exist where enough sites consent, and nowhere else: with fewer, a sum tells a site's score."""
    listed = () if manifest.scores is None else manifest.scores.sites
    if list(listed) != sorted(set(listed)):
        raise ManifestRejected("sites that consent to scores must be distinct and sorted", where=where_of(manifest))
    numbers = manifest.aggregation
    allowed = score_slots(
        roster=len(manifest.roster),
        consenting=len(set(listed) & set(manifest.sites)),
        c=numbers.colluders,
        m=numbers.least_survivors,
        single_history=numbers.single_history,
        groups=numbers.groups is not None,
        private=manifest.privacy is not None,
    )
    if tuple(block.name for block in numbers.layout.blocks if block.name in SCORE_MAXIMA) != allowed:
        raise PolicyViolation(
            "the slots for scores are not those that the number of consenting sites allows",
            where=f"{where_of(manifest)} [scores]",
            hint="a run keeps its slots: if sites have left, the consortium begins a new run",
        )


def check_plugin(manifest: Manifest) -> None:
    """Noise is drawn in the process that runs the method: a file that no release has could leave it out."""
    if manifest.training.plugin is not None and manifest.privacy is not None:
        raise PolicyViolation(
            "a method of one's own has no place under differential privacy",
            where=f"{where_of(manifest)} [training] plugin",
            hint="leave out plugin, or [privacy]",
        )


def check_configs(manifest: Manifest) -> None:
    hashes_ = manifest.training.config_hashes
    if list(hashes_) != sorted(set(hashes_)):
        raise ManifestRejected("config hashes must be distinct and sorted", where=where_of(manifest))


def check_groups(manifest: Manifest) -> None:
    """Enough groups of enough sites, and secrets that every listed site has committed to (section 10, "Groups")."""
    table, numbers = manifest.aggregation.groups, manifest.aggregation
    if table is None:
        return
    least, count = groups.least_sites(c=numbers.colluders, m=numbers.least_survivors), 2 * numbers.colluders + 1
    if table.count < count or len(table.secrets or manifest.sites) // table.count < least:
        raise PolicyViolation(
            f"{len(manifest.roster)} sites are too few for {table.count} groups",
            where=where_of(manifest),
            hint=f"with colluders = {numbers.colluders}, at least {count} groups of {least} sites are needed",
        )
    if (table.shown is None) == bool(table.secrets):
        what = "names the manifest that showed commitments with secrets alone"
        raise ManifestRejected(what, where=where_of(manifest))
    for member in manifest.roster if table.secrets else ():
        opened = bytes.fromhex(table.secrets.get(member.id, ""))
        if groups.draw_commitment(member.id, opened).hex() != member.draw:
            raise ManifestRejected(
                f"the secret of {member.id} for the draw of groups is missing, or not the one it has committed to",
                where=where_of(manifest),
                hint="`site-agent draw` prints it; a new site needs a new run",
            )


def check_ml_dsa(manifest: Manifest) -> None:
    """All or nobody: a log without the second signature would be the one to forge."""
    if any((key is None) != (manifest.root_ml_dsa is None) for key in log_keys(manifest)):
        raise ManifestRejected(
            "ML-DSA keys are listed for some members, or without the root's",
            where=where_of(manifest),
            hint="with ml_dsa = true every member needs one: `site-agent renew --ml-dsa`, then `consortium renew`",
        )


def log_keys(manifest: Manifest) -> list[str | None]:
    """Of each member, the ML-DSA key of its log."""
    return [member.log_ml_dsa for member in manifest.members]


CONSISTENCY: tuple[Callable[[Manifest], None], ...] = (
    check_roster,
    check_distinct_keys,
    check_issuers,
    check_ml_dsa,
    check_two_sites,
    check_thresholds,
    check_audit,
    check_vote,
    check_privacy,
    check_labels,
    check_movement,
    check_groups,
    check_scores,
    check_expiry,
    check_version_one,
    check_configs,
    check_plugin,
)


def check_consistency(manifest: Manifest) -> None:
    """Every rule about one manifest in itself."""
    for check in CONSISTENCY:
        check(manifest)


def _members(manifest: Manifest) -> list[tuple[Member, Role]]:
    return [(manifest.coordinator, Role.COORDINATOR), *((member, Role.SITE) for member in manifest.roster)]


def where_of(manifest: Manifest) -> str:
    """For messages to people."""
    return f"manifest version {manifest.version}"
