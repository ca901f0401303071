"""Keys in a PKCS#11 token: made there, never read out of it, and one clear line for all that can be wrong."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from lazaret.errors import CertificateNameMismatch, ConfigError, KeyUnavailable, ToolkitError, VerificationFailed
from security.clock import ManualClock
from security.consortium.authority import Authority
from security.crypto.signing import SigningKey
from security.identity import enrolment, keystore, pki, token
from security.identity.acceptance import open_manifest
from security.identity.pki import Role
from security.identity.token import PIN_VARIABLE, TokenSigningKey, TokenTlsKey, TokenUri, pin_files
from security.rng import SystemRandomness
from tests.support.consortium_world import NOW, PLAN, World, subject, write_initial_model
from tests.support.soft_token import PIN, SoftTokens, needs_softhsm, soft_tokens

MODULE_PATH = "/usr/lib/softhsm/libsofthsm2.so"
URI = f"pkcs11:token=my%20token;object=a%3Bkey;id=%01%ff?module-path={MODULE_PATH}&pin-source=file:/etc/pin"


@pytest.fixture(scope="module")
def tokens() -> SoftTokens:
    return soft_tokens()


@pytest.fixture(scope="module")
def hospital(tokens: SoftTokens) -> TokenUri:
    return TokenUri.parse(tokens.uri(), "test")


# Addresses.


def test_an_address_is_read_and_written() -> None:
    uri = TokenUri.parse(URI, "here")
    assert (uri.token, uri.object, uri.id) == ("my token", "a;key", b"\x01\xff")
    assert (uri.module, uri.pin_source) == (Path(MODULE_PATH), Path("/etc/pin"))
    assert TokenUri.parse(str(uri), "here") == uri and str(uri) == URI


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file:/key", "not a pkcs11: URI"),
        ("pkcs11:token=a", "module-path are needed"),
        ("pkcs11:object=a?module-path=/m.so", "token and module-path"),
        ("pkcs11:token=a?module-path=m.so", "not an absolute path"),
        ("pkcs11:token=a?module-path=/m.so&pin-source=pin", "not an absolute path"),
        ("pkcs11:token=a;token=b?module-path=/m.so", "token is not expected"),
        ("pkcs11:token=?module-path=/m.so", "token is not expected"),
        ("pkcs11:token=a;slot-id=1?module-path=/m.so", "slot-id is not expected"),
        ("pkcs11:token=%ff?module-path=/m.so", "not UTF-8"),
        ("pkcs11:token=a?module-path=/m.so&pin-value=13579", "has a PIN in it"),
        ("pkcs11:token=a?module-path=/m.so&13579", "something is not expected"),
        ("pkcs11:token=" + "a" * 5000, "not a pkcs11: URI"),
    ],
)
def test_an_address_that_is_wrong_is_refused_and_no_pin_is_repeated(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        TokenUri.parse(text, "--token")
    assert "13579" not in f"{caught.value} {caught.value.hint}"


# Keys.


@needs_softhsm
def test_a_key_is_made_in_the_token_and_its_file_holds_the_address(tmp_path: Path, hospital: TokenUri) -> None:
    key = token.make_signing_key(hospital, "lesions graz signing", SystemRandomness())
    path = tmp_path / "signing.key"
    keystore.save_private_key(path, key)
    assert path.read_text() == f"{key.uri}\n" and path.stat().st_mode & 0o777 == 0o600
    loaded = SigningKey(keystore.load_ed25519_key(path))
    signature = loaded.sign(b"label\0", "graz", b"field")
    SigningKey(key).verify_key.verify(signature, b"label\0", "graz", b"field")
    with pytest.raises(VerificationFailed):
        loaded.verify_key.verify(signature, b"label\0", "graz", b"other")
    assert keystore.token_of(path) == key.uri


@needs_softhsm
def test_a_key_in_a_token_cannot_be_read_out(hospital: TokenUri) -> None:
    import pkcs11

    signing = token.make_signing_key(hospital, "signing", SystemRandomness())
    tls = token.make_tls_key(hospital, "tls", SystemRandomness())
    for key in (signing, tls):
        with pytest.raises(KeyUnavailable, match="cannot be read out"):
            key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        with pytest.raises(pkcs11.AttributeSensitive):
            key._handle[pkcs11.Attribute.VALUE]
        assert key._handle[pkcs11.Attribute.LOCAL] and key._handle[pkcs11.Attribute.NEVER_EXTRACTABLE]
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                copied(key)
        assert PIN not in repr(key)
    with pytest.raises(KeyUnavailable):
        SigningKey(signing).seed.reveal()


@needs_softhsm
def test_a_key_in_a_token_cannot_be_read_out_twin(hospital: TokenUri, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that does not do as it is told makes a key that anybody with the PIN can take away. It is destroyed."""
    import pkcs11

    session = token._session(hospital, "test")
    curve = {pkcs11.Attribute.EC_PARAMS: token._P256}
    open_key = {pkcs11.Attribute.EXTRACTABLE: True, pkcs11.Attribute.SENSITIVE: False}
    parameters = session.create_domain_parameters(pkcs11.KeyType.EC, curve, local=True)
    _, private = parameters.generate_keypair(store=False, private_template=open_key)
    assert len(private[pkcs11.Attribute.VALUE]) == 32  # the key itself

    class Disobedient:
        def create_domain_parameters(self, *words: object, **more: object) -> object:
            return self

        def generate_keypair(self, **more: object) -> object:
            made: object = parameters.generate_keypair(store=True, label=more["label"], private_template=open_key)
            return made

    monkeypatch.setattr(token, "_session", lambda uri, where: Disobedient())
    with pytest.raises(ConfigError, match="can be read out of it"):
        token.make_tls_key(hospital, "disobedient", SystemRandomness())
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no such private key"):
        token.load(replace(hospital, object="disobedient"), "test")


@needs_softhsm
def test_a_tls_key_signs_certificates_and_only_with_sha256(hospital: TokenUri) -> None:
    key = token.make_tls_key(hospital, "root", SystemRandomness())
    root = pki.make_root(key, "lesions", now_ms=NOW)
    root.verify_directly_issued_by(root)
    assert x509.load_pem_x509_csr(pki.make_request(key, "graz").encode()).is_signature_valid
    signature = key.sign(b"data", ec.ECDSA(hashes.SHA256()))
    key.public_key().verify(signature, b"data", ec.ECDSA(hashes.SHA256()))
    with pytest.raises(KeyUnavailable, match="SHA-256 only"):
        key.sign(b"data", ec.ECDSA(hashes.SHA384()))


# A federation.


@needs_softhsm
def test_root_coordinator_and_site_enrol_and_renew_with_keys_in_tokens(tmp_path: Path, tokens: SoftTokens) -> None:
    place = {label: TokenUri.parse(tokens.uri(label), "test") for label in ("consortium", "coordinator", "hospital")}
    folder = tmp_path / "consortium"
    authority = Authority.create(folder, "lesions", passphrase=None, place=place["consortium"], now_ms=NOW)
    assert (folder / "root.key").read_bytes().startswith(b"pkcs11:") and isinstance(authority.unlock(None), TokenTlsKey)
    world = World(tmp_path, authority, ManualClock(wall=NOW))
    world.write_plan(PLAN)
    write_initial_model(folder / "initial.safetensors")
    operator = subject("hub", Role.COORDINATOR)
    hub = world.identity("hub").create(operator, hosts=("localhost",), place=place["coordinator"])
    graz = world.identity("graz").create(subject("graz"), place=place["hospital"])
    for request in (hub, graz):
        authority.enroll(world.key, request, now_ms=NOW, days=365)
        world.install(request.member)
    for member in ("linz", "vienna"):
        world.enroll(member)
    manifest = world.publish()
    assert open_manifest(world.published(), authority.root, now_ms=NOW).digest == manifest.digest

    identity = world.identity("graz")
    assert isinstance(identity.tls_key(), TokenTlsKey)
    assert b"PRIVATE KEY" not in b"".join(
        path.read_bytes() for path in (identity.folder / "keys").glob("[st][il][gs]*-*.key")
    )
    # gRPC accepts connections only with a key that it is given.
    assert keystore.token_of(world.identity("hub").tls_key_path()) is None
    assert world.identity("hub").token() == place["coordinator"]

    # A renewal makes its keys in the same token, and is signed by the old one there.
    renewal = enrolment.renew(identity, Role.SITE)
    authority.renew(world.key, "graz", renewal, now_ms=NOW, days=365)
    world.install("graz")
    assert identity.token() == place["hospital"]


@needs_softhsm
def test_a_member_moves_from_files_into_a_token(tmp_path: Path, hospital: TokenUri) -> None:
    world = World.make(tmp_path)
    identity = world.identity("graz")
    assert identity.token() is None
    world.authority.renew(
        world.key, "graz", enrolment.renew(identity, Role.SITE, place=hospital), now_ms=NOW, days=365
    )
    world.install("graz")
    assert identity.token() == hospital and isinstance(identity.tls_key(), TokenTlsKey)


# What can be wrong.


def one_line(error: ToolkitError) -> str:
    said = f"{error} {error.hint}"
    assert "\n" not in said and PIN not in said and "1111" not in said
    return said


@needs_softhsm
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"module": Path("/nowhere/module.so")}, "there is no PKCS#11 module /nowhere/module.so"),
        ({"module": Path("/etc/hostname")}, "does not load as a PKCS#11 module"),
        ({"token": "elsewhere"}, "there is no token 'elsewhere'"),
        ({"serial": "0000"}, "there is no token 'hospital'"),
        ({"object": "no such object"}, "there is no such private key in token hospital, object no such object"),
        ({"object": None}, "names a token and no key"),
    ],
)
def test_each_fault_has_its_line(hospital: TokenUri, change: dict[str, object], said: str) -> None:
    wrong = replace(hospital, **{"object": "x"} | change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        token.load(wrong, "signing.key")
    assert said in one_line(caught.value)


@needs_softhsm
def test_the_pin_is_from_a_private_file_or_the_environment(
    tmp_path: Path, tokens: SoftTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token, "_sessions", {})
    monkeypatch.setattr(token, "_kept", None)
    place = replace(TokenUri.parse(tokens.uri("locked"), "test"), pin_source=None)

    def opens(uri: TokenUri) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            token.check_reachable(uri, "--token")
        return caught.value

    assert "there is no PIN for token 'locked'" in one_line(opens(place))
    for wrong in ("1111", "1111" * 100):
        monkeypatch.setenv(PIN_VARIABLE, wrong)
        assert "the PIN of token 'locked' is wrong" in one_line(opens(place))
    monkeypatch.setenv(PIN_VARIABLE, "")
    assert "the PIN is empty" in one_line(opens(place))
    shared = tmp_path / "pin"
    shared.write_text(PIN)
    shared.chmod(0o644)
    assert "open to others" in one_line(opens(replace(place, pin_source=shared)))
    assert "not found" in one_line(opens(replace(place, pin_source=tmp_path / "nothing")))
    monkeypatch.setenv(PIN_VARIABLE, PIN)
    token.check_reachable(place, "--token")
    assert PIN_VARIABLE not in os.environ, "what this process starts would have it"
    kept = token._given_pin()
    assert kept is not None and kept.reveal() == PIN.encode(), "for a second token"
    token.forget_pin()
    assert token._given_pin() is None


@needs_softhsm
def test_a_token_that_is_not_there_leaves_no_half_identity(tmp_path: Path, hospital: TokenUri) -> None:
    identity = enrolment.Identity(folder=tmp_path / "identity")
    with pytest.raises(ConfigError, match="no token"):
        identity.create(subject("graz"), place=replace(hospital, token="elsewhere"))
    assert not identity.folder.exists()
    identity.create(subject("graz"), place=hospital)


@needs_softhsm
def test_keys_of_other_kinds_are_refused(tmp_path: Path, hospital: TokenUri) -> None:
    import pkcs11

    session = token._session(hospital, "test")
    session.generate_keypair(pkcs11.KeyType.RSA, 1024, store=True, label="rsa")
    with pytest.raises(ConfigError, match="neither Ed25519 nor ECDSA P-256"):
        token.load(replace(hospital, object="rsa"), "test")
    path = tmp_path / "signing.key"
    keystore.save_private_key(path, token.make_tls_key(hospital, "tls of test", SystemRandomness()))
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        SigningKey(keystore.load_ed25519_key(path))
    other = tmp_path / "tls.key"
    keystore.save_private_key(other, token.make_signing_key(hospital, "signing of test", SystemRandomness()))
    with pytest.raises(ConfigError, match="not an ECDSA key"):
        keystore.load_tls_key(other)


@needs_softhsm
def test_two_keys_of_one_name_are_told_apart(hospital: TokenUri) -> None:
    first, second = (token.make_signing_key(hospital, "twice", SystemRandomness()) for _ in range(2))
    assert first.public_key() != second.public_key()
    assert token.load(first.uri, "test").public_key() == first.public_key()
    with pytest.raises(ConfigError, match="several private keys match"):
        token.load(replace(hospital, object="twice"), "test")


def misled(world: World, hospital: TokenUri) -> enrolment.Identity:
    """Somebody has pointed a key file at another key of the same token."""
    identity = world.identity("graz")
    request = enrolment.renew(identity, Role.SITE, place=hospital)
    world.authority.renew(world.key, "graz", request, now_ms=NOW, days=365)
    world.install("graz")
    foreign = token.make_signing_key(hospital, "another hospital's", SystemRandomness())
    certificate = pki.read_certificate(identity.signing_path.read_bytes())
    fingerprint = pki.key_fingerprint(pki.certificate_key(certificate))
    path = identity.folder / "keys" / f"signing-{fingerprint[:16]}.key"
    path.write_text(f"{foreign.uri}\n")
    return identity


@needs_softhsm
def test_an_address_that_leads_to_another_key_is_refused(tmp_path: Path, hospital: TokenUri) -> None:
    identity = misled(World.make(tmp_path), hospital)
    certificate = pki.read_certificate(identity.signing_path.read_bytes())
    with pytest.raises(CertificateNameMismatch, match="not the key that the certificate is for"):
        identity.signing_key(certificate)


@needs_softhsm
def test_an_address_that_leads_to_another_key_is_refused_twin(
    tmp_path: Path, hospital: TokenUri, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "_check_pair", lambda key, certified, path: None)
    identity = misled(World.make(tmp_path), hospital)
    certificate = pki.read_certificate(identity.signing_path.read_bytes())
    signing = identity.signing_key(certificate)  # and signs what nobody accepts, round after round
    assert signing.verify_key.raw != pki.certificate_key(certificate).public_bytes_raw()  # type: ignore[union-attr]


@needs_softhsm
def test_a_token_that_is_pulled_out_says_so(tokens: SoftTokens) -> None:
    place = TokenUri.parse(tokens.uri("lost"), "test")
    signing = token.make_signing_key(place, "signing", SystemRandomness())
    tls = token.make_tls_key(place, "tls", SystemRandomness())
    tls.check_present()
    assert isinstance(signing, TokenSigningKey) and len(signing.sign(b"x")) == 64
    tokens.remove("lost")
    try:
        for use in (lambda: signing.sign(b"x"), lambda: tls.sign(b"x", ec.ECDSA(hashes.SHA256())), tls.check_present):
            with pytest.raises(KeyUnavailable) as caught:
                use()
            assert "token lost" in one_line(caught.value)
    finally:
        tokens.put_back("lost")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkcs11", None)
    monkeypatch.setattr(token, "_sessions", {})
    path = tmp_path / "signing.key"
    path.write_text(f"{URI}\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="python-pkcs11 is not installed") as caught:
        SigningKey(keystore.load_ed25519_key(path))
    assert "lazaret[pkcs11]" in str(caught.value.hint)


def test_the_files_with_pins_are_known_from_the_key_files(tmp_path: Path) -> None:
    """They are closed to processes that must not sign for this party."""
    keys = tmp_path / "keys"
    keys.mkdir()
    place = f"module-path={MODULE_PATH}&pin-source=file:/etc/lazaret/pin"
    (keys / "sign.pem").write_text(f"pkcs11:token=one;object=sign?{place}\n")
    (keys / "tls.pem").write_bytes(b"\xff not an address")
    (keys / "log.key").write_bytes(b"-----BEGIN PRIVATE KEY-----")
    assert pin_files(tmp_path) == [Path("/etc/lazaret/pin")]
    assert pin_files(tmp_path / "none") == []
