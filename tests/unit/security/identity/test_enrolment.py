"""Joining: what a request proves, what an answer must be, and how keys and certificates change in mid-run."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from lazaret import errors
from lazaret.errors import ConfigError, ManifestRejected, VerificationFailed
from security import labels
from security.consortium import authority as authorities
from security.identity import acceptance, enrolment, peers, pki
from security.identity import enrolment_files as request_file
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentAnswer, EnrolmentRequest
from security.identity.pki import Purpose, Role, grouped
from security.log.note import KeyType, NoteSigner
from tests.support.consortium_world import DAY, NOW, World, subject


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


@pytest.fixture
def request_(tmp_path: Path) -> EnrolmentRequest:
    return Identity(folder=tmp_path / "salzburg").create(subject("salzburg"))


def test_every_key_is_its_owners_alone(world: World) -> None:
    identity = world.identity("graz")
    files = sorted((identity.folder / "keys").iterdir())
    assert len(files) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((identity.folder / "keys").stat().st_mode) == 0o700
    assert len({identity.sealing_key(), identity.data_key()}) == 2
    assert identity.audit_root(subject("graz")).key.kind is KeyType.LOG
    assert identity.cosigner(subject("graz")).key.kind is KeyType.COSIGNER
    assert identity.tls_key_path().exists()
    with pytest.raises(ConfigError, match="already holds an identity"):
        identity.create(subject("graz"))


def test_a_request_survives_the_journey(request_: EnrolmentRequest, tmp_path: Path) -> None:
    read = EnrolmentRequest.read(tmp_path / "salzburg" / "request.json")
    assert read == request_
    assert read.fingerprint == request_.fingerprint
    assert len(request_.fingerprint.split()) == 16
    request_file.check_request(read)


def swap_log_key(request: EnrolmentRequest) -> EnrolmentRequest:
    theirs = NoteSigner(request_file.origin(request.subject), pki.new_signing_key())
    return request.model_copy(update={"audit_root": str(theirs.key)})


def swap_tls_key(request: EnrolmentRequest) -> EnrolmentRequest:
    return request.model_copy(update={"tls_request": pki.make_request(pki.new_tls_key(), "salzburg")})


@pytest.mark.parametrize("swap", [swap_log_key, swap_tls_key])
def test_a_request_changed_on_its_way_is_refused(request_: EnrolmentRequest, swap: Any) -> None:
    assert swap(request_).fingerprint != request_.fingerprint
    with pytest.raises(VerificationFailed):
        request_file.check_request(swap(request_))


@pytest.mark.parametrize("swap", [swap_log_key, swap_tls_key])
def test_a_request_changed_on_its_way_is_refused_twin(
    request_: EnrolmentRequest, swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_file, "check_request_signature", lambda *args: None)
    request_file.check_request(swap(request_))


def test_requests_that_do_not_hang_together_are_refused(
    request_: EnrolmentRequest, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = pki.make_request(pki.new_tls_key(), "salzburg", ["bank.example"])
    for update, error, match in [
        ({"member": "linz"}, errors.CertificateNameMismatch, "another member"),
        ({"tls_request": hosts}, errors.CertificateNameMismatch, "host names"),
        ({"signature": None}, VerificationFailed, "not signed"),
    ]:
        with pytest.raises(error, match=match):
            request_file.check_request(request_.model_copy(update=update))
    other = world.identity("graz").cosigner(subject("graz"))
    renamed = request_.model_copy(update={"cosigner": str(other.key)})
    monkeypatch.setattr(request_file, "check_request_signature", lambda *args: None)
    with pytest.raises(errors.CertificateNameMismatch, match="not named after this member"):
        request_file.check_request(renamed)


def test_a_file_that_is_no_request_is_refused(tmp_path: Path) -> None:
    for name, data in [("empty", b""), ("other", b'{"format":"lazaret-enrolment-answer/1"}'), ("cut", b'{"a":1')]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            EnrolmentRequest.read(tmp_path / name)
        assert name in str(caught.value)
    (tmp_path / "huge").write_bytes(b" " * (request_file.MAX_DOCUMENT + 1))
    with pytest.raises(ConfigError, match="larger than"):
        EnrolmentRequest.read(tmp_path / "huge")
    with pytest.raises(ConfigError, match="not found"):
        EnrolmentRequest.read(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read"):
        EnrolmentRequest.read(tmp_path)


# Answers.


def pending(world: World, member: str = "salzburg") -> tuple[Identity, EnrolmentAnswer]:
    """A member whose answer has come but is not installed."""
    request = world.request(member)
    world.authority.enroll(world.key, request, now_ms=world.now, days=30)
    return world.identity(member), EnrolmentAnswer.read(world.authority.answer_path(member))


def test_the_root_must_be_the_announced_one(world: World, tmp_path: Path) -> None:
    identity, answer = pending(world)
    with pytest.raises(ConfigError, match="no fingerprint was given"):
        identity.install(answer, root_fingerprint=None, now_ms=NOW)
    with pytest.raises(errors.CertificateUntrusted, match="announced"):
        identity.install(answer, root_fingerprint="00" * 32, now_ms=NOW)
    assert not identity.root_path.exists()
    identity.install(answer, root_fingerprint=grouped(world.root_fingerprint).upper(), now_ms=NOW)
    identity.install(answer, root_fingerprint=None, now_ms=NOW)


def test_a_fingerprint_that_is_given_is_checked_each_time(world: World) -> None:
    """Also where a root is installed, and where only a manifest comes."""
    graz, answer = world.identity("graz"), world.authority.answer_path("graz")
    world.publish()
    manifest, before = world.authority.manifest_path, graz.tls_path.read_bytes()

    def join(fingerprint: str | None, *, answer: Path | None, manifest: Path | None = None) -> list[str]:
        told = enrolment.join(graz, answer=answer, root_fingerprint=fingerprint, manifest=manifest, now_ms=world.now)
        return list(told)

    for given, offered in ((answer, None), (answer, manifest), (None, manifest)):
        with pytest.raises(errors.CertificateUntrusted, match="announced"):
            join("00" * 32, answer=given, manifest=offered)
    assert not graz.manifest_path.exists() and graz.tls_path.read_bytes() == before
    for fingerprint in (None, world.root_fingerprint):
        assert len(join(fingerprint, answer=answer, manifest=manifest)) == 2
        assert len(join(fingerprint, answer=None, manifest=manifest)) == 1


def test_an_installed_root_stays_whatever_is_announced(world: World, tmp_path: Path) -> None:
    other = World.enrolled(tmp_path / "impostor", sites=())
    graz = world.identity("graz")
    other.authority.enroll(other.key, graz.renew(subject("graz")), now_ms=NOW, days=30)
    answer = EnrolmentAnswer.read(other.authority.answer_path("graz"))
    with pytest.raises(errors.CertificateUntrusted):
        graz.install(answer, root_fingerprint=other.root_fingerprint, now_ms=NOW)


def test_what_is_missing_says_where_it_comes_from(world: World, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    graz, new = world.identity("graz"), Identity(folder=nowhere)
    graz.tls_path.unlink()

    def join(**told: Any) -> Any:
        return lambda: list(enrolment.join(graz, root_fingerprint=None, now_ms=NOW, **told))

    cases: list[tuple[Any, str]] = [
        (graz.tls_certificate, "`join` installs it from the consortium's answer"),
        (new.tls_certificate, "`init` makes keys, `join` installs"),
        (new.root, "`init` makes keys, `join` installs"),
        (join(answer=nowhere, manifest=None), "answers/NAME.json"),
        (join(answer=None, manifest=nowhere), "manifest.json, for every member"),
        (lambda: EnrolmentRequest.read(nowhere), "identity/request.json"),
    ]
    for read, hint in cases:
        with pytest.raises(ConfigError, match="file not found") as caught:
            read()
        assert hint in (caught.value.hint or "") and caught.value.exit_code == 2


def test_what_is_broken_says_what_to_do(world: World, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    for content in (b'{"a":1', b"{}", b""):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            EnrolmentAnswer.read(path)
        assert "answers/NAME.json" in (caught.value.hint or "")
        with pytest.raises(ManifestRejected) as rejected:
            world.identity("graz").install_manifest(content, now_ms=NOW)
        assert "get the manifest from the consortium again" in (rejected.value.hint or "")


def impostor(world: World, tmp_path: Path) -> tuple[Identity, EnrolmentAnswer]:
    """Somebody in the middle answers in the consortium's place, with a root of their own."""
    other = World.enrolled(tmp_path / "impostor", sites=())
    identity = world.identity("salzburg")
    request = identity.create(subject("salzburg"))
    other.authority.enroll(other.key, request, now_ms=NOW, days=30)
    return identity, EnrolmentAnswer.read(other.authority.answer_path("salzburg"))


def test_an_impostor_root_is_refused(world: World, tmp_path: Path) -> None:
    identity, answer = impostor(world, tmp_path)
    with pytest.raises(errors.CertificateUntrusted):
        identity.install(answer, root_fingerprint=world.root_fingerprint, now_ms=NOW)


def test_an_impostor_root_is_refused_twin(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, answer = impostor(world, tmp_path)
    monkeypatch.setattr(enrolment, "check_root_fingerprint", lambda root, known: None)
    identity.install(answer, root_fingerprint=world.root_fingerprint, now_ms=NOW)


def test_an_answer_for_somebody_else_is_refused(world: World) -> None:
    _, answer = pending(world)
    graz = world.identity("graz")
    before = graz.tls_path.read_bytes()
    with pytest.raises(errors.CertificateNameMismatch, match="not in this folder"):
        graz.install(answer, root_fingerprint=None, now_ms=NOW)
    assert graz.tls_path.read_bytes() == before


def test_an_answer_with_swapped_certificates_is_refused(world: World) -> None:
    identity, answer = pending(world)
    swapped = answer.model_copy(
        update={"tls_certificate": answer.signing_certificate, "signing_certificate": answer.tls_certificate}
    )
    with pytest.raises(errors.CertificatePurposeMismatch):
        identity.install(swapped, root_fingerprint=world.root_fingerprint, now_ms=NOW)


# Manifests at a member.


def test_a_member_keeps_the_newest_manifest(world: World) -> None:
    graz = world.identity("graz")
    assert graz.manifest(now_ms=NOW) is None
    first = world.publish()
    first_bytes = world.published()
    assert graz.install_manifest(first_bytes, now_ms=NOW).digest == first.digest
    second = world.publish()
    assert graz.install_manifest(world.published(), now_ms=NOW).version == 2
    with pytest.raises(ManifestRejected, match="older than version 2"):
        graz.install_manifest(first_bytes, now_ms=NOW)
    kept = graz.manifest(now_ms=NOW)
    assert kept is not None and kept.digest == second.digest
    assert graz.install_manifest(world.published(), now_ms=NOW).digest == second.digest


def test_a_member_keeps_the_newest_manifest_twin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    graz = world.identity("graz")
    world.publish()
    first_bytes = world.published()
    world.publish()
    graz.install_manifest(world.published(), now_ms=NOW)
    monkeypatch.setattr(acceptance, "check_not_older", lambda current, offered: None)
    assert graz.install_manifest(first_bytes, now_ms=NOW).version == 1


def test_a_manifest_edited_on_disk_is_noticed(world: World) -> None:
    graz = world.identity("graz")
    world.publish()
    graz.install_manifest(world.published(), now_ms=NOW)
    graz.manifest_path.write_bytes(world.published().replace(b'"colluders":1', b'"colluders":0'))
    with pytest.raises(ManifestRejected, match="signature"):
        graz.manifest(now_ms=NOW)


# Renewal in mid-run.


def test_renewal_with_the_same_keys_needs_nothing_but_the_manifest(world: World) -> None:
    before = world.publish()
    world.clock.advance(300 * DAY)
    world.authority.renew(world.key, "graz", None, now_ms=world.now, days=365)
    after = world.publish()
    graz = world.identity("graz")
    graz.install_manifest(world.published(), now_ms=world.now)
    old, new = before.site("graz"), after.site("graz")
    assert old.signing_sha256 != new.signing_sha256
    assert (old.signing_key, old.tls_keys) == (new.signing_key, new.tls_keys)
    assert graz.signing_key(new.certificate).verify_key.raw == new.signing_key
    assert acceptance.accept_newer(before, after) is after


def test_renewal_with_new_keys_overlaps(world: World) -> None:
    before = world.publish()
    graz = world.identity("graz")
    old_tls = graz.tls_certificate()
    world.clock.advance(300 * DAY)
    request = graz.renew(subject("graz"))
    world.authority.renew(world.key, "graz", request, now_ms=world.now, days=365)
    after = world.publish()
    root = world.authority.root
    # The site has not installed anything yet: it still connects with the old key and finishes the old round.
    assert peers.check_tls_peer(after, root, old_tls, now_ms=world.now) == subject("graz")
    assert graz.signing_key(before.site("graz").certificate).verify_key.raw == before.site("graz").signing_key
    world.install("graz")
    new_tls = graz.tls_certificate()
    assert pki.fingerprint(new_tls) != pki.fingerprint(old_tls)
    assert peers.check_tls_peer(after, root, new_tls, now_ms=world.now) == subject("graz")
    assert graz.signing_key(after.site("graz").certificate).verify_key.raw == after.site("graz").signing_key
    assert len(after.site("graz").tls_keys) == 2
    # Once the old certificate has run out, the next manifest no longer lists its key.
    world.clock.advance(100 * DAY)
    for other in ("hub", "linz", "vienna"):
        world.authority.renew(world.key, other, None, now_ms=world.now, days=365)
    last = world.publish()
    assert len(last.site("graz").tls_keys) == 1
    with pytest.raises(errors.CertificateExpired):
        peers.check_tls_peer(last, root, old_tls, now_ms=world.now)


def thief(world: World, tmp_path: Path) -> EnrolmentRequest:
    """Somebody without the site's keys asks for a renewal in its name."""
    return Identity(folder=tmp_path / "thief").create(subject("graz"))


def test_a_renewal_needs_the_old_keys_signature(world: World, tmp_path: Path) -> None:
    request = thief(world, tmp_path)
    forged = request.model_copy(update={"renewal": request.signature})
    for attempt in (request, forged):
        with pytest.raises(VerificationFailed, match="key"):
            world.authority.renew(world.key, "graz", attempt, now_ms=NOW, days=30)
    world.authority.renew(world.key, "graz", request, compared=True, now_ms=NOW, days=30)


def test_a_renewal_needs_the_old_keys_signature_twin(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorities, "check_renewal", lambda request, record: None)
    record = world.authority.renew(world.key, "graz", thief(world, tmp_path), now_ms=NOW, days=30)
    assert record.unrevoked(Purpose.SIGNING)[-1].parsed.public_key() != world.identity("graz").root().public_key()


def test_a_renewal_signature_is_no_enrolment_signature() -> None:
    assert labels.SIGN_RENEWAL != labels.SIGN_ENROLMENT


def test_a_coordinator_keeps_its_hosts(world: World) -> None:
    hub = world.identity("hub")
    request = hub.renew(subject("hub", Role.COORDINATOR))
    record = world.authority.renew(world.key, "hub", request, now_ms=NOW, days=30)
    assert record.hosts == ("localhost", "127.0.0.1")
