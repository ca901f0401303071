"""Signed notes, checkpoints and cosignatures from the C2SP documents, on Ed25519 over plain integers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from . import curve
from .merkle_notes_trees import INPUTS, mth

LOG_NAME, LOG_SEED = "graz.example/audit", bytes(range(32))
WITNESS_NAME, WITNESS_SEED = "linz.example/witness", bytes(range(32, 64))
TIME = 1_800_000_000
DASH = "\u2014"


def key_id(name: str, kind: int, public: bytes) -> bytes:
    return sha256(name.encode() + b"\n" + bytes([kind]) + public).digest()[:4]


def vkey(name: str, kind: int, seed: bytes) -> str:
    public = curve.ed25519_public(seed)
    return f"{name}+{key_id(name, kind, public).hex()}+{b64(bytes([kind]) + public)}"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def checkpoint(origin: str, size: int) -> str:
    return f"{origin}\n{size}\n{b64(mth(INPUTS[:size]))}\n"


def log_line(text: str, name: str = LOG_NAME, seed: bytes = LOG_SEED, kind: int = 1) -> str:
    public = curve.ed25519_public(seed)
    return f"{DASH} {name} {b64(key_id(name, kind, public) + curve.ed25519_sign(seed, text.encode()))}\n"


def witness_line(text: str, time: int = TIME, said: int | None = None) -> str:
    public = curve.ed25519_public(WITNESS_SEED)
    signature = curve.ed25519_sign(WITNESS_SEED, f"cosignature/v1\ntime {time}\n{text}".encode())
    stamp = (time if said is None else said).to_bytes(8, "big")
    return f"{DASH} {WITNESS_NAME} {b64(key_id(WITNESS_NAME, 4, public) + stamp + signature)}\n"


def _case(
    comment: str, note: str | bytes, expect: str = "ok", verified: dict[str, Any] | None = None
) -> dict[str, Any]:
    data = note.encode() if isinstance(note, str) else note
    return {
        "comment": comment,
        "expect": expect,
        "keys": [vkey(LOG_NAME, 1, LOG_SEED), vkey(WITNESS_NAME, 4, WITNESS_SEED)],
        "note": data.hex(),
        "origin": LOG_NAME,
        "size": 7,
        "root": mth(INPUTS[:7]).hex(),
        "verified": verified or {},
    }


def notes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every vector of the folder `notes`."""
    text = checkpoint(LOG_NAME, 7)
    log, witness = log_line(text), witness_line(text)
    good = f"{text}\n{log}"
    yield "signed", _case("signed by the log", good, verified={LOG_NAME: None})
    both = {LOG_NAME: None, WITNESS_NAME: TIME}
    yield "cosigned", _case("and by a witness", good + witness, verified=both)
    stranger = log_line(text, "nobody.example", bytes(32))
    yield "unknown_signer", _case("an unknown signer is ignored", good + stranger, verified={LOG_NAME: None})
    yield "only_unknown", _case("but is not enough", f"{text}\n{stranger}", "verification")
    wrong = log_line(checkpoint(LOG_NAME, 6))
    yield "other_text", _case("a signature over another head", f"{text}\n{wrong}", "verification")
    yield (
        "known_bad_beside_good",
        _case("a bad line spoils the note", f"{text}\n{wrong}{witness}", "verification"),
    )
    backdated = witness_line(text, said=TIME - 60)
    yield "moved_time", _case("a cosignature under another time", good + backdated, "verification")
    yield "repeated", _case("one key twice", good + log, "verification")
    yield from _malformed(text, log)


def _loosened(note: str) -> str:
    """The last character before the padding, with a bit set that no byte of the signature has."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    head, last = note[: -len("x=\n")], note[-len("x=\n")]
    return f"{head}{alphabet[alphabet.index(last) + 1]}=\n"


def _malformed(text: str, log: str) -> Iterator[tuple[str, dict[str, Any]]]:
    good = f"{text}\n{log}"
    faults: dict[str, tuple[str, str | bytes]] = {
        "no_signature": ("no signature lines", text),
        "no_blank_line": ("no blank line before the signatures", text + log),
        "no_final_newline": ("the last newline is missing", good[:-1]),
        "hyphen": ("a hyphen instead of the dash", good.replace(DASH, "-")),
        "two_spaces": ("two spaces in a signature line", good.replace(f"{DASH} ", f"{DASH}  ")),
        "carriage_return": ("a control character", good.replace("\n7\n", "\n7\r\n")),
        "not_utf8": ("bytes that are not UTF-8", good.encode() + b"\xff\n"),
        "loose_base64": ("base64 with bits left over", _loosened(good)),
        "plus_in_name": ("a plus sign in a key name", good.replace(f"{DASH} graz", f"{DASH} gr+z")),
    }
    for name, (comment, note) in faults.items():
        yield name, _case(comment, note, "codec")
    heads = {
        "leading_zero": ("a size with a leading zero", text.replace("\n7\n", "\n07\n")),
        "negative_size": ("a negative size", text.replace("\n7\n", "\n-7\n")),
        "extension_line": ("an extension line", text + "more\n"),
        "short_root": ("a root of 31 bytes", f"{LOG_NAME}\n7\n{b64(bytes(31))}\n"),
        "space_in_origin": ("a space in the origin", text.replace("graz.example", "graz example")),
    }
    for name, (comment, head) in heads.items():
        yield f"head_{name}", _case(comment, f"{head}\n{log_line(head)}", "codec")
