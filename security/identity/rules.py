"""Which manifests are accepted. Each rule is a function of its own that returns or raises; none returns a verdict.

`open_manifest` is the one way from bytes to a manifest that may be trusted; which one may follow another is in
succession.py. Dates of members' certificates are not checked here but when a member acts: one hospital's lapsed
certificate must not stop the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from lazaret.errors import ConfigError, ManifestRejected, PolicyViolation
from security.dp.filter import check_delta
from security.dp.noise import SharedNoise
from security.dp.planner import PrivateSettings, Schedule
from security.identity import pki
from security.identity.manifest import Manifest, Member, SignatureSet, real, unseal
from security.identity.peers import check_issuers
from security.identity.pki import Purpose, Role, Subject
from security.identity.second_signature import (
    FETCH_AGAIN,
    check_ml_dsa,
    check_ml_dsa_signature,
    log_keys,
    signed_bytes,
)
from security.identity.second_signature import where_of as _where
from security.log.note import KeyType, VerifierKey
from security.secagg import groups, thresholds
from security.secagg.layout import SCORE_MAXIMA
from security.secagg.scores import score_slots
from security.secagg.state import MAX_MOVEMENTS

# Order of the base point of P-256 (SEC 2, section 2.4.2).
P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
CLOCK_SKEW_MS: Final = 3_600_000
LONGEST_VALIDITY_MS: Final = 366 * 24 * 3_600_000
OTHER_FEDERATION: Final = "is this the right folder, and the right consortium's manifest?"
TWO_SITES_HINT: Final = (
    "with two sites each learns the other's update: set allow_two_sites = true and a [privacy] table, or enrol a third"
)


def open_manifest(data: bytes, root: x509.Certificate, *, now_ms: int, where: str = "manifest") -> Manifest:
    """Read a manifest file and accept it only if this root signed it and it keeps every rule."""
    manifest, signatures = unseal(data, where)
    check_signatures(manifest, signatures, root)
    check_federation(manifest, root)
    check_clock(manifest, root, now_ms)
    check_certificates(manifest, root)
    for check in CONSISTENCY:
        check(manifest)
    return manifest


def sign(manifest: Manifest, key: ec.EllipticCurvePrivateKey) -> bytes:
    r, s = decode_dss_signature(key.sign(signed_bytes(manifest), ec.ECDSA(hashes.SHA256())))
    return encode_dss_signature(r, min(s, P256_ORDER - s))


def check_signatures(manifest: Manifest, signatures: SignatureSet, root: x509.Certificate) -> None:
    """All that the manifest asks for. Which ML-DSA key it must name, `check_ml_dsa_kept` knows from the one before."""
    check_signature(manifest, signatures.ecdsa, root)
    check_ml_dsa_signature(manifest, signatures.ml_dsa)


def check_signature(manifest: Manifest, signature: bytes, root: x509.Certificate) -> None:
    key = root.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ManifestRejected("the root certificate holds no ECDSA key", where="root certificate")
    try:
        check_one_form(signature)
        key.verify(signature, signed_bytes(manifest), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        raise ManifestRejected(
            "the signature is not this consortium's",
            where=_where(manifest),
            hint=FETCH_AGAIN,
        ) from None


def check_one_form(signature: bytes) -> None:
    """(r, s) and (r, n - s) verify alike: one of them is refused, so that nobody can give one manifest two files."""
    r, s = decode_dss_signature(signature)
    if s > P256_ORDER // 2 or encode_dss_signature(r, s) != signature:
        raise InvalidSignature


def check_federation(manifest: Manifest, root: x509.Certificate) -> None:
    names = root.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATION_NAME)
    if [name.value for name in names] != [manifest.federation]:
        raise ManifestRejected(
            f"belongs to another federation, {manifest.federation!r}", where=_where(manifest), hint=OTHER_FEDERATION
        )


def check_clock(manifest: Manifest, root: x509.Certificate, now_ms: int) -> None:
    pki.check_dates(root, now_ms, "root certificate")
    if manifest.issued_at_ms > now_ms + CLOCK_SKEW_MS:
        raise ManifestRejected(
            "was issued in the future, by this machine's clock", where=_where(manifest), hint="set this machine's clock"
        )


def check_certificates(manifest: Manifest, root: x509.Certificate) -> None:
    """Every signing certificate is from this root, for signing, and of the member it is listed under."""
    for member, role in _members(manifest):
        where = f"{_where(manifest)}, {role} {member.id}"
        certificate = member.certificate
        pki.check_issuer(certificate, root, where)
        pki.check_revoked(certificate, manifest.revoked, where)
        pki.check_purpose(certificate, Purpose.SIGNING, role, where)
        pki.check_subject(certificate, Subject(federation=manifest.federation, role=role, member=member.id), where)


# Rules about one manifest in itself.


def check_roster(manifest: Manifest) -> None:
    ids = manifest.sites
    if any(low >= high for low, high in itertools.pairwise(ids)) or manifest.coordinator.id in ids:
        raise ManifestRejected("member ids must be distinct and sorted", where=_where(manifest))
    if manifest.aggregation.layout.roster_size < len(ids):
        raise ManifestRejected("the layout was made for a smaller roster", where=_where(manifest))


def check_distinct_keys(manifest: Manifest) -> None:
    """One key, one member, one purpose: a key in two places could speak for two."""
    keys = [key for member in manifest.members for key in (member.signing_key, *_note_keys(member))]
    keys += [key.public for key in _observers(manifest)]
    pins = [pin for member in manifest.members for pin in member.tls_keys]
    pins += [key for key in (manifest.root_ml_dsa, *log_keys(manifest)) if key is not None]
    if len(set(keys)) != len(keys) or len(set(pins)) != len(pins):
        raise ManifestRejected("a key appears twice", where=_where(manifest))


def _observers(manifest: Manifest) -> list[VerifierKey]:
    """Witnesses without a log, each under a name of its own: with a member's name it could pass for that member."""
    found = [VerifierKey.parse(key) for key in manifest.audit.witnesses]
    taken = {f"{member.id}.{manifest.federation}/witness" for member in manifest.members}
    names = [key.name for key in found]
    ending = f".{manifest.federation}/witness"
    if any(key.kind is not KeyType.COSIGNER or not key.name.endswith(ending) for key in found):
        raise ManifestRejected(
            f"the key of a witness is no cosigner key under a name {ending!r}", where=_where(manifest)
        )
    if taken & set(names) or len(set(names)) != len(names):
        raise ManifestRejected("a witness has the name of a member or of another witness", where=_where(manifest))
    return found


def _note_keys(member: Member) -> tuple[bytes, bytes]:
    root, cosigner = VerifierKey.parse(member.audit_root), VerifierKey.parse(member.cosigner)
    if (root.kind, cosigner.kind) != (KeyType.LOG, KeyType.COSIGNER):
        raise ManifestRejected("audit root and cosigner keys are mixed up", where=member.id)
    return root.public, cosigner.public


def check_two_sites(manifest: Manifest) -> None:
    two = len(manifest.roster) == 2
    if two and not (manifest.aggregation.allow_two_sites and manifest.privacy is not None):
        raise PolicyViolation("a federation of two sites is refused", where=_where(manifest), hint=TWO_SITES_HINT)
    if manifest.aggregation.least_survivors < (2 if two else thresholds.LEAST_SURVIVORS):
        raise PolicyViolation("least_survivors must be 3 or more", where=_where(manifest))


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
            where=_where(manifest),
            hint="lower colluders or least_survivors, or enrol more sites",
        )


def check_audit(manifest: Manifest) -> None:
    if (manifest.audit.mode == "sampled") != (manifest.audit.chunks_per_site > 0):
        raise ManifestRejected("chunks_per_site belongs to audit mode sampled, and only to it", where=_where(manifest))


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
        raise PolicyViolation(f"a vote needs {missing[0]}", where=f"{_where(manifest)} [audit] vote_drop")
    if not 0 <= real(manifest.audit.vote_drop) < 1:
        raise ManifestRejected("vote_drop must be from 0 to below 1", where=_where(manifest))


def check_privacy(manifest: Manifest) -> None:
    """Delta is the chance of no protection at all (docs/spec/differential-privacy.md, section 1)."""
    if manifest.privacy is not None:
        least = manifest.privacy.least_patients
        check_delta(real(manifest.privacy.delta), least_patients=least, where=f"{_where(manifest)} [privacy] delta")
        least_noise(manifest)


def check_labels(manifest: Manifest) -> None:
    """Several labels of an image have no private form: the noise of class counts is for one class of each."""
    if manifest.privacy is not None and labels_of(manifest) == "many":
        raise PolicyViolation(
            "several labels of an image cannot be trained under differential privacy: a patient would count in more "
            "classes than the noise is for",
            where=f"{_where(manifest)} [training.settings] labels",
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
            where=f"{_where(manifest)} [aggregation] groups",
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
        raise ManifestRejected("movement_factor must be 1 or more", where=_where(manifest))
    if len(numbers.layout.state_blocks) * numbers.movement_window * 8 > MAX_MOVEMENTS:
        raise ManifestRejected("movement_window is too long for so many tensors", where=_where(manifest))


def check_expiry(manifest: Manifest) -> None:
    """A manifest holds for a while, no longer than a year: a party that gets no newer one notices that something is
    withheld from it. Whether it has expired is asked when a party acts, so that old logs can still be read."""
    if not 0 < manifest.expires_at_ms - manifest.issued_at_ms <= LONGEST_VALIDITY_MS:
        raise ManifestRejected("must expire after it was issued, and within a year", where=_where(manifest))


def check_version_one(manifest: Manifest) -> None:
    if (manifest.version == 1) != (manifest.previous is None):
        raise ManifestRejected("version 1, and only it, has no predecessor", where=_where(manifest))


def check_scores(manifest: Manifest) -> None:
    """Slots for scores exist where enough sites consent, and nowhere else: with fewer, a sum tells a site's score."""
    listed = () if manifest.scores is None else manifest.scores.sites
    if list(listed) != sorted(set(listed)):
        raise ManifestRejected("sites that consent to scores must be distinct and sorted", where=_where(manifest))
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
            where=f"{_where(manifest)} [scores]",
            hint="a run keeps its slots: if sites have left, the consortium begins a new run",
        )


def check_plugin(manifest: Manifest) -> None:
    """Noise is drawn in the process that runs the method: a file that no release has could leave it out."""
    if manifest.training.plugin is not None and manifest.privacy is not None:
        raise PolicyViolation(
            "a method of one's own has no place under differential privacy",
            where=f"{_where(manifest)} [training] plugin",
            hint="leave out plugin, or [privacy]",
        )


def check_configs(manifest: Manifest) -> None:
    hashes_ = manifest.training.config_hashes
    if list(hashes_) != sorted(set(hashes_)):
        raise ManifestRejected("config hashes must be distinct and sorted", where=_where(manifest))


def check_groups(manifest: Manifest) -> None:
    """Enough groups of enough sites, and secrets that every listed site has committed to (section 10, "Groups")."""
    table, numbers = manifest.aggregation.groups, manifest.aggregation
    if table is None:
        return
    least, count = groups.least_sites(c=numbers.colluders, m=numbers.least_survivors), 2 * numbers.colluders + 1
    if table.count < count or len(table.secrets or manifest.sites) // table.count < least:
        raise PolicyViolation(
            f"{len(manifest.roster)} sites are too few for {table.count} groups",
            where=_where(manifest),
            hint=f"with colluders = {numbers.colluders}, at least {count} groups of {least} sites are needed",
        )
    if (table.shown is None) == bool(table.secrets):
        raise ManifestRejected("names the manifest that showed commitments with secrets alone", where=_where(manifest))
    for member in manifest.roster if table.secrets else ():
        opened = bytes.fromhex(table.secrets.get(member.id, ""))
        if groups.draw_commitment(member.id, opened).hex() != member.draw:
            raise ManifestRejected(
                f"the secret of {member.id} for the draw of groups is missing, or not the one it has committed to",
                where=_where(manifest),
                hint="`site-agent draw` prints it; a new site needs a new run",
            )


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


def _members(manifest: Manifest) -> list[tuple[Member, Role]]:
    return [(manifest.coordinator, Role.COORDINATOR), *((member, Role.SITE) for member in manifest.roster)]
