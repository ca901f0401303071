"""Copies of members: whose one is is checked before anything of it counts, and a new member has keys like the old."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator import backup as coordinator_backup
from lazaret import archive
from lazaret.errors import CertificateUntrusted, ConfigError, ToolkitError, VerificationFailed
from security import labels
from security.identity import enrolment_files, member_copies
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentRequest
from security.identity.member_copies import FILES, RestoreOptions
from security.identity.pki import phrase
from site_agent import backup
from site_agent.config import SiteConfig
from tests.support.consortium_world import NOW, World
from tests.support.own_authority import OwnAuthority
from tests.support.site_world import write_config
from tests.support.soft_token import needs_softhsm, soft_tokens

ALERT = b'[alerts]\ncommand = ["/tmp/evil"]'


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World.make(tmp_path / "world")
    made.publish()
    return made


def site(world: World, name: str = "graz") -> SiteConfig:
    """A site's folder, as it is after `join`."""
    home = world.folder.parent / name
    path = write_config(home, Path("identity"), Path("initial.safetensors"))
    world.identity(name).install_manifest(world.published(), now_ms=world.now)
    (world.folder / name).rename(home / "identity")
    (home / "initial.safetensors").write_bytes(b"a model")
    (home / "state").mkdir()
    return SiteConfig.read(path)


def backed_up(config: SiteConfig) -> Path:
    target = config.path.parent.parent / "graz.backup"
    backup.back_up(config, target, now_ms=NOW)
    return target


def restored(world: World, source: Path, **options: str | None) -> EnrolmentRequest:
    said = {"name": "graz-2", "root_fingerprint": world.root_fingerprint} | options
    _, request = backup.restore_site(source, source.parent / "new", RestoreOptions(**said))
    assert request is not None
    return request


def rewritten(source: Path, change: Callable[[dict[str, bytes]], None], sign: Any = None) -> Path:
    """The same archive with other files, and every checksum as it has to be: what somebody with write access makes."""
    contents, files = archive.read_contents(source), dict[str, bytes]()
    with tarfile.open(source) as packed:
        for member in packed.getmembers()[:-1]:
            found = packed.extractfile(member)
            assert found is not None
            files[member.name] = found.read()
    change(files)
    folder = source.parent / "unpacked"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    target = source.with_name("changed.backup")
    keep = bytes.fromhex(contents.signature)
    archive.write(
        target,
        [(name, folder / name) for name in files],
        kind=contents.kind,
        party=contents.party,
        made_ms=contents.made_ms,
        about=contents.about,
        sign=sign or (lambda _: keep),
    )
    return target


def refused(error: type[ToolkitError], match: str, act: Callable[[], object], source: Path) -> None:
    before = sorted(path.name for path in source.parent.iterdir())
    with pytest.raises(error, match=match):
        act()
    assert sorted(path.name for path in source.parent.iterdir()) == before, "something was left behind"


# Whose it is.


def test_another_root_is_refused(world: World, tmp_path: Path) -> None:
    """Somebody puts a federation of his own into the copy: root, manifest and all."""
    evil = World.enrolled(tmp_path / "evil")
    evil.publish()
    theirs = backed_up(site(evil))
    refused(CertificateUntrusted, "not the one that was announced", lambda: restored(world, theirs), theirs)
    assert restored(evil, theirs).member == "graz-2"  # the twin: who confirms that root gets that federation


def test_the_words_of_the_root_count_like_its_digits(world: World) -> None:
    source = backed_up(site(world))
    assert restored(world, source, root_fingerprint=phrase(world.root_fingerprint)).member == "graz-2"


def test_without_a_fingerprint_a_person_is_asked_or_nothing_is_restored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = backed_up(site(world))
    refused(ConfigError, "no fingerprint", lambda: restored(world, source, root_fingerprint=None), source)
    asked: list[str] = []
    monkeypatch.setattr(enrolment_files, "can_ask", lambda: True)
    monkeypatch.setattr(enrolment_files, "say", asked.append)
    monkeypatch.setattr(enrolment_files.click, "confirm", lambda *_, **__: True)
    restored(world, source, root_fingerprint=None)
    assert asked == [f"root of lesions: {phrase(world.root_fingerprint)}"]


def test_a_changed_configuration_is_refused_although_every_checksum_fits(world: World) -> None:
    """It names a command that the agent would run."""
    source = backed_up(site(world))

    def change(files: dict[str, bytes]) -> None:
        files["site.toml"] = files["site.toml"].replace(b"[alerts]", ALERT)

    evil = rewritten(source, change)
    refused(VerificationFailed, "not signed by site graz", lambda: restored(world, evil), evil)


def test_a_changed_configuration_is_taken_twin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_copies, "check_maker", lambda *_, **__: None)
    source = backed_up(site(world))

    def change(files: dict[str, bytes]) -> None:
        files["site.toml"] = files["site.toml"].replace(b"[alerts]", ALERT)

    restored(world, rewritten(source, change))
    assert SiteConfig.read(source.parent / "new" / "site.toml").alerts.command == ("/tmp/evil",)


def test_another_members_signature_is_not_this_ones(world: World) -> None:
    """Linz signs a copy in which it calls itself Graz, and shows its own certificate, or that of Graz."""
    linz = world.identity("linz")
    key = linz.signing_key(linz.signing_certificate())
    source = backed_up(site(world))
    evil = rewritten(source, lambda _: None, lambda data: key.sign(labels.SIGN_COPY, "graz", data))
    refused(VerificationFailed, "not signed by site graz", lambda: restored(world, evil), evil)
    other = source.with_name("other.backup")
    about = dict(archive.read_contents(source).about) | {"certificate": linz.signing_path.read_text()}
    archive.write(
        other,
        [("site.toml", source.parent / "graz" / "site.toml"), ("identity/root.pem", linz.root_path)],
        kind="backup",
        party="site graz",
        made_ms=NOW,
        about=about,
        sign=lambda data: key.sign(labels.SIGN_COPY, "graz", data),
    )
    refused(VerificationFailed, "not signed by site graz", lambda: restored(world, other), other)


def planted(world: World, tmp_path: Path) -> Path:
    """Another authority has certified a Graz of its own; the copy shows that certificate, and the right root."""
    evil = World.enrolled(tmp_path / "evil")
    theirs = evil.identity("graz")
    key, config = theirs.signing_key(theirs.signing_certificate()), site(world)
    source = backed_up(config)
    about = dict(archive.read_contents(source).about) | {"certificate": theirs.signing_path.read_text()}
    target = source.with_name("planted.backup")
    archive.write(
        target,
        [("site.toml", config.path), ("identity/root.pem", config.identity / "root.pem")],
        kind="backup",
        party="site graz",
        made_ms=NOW,
        about=about,
        sign=lambda data: key.sign(labels.SIGN_COPY, "graz", data),
    )
    return target


def test_a_certificate_of_another_authority_is_refused(world: World, tmp_path: Path) -> None:
    evil = planted(world, tmp_path)
    refused(VerificationFailed, "not signed by site graz", lambda: restored(world, evil), evil)


def test_a_certificate_of_another_authority_is_taken_twin(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_copies.pki, "check_issuer", lambda *_: None)
    assert restored(world, planted(world, tmp_path)).member == "graz-2"


@pytest.mark.parametrize("about", [{}, {"federation": "x y", "member": "graz", "certificate": ""}])
def test_a_copy_that_does_not_say_whose_it_is(world: World, about: dict[str, str]) -> None:
    config = site(world)
    source = config.path.parent.parent / "odd.backup"
    root = config.identity / "root.pem"
    archive.write(source, [("identity/root.pem", root)], kind="backup", party="", made_ms=1, about=about)
    refused(VerificationFailed, "does not say whose", lambda: restored(world, source), source)


def test_a_site_is_not_restored_as_a_coordinator(world: World) -> None:
    source = backed_up(site(world))
    options = RestoreOptions(name="hub-2", root_fingerprint=world.root_fingerprint)

    def act() -> object:
        return coordinator_backup.restore_coordinator(source, source.parent / "new", options)

    refused(VerificationFailed, "not signed by coordinator graz", act, source)


def test_an_old_signature_stays_its_makers_word(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study is over, its certificates have ended, and a disk is lost."""
    config = site(world)
    late = NOW + 3 * 365 * 86_400_000
    target = config.path.parent.parent / "late.backup"
    backup.back_up(config, target, now_ms=late)
    assert restored(world, target).member == "graz-2"


# What a new member takes over.


def test_ml_dsa_and_the_own_authority_are_taken_over(world: World) -> None:
    authority = OwnAuthority()
    graz = next(record for record in world.authority.members() if record.member == "graz")
    request = world.identity("graz").renew(graz.subject, issuer=authority.listed(), ml_dsa=True)
    world.authority.renew(world.key, "graz", request, now_ms=world.now, days=365)
    world.install("graz")
    world.publish()
    source = backed_up(site(world))
    new = restored(world, source)
    assert new.tls_issuer == authority.listed() and new.log_ml_dsa is not None
    folder = Identity(folder=source.parent / "new" / "identity")
    assert folder.own_request_path.exists() and folder.ml_dsa_path.exists()
    assert new.log_ml_dsa != request.log_ml_dsa, "a key of its own"


def test_without_them_there_are_none(world: World) -> None:
    request = restored(world, backed_up(site(world)))
    assert request.tls_issuer is None and request.log_ml_dsa is None


@needs_softhsm
def test_keys_that_were_in_a_token_are_made_in_the_one_that_is_named(world: World) -> None:
    uri = soft_tokens().uri()
    graz = next(record for record in world.authority.members() if record.member == "graz")
    request = world.identity("graz").renew(graz.subject, place=member_copies.named_token(uri))
    world.authority.renew(world.key, "graz", request, now_ms=world.now, days=365)
    world.install("graz")
    world.publish()
    source = backed_up(site(world))
    assert "softhsm" not in json.dumps(dict(archive.read_contents(source).about)), "no library is named by a copy"
    refused(ConfigError, "were in the token 'hospital'", lambda: restored(world, source), source)
    refused(ConfigError, "no PKCS#11 module", lambda: restored(world, source, place=NO_MODULE), source)
    restored(world, source, place=uri)
    keys = source.parent / "new" / "identity" / "keys"
    assert {path.name.split("-")[0] for path in keys.iterdir() if b"pkcs11:" in path.read_bytes()} == {"tls", "signing"}


NO_MODULE = "pkcs11:token=hospital?module-path=/nowhere/lib.so"


@needs_softhsm
def test_or_in_files_if_a_person_says_so(world: World) -> None:
    graz = next(record for record in world.authority.members() if record.member == "graz")
    place = member_copies.named_token(soft_tokens().uri())
    request = world.identity("graz").renew(graz.subject, place=place)
    world.authority.renew(world.key, "graz", request, now_ms=world.now, days=365)
    world.install("graz")
    world.publish()
    source = backed_up(site(world))
    restored(world, source, place=FILES)
    keys = source.parent / "new" / "identity" / "keys"
    assert not any(b"pkcs11:" in path.read_bytes() for path in keys.iterdir())


def test_the_command_says_when_the_copy_was_made_and_what_comes_next(world: World) -> None:
    source = backed_up(site(world))
    words = [str(source), str(source.parent / "new"), "--name", "graz-2"]
    done = CliRunner().invoke(backup.restore, [*words, "--root-fingerprint", world.root_fingerprint])
    assert done.exit_code == 0, done.output
    for part in ("of 2027-01-15 08:00 UTC", "they revoke graz, enrol graz-2", "`site-agent join`"):
        assert part in done.output
