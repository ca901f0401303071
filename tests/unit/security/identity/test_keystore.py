"""Key files: who may read them, what a crash leaves, and that the encrypted form is the standard one."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from lazaret import files
from lazaret.errors import ConfigError
from security.crypto.signing import SigningKey
from security.identity import keystore, pki


def test_a_key_comes_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    key = pki.new_signing_key()
    path = tmp_path / "keys" / "signing.key"
    keystore.save_private_key(path, key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keystore.load_ed25519_key(path).private_bytes_raw() == key.private_bytes_raw()
    assert SigningKey(keystore.load_ed25519_key(path)).verify_key.raw == key.public_key().public_bytes_raw()
    assert isinstance(SigningKey(keystore.load_ed25519_key(path)), SigningKey)
    assert os.listdir(path.parent) == ["signing.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o601])
def test_a_key_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tls.key"
    keystore.save_private_key(path, pki.new_tls_key())
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to others") as caught:
        keystore.load_tls_key(path)
    assert f"chmod 600 {path}" in str(caught.value.hint)


def test_a_key_open_to_others_is_refused_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "refuse_shared_mode", lambda path, mode: None)
    path = tmp_path / "tls.key"
    keystore.save_private_key(path, pki.new_tls_key())
    path.chmod(0o644)
    keystore.load_tls_key(path)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    keystore.save_private_key(path, pki.new_signing_key())
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        keystore.save_private_key(path, pki.new_signing_key())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["signing.key"]


def test_a_passphrase_is_needed_and_must_be_right(tmp_path: Path) -> None:
    key = pki.new_tls_key()
    path = tmp_path / "root.key"
    keystore.save_private_key(path, key, passphrase=b"correct horse")
    assert keystore.load_tls_key(path, passphrase=b"correct horse").private_numbers() == key.private_numbers()
    with pytest.raises(ConfigError, match="does not open"):
        keystore.load_tls_key(path, passphrase=b"wrong")
    with pytest.raises(ConfigError, match="no passphrase"):
        keystore.load_tls_key(path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command as second opinion")
def test_openssl_opens_the_encrypted_key(tmp_path: Path) -> None:
    key = pki.new_tls_key()
    path = tmp_path / "root.key"
    keystore.save_private_key(path, key, passphrase=b"pw")
    shown = subprocess.run(
        ["openssl", "pkey", "-in", str(path), "-passin", "pass:pw", "-outform", "DER", "-pubout"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    expected = key.public_key().public_bytes(Encoding.DER, keystore.serialization.PublicFormat.SubjectPublicKeyInfo)
    assert shown.stdout == expected


def test_the_two_kinds_of_key_are_not_confused(tmp_path: Path) -> None:
    keystore.save_private_key(tmp_path / "tls.key", pki.new_tls_key())
    keystore.save_private_key(tmp_path / "signing.key", pki.new_signing_key())
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        SigningKey(keystore.load_ed25519_key(tmp_path / "tls.key"))
    with pytest.raises(ConfigError, match="not an ECDSA key"):
        keystore.load_tls_key(tmp_path / "signing.key")


def test_what_is_not_a_key_of_ours_is_refused(tmp_path: Path) -> None:
    garbage, foreign = tmp_path / "garbage.key", tmp_path / "rsa.key"
    files.write_atomically(garbage, b"not a key", mode=0o600)
    pem = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.write_atomically(foreign, pem, mode=0o600)
    with pytest.raises(ConfigError, match="does not open"):
        keystore.load_private_key(garbage)
    with pytest.raises(ConfigError, match="kind this toolkit does not use"):
        keystore.load_private_key(foreign)
    with pytest.raises(ConfigError, match="not found"):
        keystore.load_private_key(tmp_path / "missing.key")
    (tmp_path / "folder").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="cannot be read"):
        keystore.load_private_key(tmp_path / "folder")


def test_secrets_keep_their_length(tmp_path: Path) -> None:
    keystore.save_secret(tmp_path / "seal.key", bytes(range(32)))
    assert keystore.load_secret(tmp_path / "seal.key") == bytes(range(32))
    with pytest.raises(ConfigError, match="expected 16"):
        keystore.load_secret(tmp_path / "seal.key", length=16)
    files.write_atomically(tmp_path / "bad.key", b"***", mode=0o600)
    with pytest.raises(ConfigError, match="not base64"):
        keystore.load_secret(tmp_path / "bad.key")


def test_erase_overwrites_before_it_unlinks(tmp_path: Path) -> None:
    path = tmp_path / "seal.key"
    keystore.save_secret(path, b"x" * 32)
    held = tmp_path / "held"
    os.link(path, held)
    files.erase(path)
    assert not path.exists()
    assert set(held.read_bytes()) == {0}
    files.erase(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    files.write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["manifest.json"]
