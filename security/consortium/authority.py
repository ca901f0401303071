"""The consortium's own folder: the root, the members, and every manifest it has published.

Meant for a machine without a network. Operations write whole files atomically; nothing that was published is ever
changed, only followed by a higher version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from lazaret import files
from lazaret.errors import ConfigError, PolicyViolation
from security.consortium import drafting
from security.consortium.plan import FederationPlan
from security.consortium.records import (
    IssuedCertificate,
    MemberRecord,
    check_all_have_ml_dsa,
    check_renewal,
    check_same_log,
    check_same_ml_dsa,
)
from security.identity import keystore, pki
from security.identity.acceptance import accept_newer, open_manifest, public_pem, seal, sign, sign_ml_dsa, unseal
from security.identity.enrolment_files import EnrolmentAnswer, EnrolmentRequest, Kit, check_request, read_file
from security.identity.manifest import Manifest, Revocation
from security.identity.pinned_files import InitialModel, read_plugin
from security.identity.pki import Purpose, Role
from security.identity.tls_probe import names_of
from security.identity.token import TokenUri, make_tls_key
from security.rng import SystemRandomness

USUAL_PORT: Final = 7443

# Certificates of a roster end so many days apart, within so many days before the longest validity.
SPREAD_STEP: Final = 5
SPREAD_DAYS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """One federation's certificate authority and manifest signer."""

    folder: Path
    root: x509.Certificate

    @property
    def federation(self) -> str:
        name = self.root.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATION_NAME)[0]
        return str(name.value)

    @property
    def plan_path(self) -> Path:
        return self.folder / "federation.toml"

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    def answer_path(self, member: str) -> Path:
        return self.folder / "answers" / f"{member}.json"

    def _member_path(self, member: str) -> Path:
        return self.folder / "members" / f"{pki.check_name(member, 'member id')}.json"

    @classmethod
    def create(
        cls,
        folder: Path,
        federation: str,
        *,
        passphrase: bytes | None,
        place: TokenUri | None = None,
        now_ms: int,
        days: int = pki.ROOT_DAYS,
    ) -> Authority:
        """:param place: the token in which the root key is made; its PIN is then what the passphrase is for a file."""
        if (folder / "root.key").exists() or (folder / "root.pem").exists():
            raise ConfigError("this folder already holds a root key", where=str(folder), hint="choose another folder")
        key = pki.new_tls_key() if place is None else make_tls_key(place, f"{federation} root", SystemRandomness())
        root = pki.make_root(key, federation, now_ms=now_ms, days=days)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keystore.save_private_key(folder / "root.key", key, passphrase=passphrase)
        files.write_atomically(folder / "root.pem", pki.to_pem(root).encode())
        return cls(folder=folder, root=root)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        path = folder / "root.pem"
        if not path.exists():
            raise ConfigError("no consortium here", where=str(folder), hint="run `consortium init`, or pass --dir")
        return cls(folder=folder, root=pki.read_certificate(read_file(path), str(path)))

    def unlock(self, passphrase: bytes | None) -> ec.EllipticCurvePrivateKey:
        key = keystore.load_tls_key(self.folder / "root.key", passphrase=passphrase)
        if key.public_key() != self.root.public_key():
            raise ConfigError("root key and root certificate do not belong together", where=str(self.folder))
        return key

    def unlock_ml_dsa(self, passphrase: bytes | None) -> MLDSA65PrivateKey:
        """The root's second key, made the first time."""
        path = self.folder / "root-ml-dsa.key"
        if not path.exists():
            keystore.save_private_key(path, MLDSA65PrivateKey.generate(), passphrase=passphrase)
        return keystore.load_ml_dsa_key(path, passphrase=passphrase)

    def members(self) -> Iterator[MemberRecord]:
        for path in sorted((self.folder / "members").glob("*.json")):
            yield MemberRecord.read(path)

    def member(self, name: str) -> MemberRecord:
        path = self._member_path(name)
        if not path.exists():
            known = ", ".join(entry.member for entry in self.members()) or "nobody yet"
            raise ConfigError(f"{name} is not enrolled", where=str(self.folder), hint=f"enrolled: {known}")
        return MemberRecord.read(path)

    def enroll(
        self, key: ec.EllipticCurvePrivateKey, request: EnrolmentRequest, *, now_ms: int, days: int
    ) -> MemberRecord:
        """Certificates for a new member, or for one that was revoked and comes back with new keys and its old log."""
        self._check_addressee(request)
        path = self._member_path(request.member)
        known = MemberRecord.read(path) if path.exists() else None
        if known is not None and known.active:
            raise PolicyViolation(
                f"{request.member} is enrolled already",
                where=str(path),
                hint="use `consortium renew`, or revoke it first",
            )
        if known is not None:
            check_same_log(request, known)
            check_same_ml_dsa(request, known)
        tls, signing = check_request(request)
        if request.role == Role.COORDINATOR.value and not tls.hosts:
            raise ConfigError("a coordinator's request must name the hosts it is reached at", where=request.member)
        self._refuse_known_keys(request.member, tls.public_key, signing.public_key)
        record = MemberRecord(
            federation=self.federation,
            role=request.role,
            member=request.member,
            hosts=tls.hosts,
            audit_root=request.audit_root,
            cosigner=request.cosigner,
            draw=request.draw,
            tls_issuer=request.tls_issuer,
            log_ml_dsa=request.log_ml_dsa or (known.log_ml_dsa if known else None),
            issued=known.issued if known else (),
        )
        return self._issue(key, record, tls.public_key, signing.public_key, now_ms=now_ms, days=days)

    def renew(
        self,
        key: ec.EllipticCurvePrivateKey,
        member: str,
        request: EnrolmentRequest | None,
        *,
        compared: bool = False,
        now_ms: int,
        days: int,
    ) -> MemberRecord:
        """New certificates for the keys in force, or for the new keys of a request.

        A request must carry the signature of the key it replaces, unless somebody has compared its fingerprint.
        """
        record = self.member(member)
        if not record.active:
            raise PolicyViolation(f"{member} is revoked", where="renewal", hint="enrol it again with new keys")
        if request is None:
            keys = [pki.certificate_key(record.unrevoked(purpose)[-1].parsed) for purpose in Purpose]
            return self._issue(key, record, keys[0], keys[1], now_ms=now_ms, days=days)
        self._check_addressee(request)
        tls, signing = check_request(request)
        if (request.member, request.role) != (record.member, record.role):
            raise ConfigError(f"the request is of {request.role} {request.member}", where="renewal")
        if not compared:
            check_renewal(request, record)
        self._refuse_known_keys(member, tls.public_key, signing.public_key)
        # The log keys stay what they are: a log's root key is the name under which its history is known.
        check_same_ml_dsa(request, record)
        update = {
            "hosts": tls.hosts or record.hosts,
            "tls_issuer": request.tls_issuer or record.tls_issuer,
            "log_ml_dsa": request.log_ml_dsa or record.log_ml_dsa,
        }
        record = record.model_copy(update=update)
        return self._issue(key, record, tls.public_key, signing.public_key, now_ms=now_ms, days=days)

    def spread_days(self, now_ms: int, *, beside: str | None = None) -> int:
        """How long the next certificate is valid: up to `MEMBER_DAYS`, but not until a day near the end of another's.

        When all end on one day, a renewal that is forgotten, or late by a day, stops every hospital at once.

        :param beside: the member it is for, whose own certificates do not count.
        """
        others = [record for record in self.members() if record.active and record.member != beside]
        ends = {pki.days_left(record.unrevoked(Purpose.SIGNING)[-1].parsed, now_ms) for record in others}
        for near in range(SPREAD_STEP - 1, -1, -1):
            for days in range(pki.MEMBER_DAYS, pki.MEMBER_DAYS - SPREAD_DAYS, -1):
                if not any(abs(end - days) <= near for end in ends):
                    return days
        return pki.MEMBER_DAYS

    def _check_addressee(self, request: EnrolmentRequest) -> None:
        if request.federation != self.federation:
            raise ConfigError(f"the request is for federation {request.federation!r}", where=request.member)

    def _refuse_known_keys(self, member: str, *keys: pki.PublicKey) -> None:
        """A key that was certified once, for anybody, is not certified for a second purpose or member."""
        fresh = {pki.key_fingerprint(key) for key in keys}
        for record in self.members():
            if fresh & {pki.key_fingerprint(pki.certificate_key(entry.parsed)) for entry in record.issued}:
                raise PolicyViolation("the request reuses a key that was certified before", where=member)

    def _issue(
        self,
        key: ec.EllipticCurvePrivateKey,
        record: MemberRecord,
        tls: pki.PublicKey,
        signing: pki.PublicKey,
        *,
        now_ms: int,
        days: int,
    ) -> MemberRecord:
        new = []
        for purpose, public, hosts in ((Purpose.TLS, tls, record.hosts), (Purpose.SIGNING, signing, ())):
            certificate = pki.issue(
                key, self.root, record.subject, purpose, public, hosts=hosts, now_ms=now_ms, days=days
            )
            new.append(IssuedCertificate(purpose=purpose.value, certificate=pki.to_pem(certificate)))
        record = record.model_copy(update={"issued": (*record.issued, *new)})
        answer = EnrolmentAnswer(
            federation=self.federation,
            role=record.role,
            member=record.member,
            root_certificate=pki.to_pem(self.root),
            tls_certificate=new[0].certificate,
            signing_certificate=new[1].certificate,
        )
        files.write_atomically(self._member_path(record.member), record.to_bytes())
        files.write_atomically(self.answer_path(record.member), answer.to_bytes())
        return record

    def revoke(self, member: str, reason: str, *, certificate: str | None = None, now_ms: int) -> MemberRecord:
        """Take back everything a member holds, or what it holds for the key of one certificate.

        By key, because a certificate is taken back when its key is lost, and a renewal may have certified the same key
        again. Takes effect with the next manifest.
        """
        record = self.member(member)
        keys = {
            pki.key_fingerprint(pki.certificate_key(entry.parsed))
            for entry in record.issued
            if certificate in (None, pki.fingerprint(entry.parsed))
        }
        chosen = {
            entry.certificate
            for entry in record.issued
            if entry.revoked_at_ms is None and pki.key_fingerprint(pki.certificate_key(entry.parsed)) in keys
        }
        if not chosen:
            what = "has no valid certificate" if certificate is None else "holds no such certificate"
            raise ConfigError(f"{member} {what}", where="revoke", hint="`consortium show` lists them")
        update = {"revoked_at_ms": now_ms, "reason": reason}
        issued = [entry.model_copy(update=update) if entry.certificate in chosen else entry for entry in record.issued]
        record = record.model_copy(update={"issued": tuple(issued)})
        files.write_atomically(self._member_path(member), record.to_bytes())
        return record

    def revocations(self, now_ms: int) -> list[Revocation]:
        """Every revoked certificate that has not expired: those that have are refused for that."""
        return [
            Revocation(
                certificate=pki.fingerprint(entry.parsed),
                member=record.member,
                reason=entry.reason or "unspecified",
                at_ms=entry.revoked_at_ms,
            )
            for record in self.members()
            for entry in record.issued
            if entry.revoked_at_ms is not None and pki.days_left(entry.parsed, now_ms) >= 0
        ]

    def latest(self, *, now_ms: int) -> Manifest | None:
        if not self.manifest_path.exists():
            return None
        return open_manifest(read_file(self.manifest_path), self.root, now_ms=now_ms, where=str(self.manifest_path))

    def publish(
        self,
        key: ec.EllipticCurvePrivateKey,
        plan: FederationPlan,
        *,
        ml_dsa: MLDSA65PrivateKey | None = None,
        now_ms: int,
    ) -> Manifest:
        """Sign the next manifest, read it back the way a site will, and only then write it.

        :param ml_dsa: the root's second key, with which a plan with `ml_dsa = true` is signed too.
        """
        previous = self._finish_interrupted(self.latest(now_ms=now_ms), now_ms)
        active = [record for record in self.members() if record.active]
        coordinators = [record for record in active if record.role == "coordinator"]
        if len(coordinators) != 1:
            raise PolicyViolation(
                f"{len(coordinators)} coordinators are enrolled, one is needed",
                where="roster",
                hint="enrol or revoke one",
            )
        self._refuse_old_run(plan.run, previous)
        twice = ml_dsa is not None
        if twice:
            check_all_have_ml_dsa(active)
        manifest = drafting.build(
            plan,
            InitialModel.read(self.folder / plan.model.initial),
            federation=self.federation,
            previous=previous,
            roster=[record.listing(now_ms, ml_dsa=twice) for record in active if record.role == "site"],
            coordinator=coordinators[0].listing(now_ms, ml_dsa=twice),
            revocations=self.revocations(now_ms),
            root_ml_dsa=ml_dsa.public_key().public_bytes_raw().hex() if ml_dsa is not None else None,
            plugin=None if plan.training.plugin is None else read_plugin(self.folder / plan.training.plugin),
            now_ms=now_ms,
        )
        data = seal(manifest, sign(manifest, key), b"" if ml_dsa is None else sign_ml_dsa(manifest, ml_dsa))
        accept_newer(previous, open_manifest(data, self.root, now_ms=now_ms, where="new manifest"))
        files.write_atomically(self._history_path(manifest.version), data, replace=False)
        files.write_atomically(self.manifest_path, data)
        if ml_dsa is not None:
            # For auditors, who take no manifest without a signature of this key once they have it.
            both = pki.to_pem(self.root).encode() + public_pem(ml_dsa.public_key())
            files.write_atomically(self.folder / "root.pem", both)
        return manifest

    def write_kits(self, names: Sequence[str], address: str | None, *, now_ms: int) -> Iterator[tuple[str, Path]]:
        """One file for each member, with all that it needs of the newest manifest.

        :param names: whose; everybody's in the manifest if empty.
        :param address: the coordinator's host:port; by default the first name in its certificate and the usual port.
        :raises ConfigError: before the first file is written.
        """
        manifest = self.latest(now_ms=now_ms)
        if manifest is None:
            raise ConfigError("there is no manifest yet", where=str(self.manifest_path), hint="consortium publish")
        listed = [member.id for member in manifest.members]
        if missing := sorted(set(names) - set(listed)):
            raise ConfigError(
                f"not in the manifest: {', '.join(missing)}", where="roster", hint="enroll them, then publish again"
            )
        model = self.folder / FederationPlan.read(self.plan_path).model.initial
        if InitialModel.read(model).digest != manifest.model.initial_file:
            raise ConfigError(
                "is not the model that the newest manifest names", where=str(model), hint="publish, or put it back"
            )
        certificate = pki.read_certificate(self._answer(manifest.coordinator.id).tls_certificate, "coordinator")
        place = address or f"{names_of(certificate)[0]}:{USUAL_PORT}"
        answers = {name: self._answer(name) for name in names or listed}
        signed, weights = read_file(self.manifest_path), model.read_bytes()
        for name, answer in answers.items():
            kit = Kit(answer=answer, manifest=signed, model=weights, address=place)
            path = self.folder / "kits" / f"{name}.kit"
            files.write_atomically(path, kit.to_bytes(), mode=0o600)
            yield name, path

    def _answer(self, member: str) -> EnrolmentAnswer:
        return EnrolmentAnswer.read(self.answer_path(member))

    def _history_path(self, version: int) -> Path:
        return self.folder / "history" / f"manifest-{version:06}.json"

    def _finish_interrupted(self, latest: Manifest | None, now_ms: int) -> Manifest | None:
        """A version that was signed but not yet published when the machine stopped: its number is not given twice."""
        path = self._history_path(latest.version + 1 if latest else 1)
        if not path.exists():
            return latest
        data = read_file(path)
        manifest = open_manifest(data, self.root, now_ms=now_ms, where=str(path))
        files.write_atomically(self.manifest_path, data)
        return manifest

    def _refuse_old_run(self, run: str, previous: Manifest | None) -> None:
        """A run that was left is over: two histories of one run would let their difference be taken."""
        for path in sorted((self.folder / "history").glob("manifest-*.json")):
            content, _ = unseal(read_file(path), str(path))
            if previous is not None and content.run == run != previous.run:
                hint = "choose a new run id"
                raise PolicyViolation(f"run {run!r} was ended by a later one", where=str(path), hint=hint)
