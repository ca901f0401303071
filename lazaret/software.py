"""What is running here, as digests for the privacy log: our own files, and the versions of everything we use."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
from pathlib import Path
from typing import Final

SHIPPED: Final = ("assets", "templates")
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


def package_digest() -> str:
    """SHA-256 over the names and contents of all our modules and of what ships with them, in order."""
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
    found = {
        f"{(found.metadata['Name'] or '').lower()}=={found.version}" for found in importlib.metadata.distributions()
    }
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
