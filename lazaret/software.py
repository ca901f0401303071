"""What is running here, as digests for the privacy log: our own files, and the versions of everything we use."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pwd
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lazaret.errors import ConfigError

SHIPPED: Final = ("assets", "templates")
_BROUGHT_BY_VENV: Final = ("pip", "setuptools", "wheel")
PACKAGES: Final = ("coordinator", "lazaret", "npr", "protos", "security", "site_agent")


def version() -> str:
    """The version of the installed distribution."""
    try:
        return importlib.metadata.version("lazaret")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def account() -> str:
    """The account we run under: all that a process knows about who started it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"account {os.getuid()}"


def _ours(path: Path) -> bool:
    """A module, or a file of the pages and of the report: what the distribution lists as package data."""
    return path.suffix == ".py" or (path.is_file() and path.parent.name in SHIPPED)


@cache
def package_digest() -> str:
    """SHA-256 over the names and contents of all our modules and of what ships with them, in order. Read once."""
    digest = hashlib.sha256()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(found for found in Path(folder).rglob("*") if _ours(found)):
                lines = (
                    f"{name}/{path.relative_to(folder).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
                )
                digest.update(lines.encode())
    return digest.hexdigest()


def dependencies_digest() -> str:
    """SHA-256 over `name==version` of every installed distribution, sorted."""
    lines = (f"{name}=={found}" for name, found in _installed().items())
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


SBOM: Final = "sbom.cdx.json"
SBOM_FOLDER: Final = "share/lazaret"


def sbom_path() -> Path:
    """Where the `install` of a release leaves the bill of materials that it installed from (docs/releases.md)."""
    return Path(sys.prefix) / SBOM_FOLDER / SBOM


def sbom_digest() -> str | None:
    """SHA-256 of this environment's bill of materials; None if it was not installed from a release."""
    path = sbom_path()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def differences() -> tuple[str, ...]:
    """How the environment differs from its bill of materials, a package a line; nothing if it has none.

    :raises ConfigError: if the bill of materials cannot be read.
    """
    path = sbom_path()
    if not path.exists():
        return ()
    try:
        listed = {one["name"]: one["version"] for one in json.loads(path.read_bytes())["components"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError("is not a bill of materials", where=str(path), hint="install the release again") from None
    here = {name: found for name, found in _installed().items() if name in listed or name not in _BROUGHT_BY_VENV}
    return tuple(
        f"{name}: {here.get(name, 'none')} is installed, {listed.get(name, 'none')} is listed"
        for name in sorted(here.keys() | listed.keys())
        if here.get(name) != listed.get(name)
    )


def image_digest() -> str | None:
    """The container image, as its launcher states it in `LAZARET_IMAGE` (`sha256:...`).

    :raises ConfigError: if it states something else.
    """
    stated = os.environ.get("LAZARET_IMAGE", "")
    if not stated:
        return None
    if not (found := re.fullmatch(r"(?:.*@)?sha256:([0-9a-f]{64})", stated)):
        raise ConfigError(
            "is not the digest of an image", where="LAZARET_IMAGE", hint="sha256: and 64 hexadecimal digits, or nothing"
        )
    return found[1]


def _installed() -> Mapping[str, str]:
    """Every distribution on the path and its version; the first one wins, as it does for imports."""
    return _installed_on(tuple(sys.path))


@cache
def _installed_on(path: tuple[str, ...]) -> Mapping[str, str]:
    """Read once in a process: what it runs is what was there when it started."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions(path=list(path)):
        name, number = _named(one.read_text("METADATA") or one.read_text("PKG-INFO") or one.read_text("") or "")
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), number)
    return MappingProxyType(found)


def _named(metadata: str) -> tuple[str, str]:
    """Name and version from the headers. The library would parse the description below them, too: a second in all."""
    headers = dict(line.partition(": ")[::2] for line in metadata.partition("\n\n")[0].splitlines())
    return headers.get("Name", ""), headers.get("Version", "")
