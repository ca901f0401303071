"""Private keys that stay in a PKCS#11 token: a hardware module, a smart card, or softhsm2 that stands in for one.

A key file then has the address of the key in it instead of the key: one line, a `pkcs11:` URI (RFC 7512). Its name, its
mode and everything around it stay the same. A key is made inside the token and cannot be read out of it. Its objects
here are `cryptography`'s private keys, so that certificates, requests and manifests are signed by the same lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final, NoReturn, Self
from urllib.parse import quote, unquote_to_bytes

import click
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed, encode_dss_signature

from lazaret.errors import ConfigError, KeyUnavailable
from lazaret.files import read_private
from lazaret.terminal import can_ask
from security.rng import Randomness
from security.secrets import Secret, take_from_environment

SCHEME: Final = "pkcs11:"
PIN_VARIABLE: Final = "LAZARET_TOKEN_PIN"
MAX_URI: Final = 4096
_PATH: Final = ("token", "serial", "object", "id")
_QUERY: Final = ("module-path", "pin-source")
_MOST_URI: Final = 4096
_EXAMPLE: Final = "pkcs11:token=LABEL?module-path=/usr/lib/softhsm/libsofthsm2.so&pin-source=file:/etc/lazaret/pin"
# Of the two spellings that PKCS#11 has for this curve, the object identifier of RFC 8410.
_ED25519: Final = bytes.fromhex("06032b6570")
_P256: Final = bytes.fromhex("06082a8648ce3d030107")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUri:
    """Where a token is, or a key in it.

    :param module: the library of the token's maker, which speaks PKCS#11.
    :param pin_source: the file with the PIN; None: from the environment or the keyboard.
    """

    token: str
    module: Path
    serial: str | None = None
    object: str | None = None
    id: bytes | None = None
    pin_source: Path | None = None

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """:raises ConfigError: also for a PIN inside, which would be in shell histories and backups."""
        found = _attributes(text, where)
        if "token" not in found or "module-path" not in found:
            raise ConfigError("token and module-path are needed", where=where, hint=f"for example {_EXAMPLE}")
        words = {name: _word(value, where) for name, value in found.items() if name != "id"}
        source = words.get("pin-source")
        return cls(
            token=words["token"],
            module=_absolute(words["module-path"], "module-path", where),
            serial=words.get("serial"),
            object=words.get("object"),
            id=found.get("id"),
            pin_source=_absolute(source.removeprefix("file:"), "pin-source", where) if source else None,
        )

    def __str__(self) -> str:
        number = "".join(f"%{byte:02x}" for byte in self.id) if self.id is not None else None
        path = [("token", quote(self.token)), ("serial", self.serial and quote(self.serial))]
        path += [("object", self.object and quote(self.object)), ("id", number)]
        source = f"file:{quote(str(self.pin_source))}" if self.pin_source else None
        query = [("module-path", quote(str(self.module))), ("pin-source", source)]
        one, two = (";".join(_joined(path)), "&".join(_joined(query)))
        return f"{SCHEME}{one}?{two}"

    @property
    def place(self) -> str:
        """For messages: the token and the object, no paths."""
        return f"token {self.token}" + (f", object {self.object}" if self.object else "")


def _joined(pairs: list[tuple[str, str | None]]) -> Iterator[str]:
    return (f"{name}={value}" for name, value in pairs if value is not None)


def _attributes(text: str, where: str) -> dict[str, bytes]:
    if not text.startswith(SCHEME) or len(text) > MAX_URI:
        raise ConfigError("is not a pkcs11: URI", where=where, hint=f"for example {_EXAMPLE}")
    path, _, query = text.removeprefix(SCHEME).partition("?")
    found: dict[str, bytes] = {}
    for part, known, split in ((path, _PATH, ";"), (query, _QUERY, "&")):
        for pair in filter(None, part.split(split)):
            name, _, value = pair.partition("=")
            if name == "pin-value":
                raise ConfigError("has a PIN in it", where=where, hint=f"use pin-source=file:PATH or ${PIN_VARIABLE}")
            if name not in known or name in found or not value:
                # The name only where it can be one: what stands there may be a PIN with a typing error before it.
                shown = name if re.fullmatch(r"[a-z-]{1,24}", name) else "something"
                hint = f"known: {', '.join((*_PATH, *_QUERY))}, each once"
                raise ConfigError(f"{shown} is not expected in this URI", where=where, hint=hint)
            found[name] = unquote_to_bytes(value)
    return found


def _word(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8", where=where) from error


def _absolute(text: str, name: str, where: str) -> Path:
    if not text.startswith("/"):
        raise ConfigError(f"{name} is not an absolute path", where=where, hint=f"for example {_EXAMPLE}")
    return Path(text)


token_option = click.option(
    "--token", "place", help="Keep the key in this PKCS#11 token: pkcs11:token=LABEL?module-path=FILE (docs/keys.md)."
)


def pin_files(identity: Path) -> list[Path]:
    """The files with PINs that the key files of a party name: who must not sign for it must not read them."""
    found: set[Path] = set()
    for path in (identity / "keys").glob("*"):
        with suppress(OSError, UnicodeDecodeError, ConfigError):
            text = path.read_bytes()[:_MOST_URI].decode().strip()
            if text.startswith("pkcs11:") and (source := TokenUri.parse(text, str(path)).pin_source) is not None:
                found.add(source)
    return sorted(found)


def named_token(text: str | None) -> TokenUri | None:
    """The value of `--token`."""
    return None if text is None else TokenUri.parse(text, "--token")


# Sessions. A login holds for a whole process, and ending one session would end it for all: each token has one session
# here, which stays open.

_sessions: dict[tuple[Path, str, str | None], Any] = {}
_opening = Lock()


def _library() -> Any:
    try:
        import pkcs11
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a key is in a token, and python-pkcs11 is not installed", hint="pip install 'lazaret[pkcs11]'"
        ) from error
    return pkcs11


def _session(uri: TokenUri, where: str) -> Any:
    with _opening:
        name = (uri.module, uri.token, uri.serial)
        if name not in _sessions:
            _sessions[name] = _open(uri, where)
        return _sessions[name]


def check_reachable(uri: TokenUri, where: str) -> None:
    """The module is there, the token is there, and the PIN is right; nothing is changed in it."""
    _session(uri, where)


def _open(uri: TokenUri, where: str) -> Any:
    pkcs11 = _library()
    if not uri.module.is_file():
        hint = "install the library of the token's maker, or correct module-path"
        raise ConfigError(f"there is no PKCS#11 module {uri.module}", where=where, hint=hint)
    try:
        module = pkcs11.lib(str(uri.module))
    except pkcs11.PKCS11Error as error:
        hint = "is it a PKCS#11 library for this machine? Its own settings may be missing or not readable"
        raise ConfigError(f"{uri.module} does not load as a PKCS#11 module", where=where, hint=hint) from error
    try:
        token = module.get_token(token_label=uri.token, **({"token_serial": uri.serial.encode()} if uri.serial else {}))
    except pkcs11.MultipleTokensReturned as error:
        hint = "add ;serial=NUMBER to the URI"
        raise ConfigError(f"there are several tokens {uri.token!r}", where=where, hint=hint) from error
    except pkcs11.PKCS11Error as error:
        hint = "is it plugged in, and may this user reach it? The URI has the token's label"
        raise ConfigError(f"there is no token {uri.token!r}", where=where, hint=hint) from error
    pin = _pin(uri, where)
    try:
        return token.open(rw=True, user_pin=pin)
    except pkcs11.PinLocked:
        problem, hint = "is locked after too many tries", "unlock it with the maker's tool"
    except (pkcs11.PinIncorrect, pkcs11.PinInvalid, pkcs11.PinLenRange):
        problem, hint = "is wrong", f"correct pin-source or ${PIN_VARIABLE}: too many tries lock a token"
    except pkcs11.PKCS11Error as error:
        problem, hint = f"is not accepted ({_kind(error)})", "try the maker's tool with the same token"
    raise ConfigError(f"the PIN of token {uri.token!r} {problem}", where=where, hint=hint)


def _pin(uri: TokenUri, where: str) -> str:
    """Never in an argument, an error or a log."""
    if uri.pin_source is not None:
        pin = _word(read_private(uri.pin_source).strip(b"\r\n"), str(uri.pin_source))
    elif (given := _given_pin()) is not None:
        pin = _word(given.reveal(), f"${PIN_VARIABLE}")
    elif can_ask():
        pin = str(click.prompt(f"PIN of token {uri.token}", hide_input=True, err=True))
    else:
        hint = f"add pin-source=file:PATH to the URI (mode 0600), or set ${PIN_VARIABLE}"
        raise ConfigError(f"there is no PIN for token {uri.token!r}", where=where, hint=hint)
    if not pin:
        raise ConfigError("the PIN is empty", where=str(uri.pin_source or f"${PIN_VARIABLE}"))
    return pin


_kept: Secret | None = None


def _given_pin() -> Secret | None:
    """That of the environment, which does not have it any more: commands that this process starts need none. Kept for a
    second token.
    """
    global _kept
    found = take_from_environment(PIN_VARIABLE)
    _kept = _kept if found is None else found
    return _kept


def forget_pin() -> None:
    """For a process that goes on in a child, and opens no token any more."""
    global _kept
    take_from_environment(PIN_VARIABLE)
    _kept = None


def _kind(error: Exception) -> str:
    """What the module says, without its own text, which we do not know."""
    return type(error).__name__


# Keys.


def _refused(*_: object, **__: object) -> NoReturn:
    raise KeyUnavailable("a key in a token cannot be read out of it", hint="sign with it where the token is")


class _Held:
    """What both kinds of key have: an object in a session."""

    __slots__ = ("_handle", "_public", "uri")

    def __init__(self, uri: TokenUri, handle: Any, public: Any) -> None:
        self.uri, self._handle, self._public = uri, handle, public

    def _sign(self, data: bytes, mechanism: str) -> bytes:
        pkcs11 = _library()
        try:
            return bytes(self._handle.sign(data, mechanism=pkcs11.Mechanism[mechanism]))
        except pkcs11.PKCS11Error as error:
            raise KeyUnavailable(
                f"the token does not sign ({_kind(error)})",
                where=self.uri.place,
                hint="was it removed? Put it back, then start again; nothing was sent without a signature",
            ) from error

    def check_present(self) -> None:
        """The token answers now. For a TLS handshake, which would say only that it failed.

        :raises KeyUnavailable: if it does not.
        """
        pkcs11 = _library()
        with _looking(self.uri, "private", self.uri.place):
            self._handle[pkcs11.Attribute.KEY_TYPE]

    def __repr__(self) -> str:
        return f"<key in {self.uri.place}>"

    def __copy__(self) -> NoReturn:
        raise TypeError("a key in a token cannot be copied")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a key in a token cannot be copied")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key in a token cannot be pickled")


class TokenSigningKey(_Held, ed25519.Ed25519PrivateKey):
    """Ed25519, for statements, requests and checkpoints."""

    def sign(self, data: Any) -> bytes:
        return self._sign(bytes(data), "EDDSA")

    def public_key(self) -> ed25519.Ed25519PublicKey:
        found: ed25519.Ed25519PublicKey = self._public
        return found

    private_bytes = private_bytes_raw = _refused


class TokenTlsKey(_Held, ec.EllipticCurvePrivateKey):
    """ECDSA P-256, for TLS and for the root. The token gets a hash: not every one can hash."""

    @property
    def curve(self) -> ec.EllipticCurve:
        return ec.SECP256R1()

    @property
    def key_size(self) -> int:
        return 256

    def sign(self, data: Any, signature_algorithm: ec.EllipticCurveSignatureAlgorithm) -> bytes:
        algorithm = signature_algorithm.algorithm
        if isinstance(algorithm, Prehashed) or not isinstance(algorithm, hashes.SHA256):
            raise KeyUnavailable("this key signs with SHA-256 only", where=self.uri.place)
        digest = hashes.Hash(hashes.SHA256())
        digest.update(bytes(data))
        pair = self._sign(digest.finalize(), "ECDSA")
        half = len(pair) // 2
        return encode_dss_signature(int.from_bytes(pair[:half], "big"), int.from_bytes(pair[half:], "big"))

    def public_key(self) -> ec.EllipticCurvePublicKey:
        found: ec.EllipticCurvePublicKey = self._public
        return found

    exchange = private_bytes = private_numbers = _refused


TokenKey = TokenSigningKey | TokenTlsKey


def load(uri: TokenUri, where: str) -> TokenKey:
    """The key at an address. A token that has it and a library are needed from here on."""
    pkcs11, session = _library(), _session(uri, where)
    if uri.object is None and uri.id is None:
        raise ConfigError("this URI names a token and no key", where=where, hint="add ;object=LABEL or ;id=%01")
    named = {"label": uri.object, "id": uri.id}
    found = []
    for kind, words in ((pkcs11.ObjectClass.PRIVATE_KEY, "private"), (pkcs11.ObjectClass.PUBLIC_KEY, "public")):
        with _looking(uri, words, where):
            found.append(session.get_key(object_class=kind, **{k: v for k, v in named.items() if v is not None}))
    return _known(uri, found[0], found[1], where)


@contextmanager
def _looking(uri: TokenUri, words: str, where: str) -> Iterator[None]:
    pkcs11 = _library()
    try:
        yield
    except pkcs11.NoSuchKey as error:
        hint = "the maker's tool lists what is in it; `init` makes a key, a certificate belongs to one key"
        raise ConfigError(f"there is no such {words} key in {uri.place}", where=where, hint=hint) from error
    except pkcs11.MultipleObjectsReturned as error:
        raise ConfigError(f"several {words} keys match {uri.place}", where=where, hint="add ;id= to the URI") from error
    except pkcs11.PKCS11Error as error:
        hint = "was it removed? Put it back, then start again"
        raise KeyUnavailable(f"{uri.place} cannot be searched ({_kind(error)})", where=where, hint=hint) from error


def _known(uri: TokenUri, private: Any, public: Any, where: str) -> TokenKey:
    pkcs11 = _library()
    kind, point = private.key_type, _unwrapped(bytes(public[pkcs11.Attribute.EC_POINT]) if _is_curve(public) else b"")
    try:
        if kind == pkcs11.KeyType.EC_EDWARDS:
            return TokenSigningKey(uri, private, ed25519.Ed25519PublicKey.from_public_bytes(point))
        if kind == pkcs11.KeyType.EC:
            return TokenTlsKey(uri, private, ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point))
    except ValueError:
        pass
    hint = "`init --token` makes keys of the right kinds"
    raise ConfigError(f"the key in {uri.place} is neither Ed25519 nor ECDSA P-256", where=where, hint=hint)


def _is_curve(public: Any) -> bool:
    pkcs11 = _library()
    return public.key_type in (pkcs11.KeyType.EC, pkcs11.KeyType.EC_EDWARDS)


def _unwrapped(point: bytes) -> bytes:
    """Most modules give the point as a DER octet string, some as it is."""
    wrapped = len(point) > 2 and point[0] == 0x04 and point[1] == len(point) - 2
    return point[2:] if wrapped else point


def make_signing_key(uri: TokenUri, name: str, rng: Randomness) -> TokenSigningKey:
    key = _make(uri, name, rng, "EC_EDWARDS", "EC_EDWARDS_KEY_PAIR_GEN", _ED25519)
    if not isinstance(key, TokenSigningKey):
        raise ConfigError("the token made another key than Ed25519", where=uri.place)
    return key


def make_tls_key(uri: TokenUri, name: str, rng: Randomness) -> TokenTlsKey:
    key = _make(uri, name, rng, "EC", "EC_KEY_PAIR_GEN", _P256)
    if not isinstance(key, TokenTlsKey):
        raise ConfigError("the token made another key than ECDSA P-256", where=uri.place)
    return key


def _make(uri: TokenUri, name: str, rng: Randomness, kind: str, mechanism: str, curve: bytes) -> TokenKey:
    """A new pair in the token: for signatures only, and never to be read out."""
    if uri.object is not None or uri.id is not None:
        raise ConfigError("this URI names a key", where=uri.place, hint="leave object and id out: a new one is made")
    pkcs11, session = _library(), _session(uri, uri.place)
    attribute = pkcs11.Attribute
    placed = replace(uri, object=name, id=rng.bytes(8))
    never = {attribute.SENSITIVE: True, attribute.EXTRACTABLE: False, attribute.PRIVATE: True}
    try:
        parameters = session.create_domain_parameters(pkcs11.KeyType[kind], {attribute.EC_PARAMS: curve}, local=True)
        public, private = parameters.generate_keypair(
            mechanism=pkcs11.Mechanism[mechanism],
            store=True,
            label=name,
            id=placed.id,
            private_template={**never, attribute.SIGN: True, attribute.DERIVE: False},
            public_template={attribute.VERIFY: True, attribute.DERIVE: False},
        )
        readable = private[attribute.EXTRACTABLE] or not private[attribute.SENSITIVE]
    except pkcs11.PKCS11Error as error:
        hint = "it needs Ed25519 (CKM_EDDSA) for signing and ECDSA P-256 for TLS: ask its maker"
        raise ConfigError(f"the token makes no {kind} key ({_kind(error)})", where=uri.place, hint=hint) from error
    if readable:
        private.destroy()
        public.destroy()
        raise ConfigError("the token made a key that can be read out of it", where=uri.place, hint="ask its maker")
    return _known(placed, private, public, uri.place)
