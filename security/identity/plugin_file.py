"""The file of a method of one's own: read once, and what was read is what is hashed, and then what runs.

A run may be trained by a method that no release has (docs/methods.md). The manifest pins the name and the SHA-256 of
its file, each hospital's policy approves the same digest, and the process that trains asks for the bytes here. They are
never read a second time: a file that is swapped after the check has no effect.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Final

from lazaret.errors import ConfigError
from security.identity.manifest import PluginFile

MAX_PLUGIN_BYTES: Final = 1024 * 1024


def read_plugin(path: Path) -> bytes:
    """The bytes of a plugin.

    :raises ConfigError: if there is no such file, or it is none that could be one.
    """
    try:
        # A pipe of this name would wait for its other end for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            source = file.read(MAX_PLUGIN_BYTES + 1) if regular else b""
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"the plugin cannot be read: {reason}", where=str(path)) from error
    if not regular or len(source) > MAX_PLUGIN_BYTES:
        raise ConfigError(f"is no Python file of up to {MAX_PLUGIN_BYTES} bytes", where=str(path))
    return source


def pinned_plugin(folder: Path, pinned: PluginFile) -> bytes:
    """The bytes of the plugin that a manifest pins, from the hospital's folder.

    :raises ConfigError: if it is not there, or is another file. Names both digests.
    """
    path = folder / pinned.name
    try:
        source = read_plugin(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}; the manifest pins the plugin {pinned.name} with SHA-256 {pinned.sha256}, here is none",
            where=str(path),
            hint="ask the consortium for the file, read it, and put it into the folder [site] plugins",
        ) from error
    if (found := digest(source)) != pinned.sha256:
        raise ConfigError(
            f"the plugin {pinned.name} has SHA-256 {found}, the manifest pins {pinned.sha256}",
            where=str(path),
            hint="ask the consortium for the file that it has signed for",
        )
    return source


def digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()
