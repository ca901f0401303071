"""Attacks by ambiguity: JSON that reads two ways, text that hides or runs, signatures made for something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lazaret.errors import CodecError, LocalProtocolError, VerificationFailed
from security.audit import report
from security.audit.compare import cross
from security.audit.pages import environment
from security.audit.report import render
from security.log import events as ev
from security.log.note import Checkpoint, KeyType, Note, NoteSigner, Signature, VerifierKey, key_id
from tests.support.audit_attacks import Lonely, Tampering, encode, unchecked, with_signatures
from tests.support.audit_logs import Federation


def _line(lonely: Lonely) -> bytes:
    return Tampering(lonely.folder).lines[2]


AMBIGUOUS = {
    "duplicate key": lambda line: line.replace(b'"epoch":0', b'"epoch":0,"epoch":0'),
    "duplicate key in the body": lambda line: line.replace(b'"role":', b'"role":"x","role":'),
    "unsorted keys": lambda line: encode_unsorted(json.loads(line)),
    "space": lambda line: line.replace(b'"epoch":0', b'"epoch": 0'),
    "escaped letter": lambda line: line.replace(b"operator", b"\\u006fperator"),
    "escaped slash": lambda line: line.replace(b"graz.lesions/audit", b"graz.lesions\\/audit"),
    "float": lambda line: line.replace(b'"epoch":0', b'"epoch":0.0'),
    "exponent": lambda line: line.replace(b'"epoch":0', b'"epoch":0e0'),
    "minus zero": lambda line: line.replace(b'"epoch":0', b'"epoch":-0'),
    "true for one": lambda line: line.replace(b'"v":1', b'"v":true'),
    "NaN": lambda line: line.replace(b'"round":null', b'"round":NaN'),
    "beyond 2^53": lambda line: line.replace(b'"round":null', b'"round":9007199254740993'),
    "lone surrogate": lambda line: line.replace(b"operator", b"\\ud800"),
    "bad UTF-8": lambda line: line.replace(b"operator", b"\xc0\xaf"),
    "line separator": lambda line: line.replace(b"operator", "a\u2028b".encode()),
    "direction mark": lambda line: line.replace(b"operator", "a\u202eb".encode()),
    "zero width": lambda line: line.replace(b"operator", "ro\u200bot".encode()),
    "control character": lambda line: line.replace(b"operator", b"a\\u0007b"),
    "unknown field": lambda line: line.replace(b'"role":', b'"extra":1,"role":'),
    "unknown type": lambda line: line.replace(b"operator.action", b"operator.inaction"),
    "trailing bytes": lambda line: line + b" ",
    "carriage return": lambda line: line + b"\r",
    "byte order mark": lambda line: b"\xef\xbb\xbf" + line,
    "empty": lambda line: b"",
}


def encode_unsorted(entry: dict[str, object]) -> bytes:
    return json.dumps(dict(reversed(entry.items())), separators=(",", ":")).encode()


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_line(lonely: Lonely, name: str) -> None:
    """Even under a valid signature of the log itself."""
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    changed = AMBIGUOUS[name](lines[2])
    assert changed != lines[2]
    tampering.write([*lines[:2], changed, *lines[3:]])
    tampering.resign(lonely.signer(0))
    assert "MalformedEntry" in lonely.codes()
    with unchecked("MalformedEntry"):
        assert lonely.codes() == set(), "twin"


def test_line_that_is_too_long(lonely: Lonely) -> None:
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    lines[2] = lines[2].replace(b"operator", b"x" * 70_000)
    tampering.write(lines)
    tampering.resign(lonely.signer(0))
    assert "MalformedEntry" in lonely.codes()


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "\u202e", "\ud800", "x" * 501])
def test_library_does_not_log_hidden_text(lonely: Lonely, text: str) -> None:
    with pytest.raises(LocalProtocolError):
        ev.OperatorAction(command=text, role="operator")
    with pytest.raises((LocalProtocolError, CodecError)):
        lonely.log.append(ev.OperatorAction(command="x", role="y"), actor=text)


# Text that would run in a browser

SCRIPT = '<script>alert("x")</script><img src=x onerror=y>'


def _attacked(tmp_path: Path) -> Federation:
    federation = Federation.make(tmp_path)
    federation.members["graz"].log.append(
        ev.AgentStart(
            version=SCRIPT,
            package="0" * 64,
            dependencies="0" * 64,
            proto="0" * 64,
            image=None,
            sbom=None,
            config="0" * 64,
            insecure=(SCRIPT,),
        )
    )
    federation.play(1)
    federation.stop()
    return federation


def test_report_runs_nothing(tmp_path: Path) -> None:
    federation = _attacked(tmp_path)
    page = render(cross(federation.folders, dict.fromkeys(federation.folders, federation.pinned)), pinned=True)
    assert "&lt;script&gt;" in page, "the name is shown"
    assert "<script" not in page
    assert "<img" not in page
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_report_runs_nothing_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = _attacked(tmp_path)
    monkeypatch.setattr(report, "environment", lambda: environment().overlay(autoescape=False))
    page = render(cross(federation.folders, dict.fromkeys(federation.folders, federation.pinned)), pinned=True)
    # The detail is quoted as JSON in the log, so it is the bare tag that would reach the browser.
    assert "<script" in page


# Signatures made for another purpose


def _seed(number: int) -> bytes:
    return bytes([number]) * 32


HEAD = Checkpoint(origin="graz.lesions/audit", size=7, root=bytes(32)).text
LOG = NoteSigner.from_seed("graz.lesions/audit", _seed(1))
WITNESS = NoteSigner.from_seed("linz.lesions/witness", _seed(2), KeyType.COSIGNER)


def _note(*signatures: Signature) -> Note:
    return Note(text=HEAD, signatures=signatures)


def test_good_note_verifies() -> None:
    verified = _note(LOG.sign(HEAD), WITNESS.cosign(HEAD, 1_700_000_000)).verify((LOG.key, WITNESS.key))
    assert verified == {LOG.key: None, WITNESS.key: 1_700_000_000}


def test_same_key_of_another_type_is_another_key() -> None:
    """A cosigner's key bytes under the log's name and type do not speak for the witness."""
    as_log = NoteSigner.from_seed(WITNESS.key.name, _seed(2), KeyType.LOG)
    assert as_log.key.id != WITNESS.key.id
    with pytest.raises(VerificationFailed):
        _note(as_log.sign(HEAD)).verify((WITNESS.key,))
    with pytest.raises(LocalProtocolError):
        WITNESS.sign(HEAD)
    with pytest.raises(LocalProtocolError):
        LOG.cosign(HEAD, 1)


def test_unknown_signer_is_ignored_and_is_not_enough() -> None:
    stranger = NoteSigner.from_seed("nobody", _seed(9))
    assert _note(stranger.sign(HEAD), LOG.sign(HEAD)).verify((LOG.key,)) == {LOG.key: None}
    with pytest.raises(VerificationFailed):
        _note(stranger.sign(HEAD)).verify((LOG.key,))


def test_bad_signature_of_a_known_key_spoils_the_note() -> None:
    bad = Signature(name=LOG.key.name, key_id=LOG.key.id, value=bytes(64))
    with pytest.raises(VerificationFailed):
        _note(WITNESS.cosign(HEAD, 1), bad).verify((LOG.key, WITNESS.key))


def test_colliding_key_id_gains_nothing() -> None:
    """A stranger whose four-byte id equals the log's still has another key."""
    stranger = Ed25519PrivateKey.from_private_bytes(_seed(9))
    forged = Signature(name=LOG.key.name, key_id=LOG.key.id, value=stranger.sign(HEAD.encode()))
    with pytest.raises(VerificationFailed):
        _note(forged).verify((LOG.key,))


def test_colliding_key_id_gains_nothing_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifierKey, "verify", lambda self, text, signature: None)
    forged = Signature(name=LOG.key.name, key_id=LOG.key.id, value=bytes(64))
    assert LOG.key in _note(forged).verify((LOG.key,))


def test_cosignature_binds_its_time() -> None:
    good = WITNESS.cosign(HEAD, 1000)
    moved = Signature(name=good.name, key_id=good.key_id, value=(2000).to_bytes(8, "big") + good.value[8:])
    with pytest.raises(VerificationFailed):
        _note(moved).verify((WITNESS.key,))


def test_key_signs_once() -> None:
    with pytest.raises(VerificationFailed):
        _note(LOG.sign(HEAD), LOG.sign(HEAD)).verify((LOG.key,))


def test_key_id_depends_on_name_type_and_key() -> None:
    ids = {
        key_id(name, kind, key) for name in ("a", "b") for kind in KeyType for key in (bytes(32), bytes(31) + b"\x01")
    }
    assert len(ids) == 2 * len(KeyType) * 2


def test_head_with_a_strangers_line_is_a_finding(lonely: Lonely) -> None:
    folder = Tampering(lonely.folder).folder
    size = folder.checkpoint_sizes()[-1]
    note = folder.checkpoint_note(size)
    stranger = NoteSigner.from_seed("nobody", _seed(9))
    folder.checkpoint_path(size).write_bytes(with_signatures(note, stranger.sign(note.text)).encode())
    assert lonely.codes() == {"UnknownSigner"}
    with unchecked("UnknownSigner"):
        assert lonely.codes() == set(), "twin"


def test_encoding_helper_is_canonical(lonely: Lonely) -> None:
    assert encode(json.loads(_line(lonely))) == _line(lonely)
