"""The formats of the privacy log, from docs/spec/audit-log.md alone: canonical JSON, trees, notes, manifests, lengths.

Nothing here imports the toolkit. The blocks `kinds`, `events` and `messages` are read from the page itself.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PublicKey

PAGE = Path(__file__).parents[3] / "docs" / "spec" / "audit-log.md"
ML_DSA = 0xFF  # the type of a key that is not C2SP's
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
FRAME = 196_608
DASH = "\u2014"


class Invalid(Exception):
    """Something is not what the page says."""


def demand(condition: object, what: str) -> None:
    if not condition:
        raise Invalid(what)


# The blocks of the page


@cache
def block(name: str) -> list[list[str]]:
    """The lines of one block, each cut at its first spaces."""
    found = re.search(rf"^```text\n{name}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None, f"the page has no block {name}"
    return [line.split(maxsplit=3 if name == "messages" else 1) for line in found[1].splitlines()]


@cache
def kinds() -> dict[str, str]:
    made: dict[str, str] = {}
    for name, expression in block("kinds"):
        made[name] = re.sub(r"<([a-z_]+)>", lambda match: made[match[1]], expression)
    return made


@cache
def lines() -> dict[str, re.Pattern[str]]:
    """For each event type, the expression of a whole entry."""

    def field(written: str) -> tuple[str, str]:
        key, kind = written.split(":")
        expression = kinds()[kind.removesuffix("?")]
        return key, f"(?:null|{expression})" if kind.endswith("?") else expression

    types = {name: [field(item) for item in rest.split()] for name, rest in block("events")}
    envelope = dict(types.pop("envelope"))
    made = {}
    for name, fields in types.items():
        body = r"\{" + ",".join(f'"{key}":{expression}' for key, expression in fields) + r"\}"
        parts = envelope | {"body": body, "type": f'"{re.escape(name)}"', "v": "1"}
        made[name] = re.compile(r"\{" + ",".join(f'"{key}":{parts[key]}' for key in sorted(parts)) + r"\}")
    return made


def entry_of(line: bytes) -> dict[str, Any]:
    demand(len(line) <= 65_536, "a line is too long")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise Invalid("not UTF-8") from None
    ending = re.search(r'"type":"([a-z.]+)","v":1\}\Z', text)
    demand(ending is not None and ending[1] in lines(), "not an event of a known type")
    assert ending is not None
    demand(lines()[ending[1]].fullmatch(text), f"not an entry of type {ending[1]}")
    made: dict[str, Any] = json.loads(text)
    return made


# Canonical JSON


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def read_json(data: bytes) -> Any:
    """One value and a newline."""
    demand(data.endswith(b"\n"), "no newline at the end")
    try:
        value = json.loads(data[:-1], parse_float=_no_float, parse_constant=_no_float)
        demand(canonical(value) == data[:-1], "not canonical")
    except (ValueError, RecursionError):
        raise Invalid("not JSON") from None
    return value


def _no_float(_text: str) -> None:
    raise Invalid("a float")


# Trees


def leaf(line: bytes) -> bytes:
    return sha256(b"\0" + line).digest()


def node(left: bytes, right: bytes) -> bytes:
    return sha256(b"\1" + left + right).digest()


class Tree:
    """The roots of a growing tree: one complete subtree for each bit of the size."""

    def __init__(self) -> None:
        self.size = 0
        self._peaks: list[bytes] = []

    def add(self, hash_: bytes) -> None:
        self.size += 1
        self._peaks.append(hash_)
        for _ in range((self.size & -self.size).bit_length() - 1):
            right = self._peaks.pop()
            self._peaks[-1] = node(self._peaks[-1], right)

    def root(self) -> bytes:
        if not self._peaks:
            return sha256(b"").digest()
        *rest, result = self._peaks
        for peak in reversed(rest):
            result = node(peak, result)
        return result


def check_inclusion(hash_: bytes, index: int, size: int, path: list[bytes], root: bytes) -> None:
    """RFC 9162, section 2.1.3.2."""
    demand(0 <= index < size, "no such leaf")
    first, last = index, size - 1
    for step in path:
        demand(last, "the path is too long")
        if first & 1 or first == last:
            hash_ = node(step, hash_)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            hash_ = node(hash_, step)
        first, last = first >> 1, last >> 1
    demand(last == 0 and hash_ == root, "the path leads to another root")


def check_consistency(old_size: int, old_root: bytes, size: int, root: bytes, path: list[bytes]) -> None:
    """RFC 9162, section 2.1.4.2."""
    demand(0 < old_size <= size, "sizes are out of order")
    if old_size == size:
        demand(not path and old_root == root, "two roots of one size")
        return
    steps = list(path) if old_size & (old_size - 1) else [old_root, *path]
    demand(steps, "the path is too short")
    first, last = old_size - 1, size - 1
    while first & 1:
        first, last = first >> 1, last >> 1
    one = two = steps[0]
    for step in steps[1:]:
        demand(last, "the path is too long")
        if first & 1 or first == last:
            one, two = node(step, one), node(step, two)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            two = node(two, step)
        first, last = first >> 1, last >> 1
    demand(last == 0 and one == old_root and two == root, "the proof leads to another root")


# Notes and keys

Key = tuple[str, int, bytes]  # name, type, public key


def key_id(key: Key) -> bytes:
    own = b"lazaret-ml-dsa-65" if key[1] == ML_DSA else b""
    return sha256(key[0].encode() + b"\n" + bytes([key[1]]) + own + key[2]).digest()[:4]


def unbase64(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise Invalid("not base64") from None
    demand(base64.b64encode(data).decode() == text, "another form of base64")
    return data


def key_of(vkey: str) -> Key:
    parts = vkey.split("+", 2)
    demand(len(parts) == 3, "not a key")
    data = unbase64(parts[2])
    demand(len(data) == 33 and data[0] in (1, 4), "not a key of a known type")
    key = (parts[0], data[0], data[1:])
    demand(key_id(key).hex() == parts[1], "not the id of the key")
    return key


class Note:
    def __init__(self, data: bytes) -> None:
        demand(len(data) <= 1 << 18, "a note is too long")
        try:
            text, blank, signed = data.decode().rpartition("\n\n")
        except UnicodeDecodeError:
            raise Invalid("not UTF-8") from None
        demand(blank and signed.endswith("\n"), "no signatures")
        self.data, self.text = data, text + "\n"
        demand(not re.search("[\x00-\x09\x0b-\x1f]", self.text), "a control character")
        self.signatures = [self._line(line) for line in signed[:-1].split("\n")]
        demand(len(self.signatures) <= 64, "too many signatures")

    @staticmethod
    def _line(line: str) -> tuple[str, bytes, bytes]:
        match = re.fullmatch(DASH + r" ([^\s+]+) ([A-Za-z0-9+/]+={0,2})", line)
        demand(match, "not a signature line")
        assert match is not None
        data = unbase64(match[2])
        demand(len(data) > 4, "a signature is too short")
        return match[1], data[:4], data[4:]

    def signers(self, keys: list[Key]) -> dict[Key, int]:
        """Which of these keys signed, with the time of a cosignature, or 0; a false one spoils the note."""
        known = {(key[0], key_id(key)): key for key in keys}
        found: dict[Key, int] = {}
        for name, identifier, value in self.signatures:
            key = known.get((name, identifier))
            if key is None:
                continue
            demand(key not in found, "one key signed twice")
            message, time = self.text.encode(), 0
            if key[1] == 4:
                demand(len(value) == 72, "a cosignature has 72 bytes")
                time, value = int.from_bytes(value[:8], "big"), value[8:]
                message = f"cosignature/v1\ntime {time}\n{self.text}".encode()
            kind = MLDSA65PublicKey if key[1] == ML_DSA else Ed25519PublicKey
            try:
                kind.from_public_bytes(key[2]).verify(value, message)
            except InvalidSignature:
                raise Invalid(f"a false signature of {name}") from None
            found[key] = time
        return found

    def strangers(self, keys: list[Key]) -> bool:
        known = {(key[0], key_id(key)) for key in keys}
        return any((name, identifier) not in known for name, identifier, _ in self.signatures)

    @property
    def checkpoint(self) -> tuple[str, int, bytes]:
        parts = self.text.split("\n")
        demand(len(parts) == 4 and not parts[3] and re.fullmatch("0|[1-9][0-9]{0,15}", parts[1]), "not a checkpoint")
        root = unbase64(parts[2])
        demand(len(root) == 32 and parts[0] and not re.search(r"[\s+]", parts[0]), "not a checkpoint")
        return parts[0], int(parts[1]), root


def check_chain(origin: str, root: Key, notes: list[Note]) -> list[Key]:
    """The keys of the epochs, from their endorsements."""
    keys: list[Key] = []
    for number, note in enumerate(notes):
        parts = note.text.split("\n")
        demand(len(parts) == 5 and parts[0] == "lazaret/epoch-key/v1" and not parts[4], "not an endorsement")
        key = key_of(parts[3])
        demand(parts[1:3] == [origin, str(number)] and key[:2] == (origin, 1), "an endorsement of something else")
        demand(
            len(note.signatures) == 1 and note.signers([keys[-1] if keys else root]), "not endorsed by the one before"
        )
        demand(key not in keys and key[2] != root[2], "a key serves twice")
        keys.append(key)
    demand(keys, "no epoch key")
    return keys


# Manifests


class Agreed:
    """One signed manifest."""

    def __init__(self, data: bytes, root: x509.Certificate | None) -> None:
        value = read_json(data)
        named = value.keys() - {"ml_dsa"} if isinstance(value, dict) else ()
        demand(named == {"manifest", "signature"}, "not a signed manifest")
        self.value, self.digest = value["manifest"], sha256(data).hexdigest()
        if root is not None:
            self._check(root, bytes.fromhex(value["signature"]))
            self._check_second(value.get("ml_dsa"))
        self.version: int = self.value["version"]
        members = [*self.value["roster"], self.value["coordinator"]]
        self.keys = {member["id"]: (key_of(member["audit_root"]), key_of(member["cosigner"])) for member in members}
        self.root_ml_dsa: str | None = self.value.get("root_ml_dsa")
        self.ml_dsa = {
            member["id"]: (self.keys[member["id"]][0][0], ML_DSA, bytes.fromhex(member["log_ml_dsa"]))
            for member in members
            if "log_ml_dsa" in member
        }
        self.hub: str = self.value["coordinator"]["id"]
        self.windows = {member["id"]: self._window(member["signing_certificate"]) for member in members}

    @property
    def content(self) -> bytes:
        """What the next version names, and the root signs."""
        return sha256(b"FLSA1/manifest\0" + canonical(self.value)).digest()

    @property
    def signed(self) -> bytes:
        parts = (self.value["federation"].encode(), self.content)
        return b"FLSA1/manifest-sig\0" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def _check_second(self, signature: str | None) -> None:
        key = self.value.get("root_ml_dsa")
        demand((key is None) == (signature is None), "an ML-DSA signature without its key, or a key without it")
        if key is None:
            return
        try:
            MLDSA65PublicKey.from_public_bytes(bytes.fromhex(key)).verify(bytes.fromhex(signature or ""), self.signed)
        except (InvalidSignature, ValueError):
            raise Invalid("the ML-DSA signature is not the consortium's") from None

    def _check(self, root: x509.Certificate, signature: bytes) -> None:
        federation = self.value["federation"]
        key = root.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        try:
            r, s = utils.decode_dss_signature(signature)
            demand(s <= P256_ORDER // 2 and utils.encode_dss_signature(r, s) == signature, "another form of signature")
            key.verify(signature, self.signed, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError):
            raise Invalid("not signed by the consortium") from None
        names = root.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATION_NAME)
        demand([name.value for name in names] == [federation], "of another federation")

    @staticmethod
    def _window(pem: str) -> tuple[int, int]:
        made = x509.load_pem_x509_certificate(pem.encode())
        return _ms(made.not_valid_before_utc), _ms(made.not_valid_after_utc)

    def party(self, origin: str) -> str | None:
        return next((name for name, (root, _) in self.keys.items() if root[0] == origin), None)

    @property
    def vector_bytes(self) -> int:
        layout = self.value["aggregation"]["layout"]
        words = sum(_product(one["shape"]) for one in layout["blocks"])
        unit = {16: 8, 64: 2}.get(layout["ring_bits"], 4)  # numbers in 16 bytes of a mask stream
        return -(-words // unit) * unit * layout["ring_bits"] // 8

    @property
    def names(self) -> set[str]:
        return {*self.keys, *(root[0] for root, _ in self.keys.values())}


def _ms(instant: dt.datetime) -> int:
    return int(instant.timestamp() * 1000)


def _product(extents: list[int]) -> int:
    result = 1
    for extent in extents:
        result *= extent
    return result


# Lengths of messages


def classes() -> dict[str, str]:
    return {name: data_class for name, _, data_class, _ in block("messages")}


def due_bytes(message: str, origin: str, shape: dict[str, Any]) -> int:
    """The length that a message has, from the numbers in its entry."""
    row = next((row for row in block("messages") if row[0] == message), None)
    demand(row is not None, "a site sends no such message")
    assert row is not None
    site, _, federation = origin.removesuffix("/audit").partition(".")
    named = shape["named"] or ""
    signatures = shape["head_signatures"] + (shape["cosigned"] if "*cosigned" in row[3] else 0)
    lists = {"path": 63 if message == "Head" else 255, "cohort": 255, "epochs": 4096}
    demand(all(shape[word] <= most for word, most in lists.items() if f"*{word}" in row[3]), "a list is too long")
    demand(signatures <= 64 or message == "UploadFrame", "too many signatures")
    demand("*earlier" not in row[3] or shape["cohort"] <= 256, "too many boxes")
    size, frames = shape["vector_bytes"], -(-shape["vector_bytes"] // FRAME)
    words: dict[str, int] = {key: value for key, value in shape.items() if key != "named"} | {
        "site": len(site),
        "federation": len(federation),
        "origin": len(origin),
        "witness": len(f"{site}.{federation}/witness"),
        "named": len(named),
        "earlier": shape["cohort"] - 1 - shape["path"],
        "pair": 32 * (named.encode() > site.encode()),
        "bitmap": -(-frames // 8),
    }
    if message != "UploadFrame":
        demand(shape["frames"] == 1, "only a vector has frames")
        head = _fields("{origin u64 32 {origin 4 64}*head_signatures}", words) + 1
        return _parcel(int(row[1]), _fields(row[3], words)) + head
    last = shape["frame"] + shape["frames"]
    demand(shape["frames"] >= 1 and last <= frames, "there are no such frames")
    whole = _parcel(int(row[1]), _fields(row[3], words | {"data": FRAME}))
    rest = _parcel(int(row[1]), _fields(row[3], words | {"data": size - (frames - 1) * FRAME}))
    return whole * (shape["frames"] - (last == frames)) + rest * (last == frames)


def _parcel(number: int, body: int) -> int:
    return 10 + (1 if number < 16 else 2) + _varint(body) + body


def _varint(length: int) -> int:
    return 1 if length < 1 << 7 else 2 if length < 1 << 14 else 3 if length < 1 << 21 else 4


def _fields(text: str, words: dict[str, int]) -> int:
    total = 0
    for item, times in _items(text):
        count = 1 if times is None else words[times]
        demand(count >= 0, "a negative count")
        if item in ("u32", "u64"):
            length = 1 + int(item[1:]) // 8
        else:
            inside = (
                _fields(item[1:-1], words) if item.startswith("{") else int(item) if item.isdigit() else words[item]
            )
            length = 1 + _varint(inside) + inside
        total += count * length
    return total


def _items(text: str) -> Iterator[tuple[str, str | None]]:
    """Cut a list of fields at the spaces outside of braces."""
    depth = start = 0
    for at, character in enumerate(text + " "):
        depth += (character == "{") - (character == "}")
        if character == " " and depth == 0:
            item, _, times = (
                text[start:at].rpartition("*")
                if re.search(r"\*\w+\Z", text[start:at])
                else (
                    text[start:at],
                    "",
                    "",
                )
            )
            if item:
                yield item, times or None
            start = at + 1
