"""What `backup` and `restore` of a site and of a coordinator share: whose copy it is, and what a backup becomes.

A copy is signed by its member, and restored only under a root that a person has compared with the consortium. A
checksum shows that a disk has failed, not that somebody has changed the copy and the checksum; and the configuration
in it names commands that are run and folders that are written.

A backup becomes a new member, with new keys where the lost member had its own: files or a token, an ML-DSA key for the
log, an authority of its own for TLS. The address of a token is typed again: it names a library that this process loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lazaret import archive
from lazaret.archive import ArchiveContents
from lazaret.errors import ConfigError, VerificationFailed
from lazaret.terminal import Command, emit, say
from security import labels
from security.crypto.signing import VerifyKey
from security.identity import pki
from security.identity.acceptance import unseal
from security.identity.enrolment import Identity, check_root_fingerprint
from security.identity.enrolment_files import EnrolmentRequest, ask_about_root, read_file
from security.identity.manifest import TlsIssuer
from security.identity.pki import Purpose, Role, Subject, phrase
from security.identity.token import TokenUri, named_token

FILES: Final = "files"
_HOLDS: Final = "keep the copy and ask who has changed it; nothing was restored"


# Making one.


def statement_of(identity: Identity, now_ms: int, **more: Any) -> dict[str, Any]:
    """What an archive says of this member, and how it is signed, for `archive.write` and `archive.move`.

    :param more: what this kind of party adds.
    """
    subject = pki.subject_of(identity.tls_certificate(), str(identity.tls_path))
    certificate, place = identity.signing_certificate(), identity.token()
    key, issuer = identity.signing_key(certificate), _issuer(identity, subject.member)
    about = {
        "federation": subject.federation,
        "member": subject.member,
        "certificate": pki.to_pem(certificate),
        "token": place and place.token,
        "ml_dsa": identity.ml_dsa_path.exists(),
        "tls_issuer": issuer and issuer.model_dump(),
        **more,
    }
    return {
        "party": f"{subject.role.value} {subject.member}",
        "made_ms": now_ms,
        "about": about,
        "sign": lambda data: key.sign(labels.SIGN_COPY, subject.member, data),
    }


def _issuer(identity: Identity, member: str) -> TlsIssuer | None:
    """Of the manifest in force, which was checked when it came."""
    if not identity.manifest_path.exists():
        return None
    manifest, _ = unseal(read_file(identity.manifest_path), str(identity.manifest_path))
    return next((entry.tls_issuer for entry in manifest.members if entry.id == member), None)


# Restoring it.


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """What a person says at `restore`.

    :ivar name: of the new member, for a backup; a move keeps its own.
    :ivar root_fingerprint: of the consortium's root, as it was read out; None: ask, if somebody is there.
    :ivar place: for the keys of a new member, if the lost one had them in a token: a URI, or `files`.
    """

    name: str | None = None
    root_fingerprint: str | None = None
    place: str | None = None


@contextmanager
def unpacked(source: Path, folder: Path, role: Role, options: RestoreOptions) -> Iterator[tuple[Path, ArchiveContents]]:
    """The files of a copy for the caller to complete, once it is known whose they are. See `archive.unpacked`.

    :raises CertificateUntrusted: if its root is not the one that a person knows.
    :raises VerificationFailed: if the member did not sign it.
    """
    with archive.unpacked(source, folder) as (staging, contents):
        check_maker(contents, Identity(folder=staging / "identity"), role, options.root_fingerprint, where=str(source))
        yield staging, contents


def check_maker(
    contents: ArchiveContents, identity: Identity, role: Role, announced: str | None, *, where: str
) -> None:
    """The root in the copy is the consortium's, and the copy is signed by the member that it is of. Dates do not
    matter: what a member has signed stays signed when its certificate has ended.
    """
    root = pki.read_certificate(read_file(identity.root_path), f"{where}: identity/root.pem")
    try:
        subject = Subject(federation=str(contents.about["federation"]), role=role, member=str(contents.about["member"]))
        pem, signature = str(contents.about["certificate"]), bytes.fromhex(contents.signature)
    except (KeyError, ValueError, ConfigError):
        raise VerificationFailed("the copy does not say whose it is", where=where, hint=_HOLDS) from None
    known = announced or ask_about_root(subject.federation, pki.fingerprint(root))
    if known is None:
        raise ConfigError(
            "no fingerprint of the consortium's root was given",
            where="--root-fingerprint",
            hint="ask the consortium for it over the telephone: whoever can change a copy can change the root in it",
        )
    check_root_fingerprint(root, known)
    try:
        certificate = pki.read_certificate(pem, where)
        pki.check_issuer(certificate, root, where)
        pki.check_purpose(certificate, Purpose.SIGNING, role, where)
        pki.check_subject(certificate, subject, where)
        key = pki.certificate_key(certificate, where)
        VerifyKey(key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b"").verify(
            signature, labels.SIGN_COPY, subject.member, contents.signed
        )
    except VerificationFailed as error:
        raise VerificationFailed(
            f"the copy is not signed by {role.value} {subject.member} of this federation", where=where, hint=_HOLDS
        ) from error


def new_member(
    staging: Path, contents: ArchiveContents, role: Role, options: RestoreOptions, *, hosts: Sequence[str] = ()
) -> EnrolmentRequest:
    """The request of the member that a backup becomes, with its keys; the lost member's log is kept for reading."""
    about, member = contents.about, str(contents.about["member"])
    if options.name is None or options.name == member:
        raise ConfigError(
            f"a backup of {member} needs another name",
            where="--name",
            hint=f"the old name belongs to a log that others have seen more of; take one such as {member}-2",
        )
    issuer = about["tls_issuer"]
    request = Identity(folder=staging / "identity").create(
        Subject(federation=str(about["federation"]), role=role, member=options.name),
        hosts=hosts,
        place=_place(about["token"], options.place, member),
        issuer=issuer and TlsIssuer.model_validate(issuer),
        ml_dsa=bool(about["ml_dsa"]),
    )
    earlier = staging / "state" / "earlier" / member
    earlier.mkdir(mode=0o700, parents=True)
    if (log := staging / "state" / "log").exists():
        log.rename(earlier / "log")
    return request


def _place(before: str | None, typed: str | None, member: str) -> TokenUri | None:
    if typed is None and before is not None:
        raise ConfigError(
            f"the keys of {member} were in the token {before!r}",
            where="--token",
            hint=f"give its URI, or that of another one (docs/keys.md); `--token {FILES}` for keys in files",
        )
    return None if typed == FILES else named_token(typed)


# The command.


def restore_options(command: Command) -> Command:
    """Those of both commands; they become one `RestoreOptions`."""
    text = f"Keep a new member's keys in this PKCS#11 token; or `{FILES}`, if the lost one had a token."
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
        click.option("--token", "place", help=text),
        click.option("--root-fingerprint", help="Fingerprint of the consortium's root, received over another channel."),
        click.option("--name", help="The new member's name, for a backup: the old one is never used again."),
        click.argument("folder", type=click.Path(path_type=Path, file_okay=False)),
        click.argument("source", type=click.Path(path_type=Path, dir_okay=False)),
    ):
        command = option(command)
    return command


def say_restored(
    contents: ArchiveContents,
    folder: Path,
    request: EnrolmentRequest | None,
    *,
    as_json: bool,
    moved: str,
    enrolled: str,
) -> None:
    """:param moved: what to do next after a move.
    :param enrolled: what takes the kit of a new member, and what to do then.
    """
    fingerprint = request.fingerprint if request else None
    if as_json:
        name = request.member if request else None
        emit({"folder": str(folder), "kind": contents.kind, "name": name, "fingerprint": fingerprint})
        return
    day = datetime.fromtimestamp(contents.made_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    say(f"{contents.party} is in {folder}, as it was at its `backup{'' if request else ' --move'}` of {day}")
    if request is None or fingerprint is None:
        say(moved)
        return
    if request.tls_issuer is not None:
        identity = Identity(folder=folder / "identity")
        say(f"have {identity.own_request_path} signed by your authority, as {identity.own_tls_path}")
    say(f"send {folder}/identity/request.json to the consortium, and read these words (or digits) out to them;")
    say(f"they revoke {contents.about['member']}, enrol {request.member} and send a kit for {enrolled}")
    say(phrase(fingerprint))
    click.echo(fingerprint)
