"""A kit: everything that one member needs from the consortium, in one file.

    answer.json          the member's certificates, and the root
    manifest.json        the signed manifest
    initial.safetensors  the model that everybody starts from
    kit.json             the format, and the coordinator's address

A kit is an archive without compression and without any other entry, so that reading one costs no more than its size. It
needs no signature of its own: the certificates and the manifest are signed under the root, the manifest holds the
model's digest, and the root is compared over another channel (`fingerprints.phrase`). The address is a convenience: who
answers there has to own the TLS key that the manifest lists.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from lazaret.errors import ConfigError, PolicyViolation, VerificationFailed
from lazaret.files import write_atomically
from lazaret.terminal import can_ask, say
from security.identity import pki
from security.identity.enrolment import Identity
from security.identity.pki import phrase
from security.identity.request import EnrolmentAnswer, read_file
from security.identity.rules import open_manifest
from security.identity.succession import accept_newer

FORMAT: Final = "lazaret-kit/1"
MAX_KIT: Final = 4 << 30
_SMALL: Final = {"answer.json": 1 << 16, "manifest.json": 1 << 24, "kit.json": 1 << 12}
_MODEL: Final = "initial.safetensors"
_HINT: Final = "the consortium's `kit` writes it, as kits/NAME.kit; was it cut off on its way?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What is in the file, as it is: nothing is checked before `install`."""

    answer: EnrolmentAnswer
    manifest: bytes
    model: bytes
    address: str

    def to_bytes(self) -> bytes:
        """The same bytes for the same content: entries have no date."""
        about = json.dumps({"address": self.address, "format": FORMAT}, sort_keys=True).encode()
        content = {
            "answer.json": self.answer.to_bytes(),
            "manifest.json": self.manifest,
            _MODEL: self.model,
            "kit.json": about,
        }
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for name, data in content.items():
                archive.writestr(zipfile.ZipInfo(name), data)
        return packed.getvalue()

    @classmethod
    def read(cls, path: Path) -> Kit:
        """:raises ConfigError: if the file is no kit of this version."""
        try:
            if path.stat().st_size > MAX_KIT:
                raise ConfigError("is larger than a kit may be", where=str(path), hint=_HINT)
            with zipfile.ZipFile(path) as archive:
                content = {entry.filename: _content(archive, entry, path) for entry in archive.infolist()}
        except (OSError, zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
            # The last two for bytes that call an entry encrypted, of a later format, or its name something else.
            raise ConfigError(f"the kit cannot be read: {error}", where=str(path), hint=_HINT) from None
        if content.keys() != {*_SMALL, _MODEL}:
            raise ConfigError("is not a kit: other files are in it", where=str(path), hint=_HINT)
        try:
            about = json.loads(content["kit.json"])
            if about["format"] != FORMAT or not isinstance(about["address"], str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"is not a kit of the format {FORMAT}", where=str(path), hint=_HINT) from None
        answer = EnrolmentAnswer.from_bytes(content["answer.json"], f"{path}: answer.json")
        return cls(answer=answer, manifest=content["manifest.json"], model=content[_MODEL], address=about["address"])

    @property
    def root_fingerprint(self) -> str:
        return pki.fingerprint(pki.read_certificate(self.answer.root_certificate, "root certificate in the kit"))

    def install(
        self, identity: Identity, model_path: Path, *, root_fingerprint: str | None, now_ms: int
    ) -> Iterator[str]:
        """Put everything into place, after everything was checked: a kit that is wrong anywhere changes nothing.

        :raises ToolkitError: by the check that failed.
        """
        root = pki.read_certificate(self.answer.root_certificate, "root certificate in the kit")
        manifest = open_manifest(self.manifest, root, now_ms=now_ms, where="manifest in the kit")
        if all(self.answer.member != member.id for member in manifest.members):
            raise PolicyViolation(
                f"the manifest does not list {self.answer.member}",
                where="manifest in the kit",
                hint="ask the consortium to publish a manifest with this member, and for a new kit",
            )
        if identity.root_path.exists():
            accept_newer(identity.manifest(now_ms=now_ms), manifest)
        if _digest(self.model) != manifest.model.initial_file:
            raise VerificationFailed(
                "the model is not the one that the manifest names", where="model in the kit", hint=_HINT
            )
        if model_path.exists() and _digest(model_path.read_bytes()) != manifest.model.initial_file:
            raise ConfigError(
                "there is another model already", where=str(model_path), hint="move it away; the kit brings its own"
            )
        identity.install(self.answer, root_fingerprint=root_fingerprint, now_ms=now_ms)
        yield f"certificates of {self.answer.member} installed"
        write_atomically(model_path, self.model)
        accepted = identity.install_manifest(self.manifest, now_ms=now_ms)
        yield f"manifest version {accepted.version} of {accepted.federation} is in force; the model is {model_path}"


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> bytes:
    most = _SMALL.get(entry.filename, MAX_KIT)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise ConfigError(f"entry {entry.filename[:50]!r} is too large, or compressed", where=str(path), hint=_HINT)
    return archive.read(entry)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kit_in(path: Path | None) -> Kit | None:
    """The kit that a member was given; None if the file is a single answer."""
    if path is None or not read_file(path, hint=_HINT).startswith(b"PK\x03\x04"):
        return None
    return Kit.read(path)


def compared_root(kit: Kit, identity: Identity, announced: str | None) -> str | None:
    """The fingerprint that a person has confirmed: typed, or on a terminal compared with what the consortium reads out.

    None where the root is known here already, or nobody can be asked; `Kit.install` refuses a new root then.
    """
    if announced is not None or identity.root_path.exists():
        return announced
    return ask_about_root(kit.answer.federation, kit.root_fingerprint)


def ask_about_root(federation: str, fingerprint: str) -> str | None:
    """The fingerprint, once a person has compared it; None where nobody can be asked."""
    if not can_ask():
        return None
    say(f"root of {federation}: {phrase(fingerprint)}")
    click.confirm("does the consortium read out the same, over the telephone?", abort=True, err=True)
    return fingerprint
