"""The signed federation manifest: everything that a site takes as given about a federation, without asking the
coordinator.

A manifest is canonical JSON (RFC 8785) without floats: reals are decimal text, scales are exponents of two. It is
signed with the root key. This file says what a manifest holds and how its bytes are read; `rules` says which ones are
accepted. docs/consortium.md describes every field.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
)

from lazaret.errors import OTHER_VERSION, ConfigError, ManifestRejected
from security import labels
from security.crypto import encoding
from security.crypto.signing import ML_DSA_KEY_BYTES
from security.identity import pki
from security.secagg import thresholds
from security.secagg.layout import MAX_ROSTER, SCORED, Layout

FORMAT: Final = "lazaret-manifest/2"
MAX_WINDOW: Final = 16
_DECIMAL = re.compile(r"(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{0,17}[1-9])?")


def _check_decimal(text: str) -> str:
    if not _DECIMAL.fullmatch(text):
        raise ValueError("expected a decimal number as text, such as 0.001, without sign, exponent or trailing zeros")
    return text


def decimal_text(value: str | int | float | Decimal) -> str:
    """The one text of a number that is not negative: what manifests hold instead of floats."""
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    text = format(number, "f")
    return _check_decimal(text.rstrip("0").rstrip(".") if "." in text else text)


def _check_classes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that a person, or a table of labels, could take for each other are refused."""
    if any(name != " ".join(name.split()) for name in names):
        raise ValueError("a class name has spaces at an end or two in a row")
    if len({unicodedata.normalize("NFKC", name).casefold() for name in names}) != len(names):
        raise ValueError("two class names are the same or differ in case only")
    return names


def _read_layout(value: object) -> Layout:
    if isinstance(value, Layout):
        return value
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    try:
        return Layout.from_dict(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _not_null(value: object, info: ValidationInfo) -> object:
    """In a document there is one way to have no such key: it is left out."""
    if value is None and info.mode == "json":
        raise ValueError("is null; it must be left out")
    return value


Name = Annotated[str, Field(pattern=pki.NAME_PATTERN)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# A name of timm, or of another library behind its own, such as monai:densenet121.
Architecture = Annotated[str, Field(pattern=r"^([a-z]{1,16}:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
DecimalText = Annotated[str, AfterValidator(_check_decimal)]
Count = Annotated[int, Field(ge=0, le=encoding.MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=encoding.MAX_INT)]
VerifierKey = Annotated[str, Field(pattern=r"^[!-*,-~]{1,200}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44}$")]
# The raw bytes of a public ML-DSA-65 key, in documents of consortia that have turned it on.
MlDsaKey = Annotated[
    Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * ML_DSA_KEY_BYTES}}}$")] | None,
    BeforeValidator(_not_null),
    Field(exclude_if=lambda value: value is None),
]
LayoutField = Annotated[Layout, PlainValidator(_read_layout), PlainSerializer(Layout.to_dict)]
Phrase = Annotated[str, Field(pattern=r"^[ -~]{1,200}$")]
ClassNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")], ...],
    Field(min_length=2, max_length=10_000),
    AfterValidator(_check_classes),
]
HostName = Annotated[str, Field(pattern=r"^[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?$")]
Setting = bool | int | Annotated[str, Field(max_length=200)]


class Document(BaseModel):
    """Strict: no unknown key, no coercion, no change after construction."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True)


class TlsIssuer(Document):
    """A site's own authority for TLS: the certificate that issues, and the one host name that it is asked for."""

    certificate: Annotated[str, Field(max_length=8192)]
    name: HostName


class MayNameIssuer(Document):
    """A document that has no trace of an own authority where there is none: its bytes are as if there were no field."""

    tls_issuer: TlsIssuer | None = None

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        if self.tls_issuer is None:
            found.pop("tls_issuer", None)
        return found


class Member(MayNameIssuer):
    """A site or the coordinator: the one signing certificate in force, and the TLS keys it may connect with.

    A renewal with a new TLS key lists the old key too until its certificate ends, so that nobody is cut off in mid-run.
    `draw` is the commitment to its secret for the draw of groups. A site may have TLS certificates of its own authority
    (`tls_issuer`) besides those of the root, for the same keys. `log_ml_dsa` signs the heads of its log beside the
    epoch keys that `audit_root` leads to.
    """

    id: Name
    signing_certificate: Annotated[str, Field(max_length=4096)]
    tls_keys: Annotated[tuple[Hash, ...], Field(min_length=1, max_length=4)]
    draw: Hash
    audit_root: VerifierKey
    cosigner: VerifierKey
    log_ml_dsa: MlDsaKey = None

    @property
    def certificate(self) -> x509.Certificate:
        return pki.read_certificate(self.signing_certificate, f"signing certificate of {self.id}")

    @property
    def valid_ms(self) -> tuple[int, int]:
        """The first and the last millisecond at which its signing certificate is valid."""
        first, last = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return int(first.timestamp() * 1000), int(last.timestamp() * 1000)

    @property
    def signing_sha256(self) -> str:
        return pki.fingerprint(self.certificate)

    @property
    def signing_key(self) -> bytes:
        """The 32 raw bytes of the Ed25519 key."""
        key = pki.certificate_key(self.certificate)
        if not isinstance(key, Ed25519PublicKey):
            raise ManifestRejected("signing certificate does not hold an Ed25519 key", where=self.id)
        return key.public_bytes_raw()


class Model(Document):
    """What is trained. Sites hold the code; only its name and digest travel.

    `initial_state` is the hash of the tensors that travel. `initial_file` is the SHA-256 of the whole safetensors file,
    which also pins what every site's personal parts start from. `classes` are names: a label travels as its place in
    this list, so a site with another list, or another order, would mix classes silently.
    """

    architecture: Architecture
    code_digest: Hash
    initial_state: Hash
    initial_file: Hash
    classes: ClassNames


class PluginFile(Document):
    """The Python file of a method that no release has: every hospital runs exactly these bytes, or none."""

    name: Word
    sha256: Hash


class Training(Document):
    """How it is trained. With `plugin`, the method is in a file of its own, which each hospital's policy approves."""

    method: Word
    settings: dict[Word, Setting]
    config_hashes: Annotated[tuple[Hash, ...], Field(min_length=1, max_length=64)]
    rounds: Positive
    weights: Literal["samples", "bucketed", "uniform"]
    local_statistics: bool
    isolation: Literal["required", "best"]
    plugin: Annotated[
        PluginFile | None, BeforeValidator(_not_null), Field(exclude_if=lambda value: value is None)
    ] = None

    @property
    def config_hash(self) -> bytes:
        """The one training configuration of the settings; the learner has checked that the hash is theirs."""
        if len(self.config_hashes) != 1:
            raise ConfigError(
                "the manifest lists more than one training configuration",
                where="manifest [training] config_hashes",
                hint="a site trains under the settings in the manifest, so that one hash is all there can be",
            )
        return bytes.fromhex(self.config_hashes[0])


class GroupTable(Document):
    """Groups of sites whose sums are combined by a median; drawn once all sites have opened their secrets.

    :ivar secrets: of all sites that were listed then; empty before the draw, and nobody trains.
    :ivar shown: the manifest that showed their commitments, once the secrets are opened.
    """

    count: Annotated[int, Field(ge=3, le=MAX_ROSTER)]
    combine: Literal["median", "trimmed-mean"]
    secrets: dict[Name, Hash]
    shown: Hash | None


class Aggregation(Document):
    """Thresholds and numbers of the secure sum. Ring, clips, movement caps and weight cap are in the layout."""

    colluders: Count
    least_survivors: Annotated[int, Field(ge=2, le=MAX_ROSTER)]
    single_history: bool
    allow_two_sites: bool
    key_agreement: Literal["hybrid"]
    server_rule: Literal["mean"]
    movement_window: Annotated[int, Field(ge=0, le=MAX_WINDOW)]
    movement_factor: DecimalText
    groups: GroupTable | None
    layout: LayoutField


class Audit(Document):
    """How the sum is checked, and how many rounds of a log may be without a witness.

    :param vote_drop: sites vote on each model: by how much its balanced accuracy on a site's validation side may be
        below that of the model before it; None: there is no vote.
    :param witnesses: keys of witnesses that have no log of their own, such as a regulator; they never make a quorum.
    """

    mode: Literal["covered", "sampled"]
    chunks_per_site: Count
    strict: bool
    vote_drop: DecimalText | None
    max_rounds_unwitnessed: Positive
    witnesses: Annotated[tuple[VerifierKey, ...], Field(max_length=16)]


class Timing(Document):
    """Seconds."""

    train: Positive
    message: Positive
    upload: Positive
    secret_ttl: Positive


class Privacy(Document):
    """Record-level differential privacy at every site; a site may be stricter, never laxer.

    :param least_patients: a public number that no site is below; delta is at most one in so many.
    """

    epsilon: DecimalText
    delta: DecimalText
    clip: DecimalText
    noise_floor: DecimalText
    unit: Literal["patient", "lesion", "study", "image"]
    least_patients: Positive | None


class Processing(Document):
    """What the data may be processed for, on which legal basis, and by which software. Empty: any that is stated.

    Auditors compare the privacy logs with it: `data.opened` names purpose and legal basis, `agent.start` the digests of
    package and wire schema.
    """

    purposes: Annotated[tuple[Phrase, ...], Field(max_length=64)]
    legal_bases: Annotated[tuple[Phrase, ...], Field(max_length=64)]
    packages: Annotated[tuple[Hash, ...], Field(max_length=64)]
    schemas: Annotated[tuple[Hash, ...], Field(max_length=64)]


class ScoreTable(Document):
    """Scores of sites on their own validation sides, inside the sum, and the rule by which a round is the best.

    :ivar figure: what is scored: balanced accuracy, balanced AUC or mean cross-entropy.
    :ivar sites: who consents. It is public, and fixed for the whole run.
    :ivar patience: scored models that may follow the best one before the run ends early; 0: it never does.
    :ivar least_gain: by how much the mean must grow for a model to be better.
    """

    figure: Literal["bacc", "auc", "loss"]
    sites: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_ROSTER)]
    patience: Count
    least_gain: DecimalText


class Revocation(Document):
    certificate: Hash
    member: Name
    reason: Annotated[str, Field(pattern=r"^[ -~]{1,200}$")]
    at_ms: Count


class Manifest(Document):
    """One version. With `root_ml_dsa`, it and all later ones need a signature of this key too."""

    format: Literal["lazaret-manifest/2"] = FORMAT
    federation: Name
    version: Positive
    previous: Hash | None
    run: Name
    issued_at_ms: Count
    expires_at_ms: Count
    roster: Annotated[tuple[Member, ...], Field(min_length=2, max_length=MAX_ROSTER)]
    coordinator: Member
    model: Model
    training: Training
    aggregation: Aggregation
    audit: Audit
    timing: Timing
    privacy: Privacy | None
    processing: Processing
    revocations: tuple[Revocation, ...]
    scores: ScoreTable | None = None
    root_ml_dsa: MlDsaKey = None

    @classmethod
    def from_dict(cls, value: object, where: str = "manifest") -> Self:
        if isinstance(value, dict) and value.get("scores", {}) is None:
            raise ManifestRejected("scores: left out where there are none", where=where, hint="ask the consortium")
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise ManifestRejected(f"is not a manifest of the format {FORMAT}", where=where, hint=OTHER_VERSION)
        try:
            return cls.model_validate_json(encoding.dumps(value))
        except ValidationError as error:
            raise ManifestRejected(
                describe(error),
                where=where,
                hint="ask the consortium",
            ) from None

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody: the coordinator, then the sites."""
        return self.coordinator, *self.roster

    def to_dict(self) -> dict[str, Any]:
        """Without scores there is no such key: manifests that never had it keep their bytes."""
        return self.model_dump(mode="python", exclude=None if self.scores is not None else {"scores"})

    def to_bytes(self) -> bytes:
        return encoding.dumps(self.to_dict())

    @property
    def digest(self) -> bytes:
        """What round contexts bind and the next version names."""
        return hashlib.sha256(labels.MANIFEST + self.to_bytes()).digest()

    @property
    def revoked(self) -> frozenset[str]:
        return frozenset(revocation.certificate for revocation in self.revocations)

    @property
    def least_cohort(self) -> int:
        """The fewest sites of a round."""
        numbers = self.aggregation
        return thresholds.least_cohort(
            c=numbers.colluders,
            m=numbers.least_survivors,
            roster=len(self.roster) if numbers.single_history else None,
            groups=1 if numbers.groups is None else numbers.groups.count,
        )

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.roster)

    def scored(self, site: str) -> bool:
        """Whether this site adds its score to the sum."""
        listed = self.scores is not None and site in self.scores.sites
        return listed and self.aggregation.layout.has(SCORED)

    def days_left(self, now_ms: int) -> int:
        """Whole days until it expires; negative afterwards."""
        return (self.expires_at_ms - now_ms) // (24 * 3_600_000)

    def site(self, name: str) -> Member:
        for member in self.roster:
            if member.id == name:
                return member
        raise ManifestRejected(f"{name} is not in the roster", where=f"manifest version {self.version}")


def describe(error: ValidationError) -> str:
    """The first fault as `key.path: what`, without the value: it may be long, and it may be secret.

    An unknown key comes before a missing one: where one name is misspelt, both are reported.
    """
    faults = error.errors(include_input=False, include_url=False)
    fault = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in fault["loc"]) or "document"
    what = "unknown key" if fault["type"] == "extra_forbidden" else fault["msg"].lower()
    return f"{path}: {what}" + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "")










def real(text: str) -> float:
    """A decimal text as the double that training uses."""
    value = float(text)
    if not math.isfinite(value):
        raise ManifestRejected(f"{text} is not a number")
    return value
