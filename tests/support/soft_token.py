"""A PKCS#11 token in files (softhsm2), made anew for a test process.

A module reads its settings once in a process. So all tests of a process share one folder, with a token for each label.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from security.identity import token

PIN = "2468-not-in-any-message"
_PLACES = ("/usr/lib/softhsm/libsofthsm2.so", "/usr/lib64/softhsm/libsofthsm2.so", "/usr/lib64/pkcs11/libsofthsm2.so")
MODULE = next((place for place in _PLACES if Path(place).exists()), None)
_MISSING = MODULE is None or shutil.which("softhsm2-util") is None or find_spec("pkcs11") is None
needs_softhsm = pytest.mark.skipif(_MISSING, reason="softhsm2 or python-pkcs11 is not installed")

LABELS = ("hospital", "coordinator", "consortium", "lost", "locked", "pulled")


class SoftTokens:
    """Tokens in one folder, with one PIN."""

    def __init__(self, folder: Path, labels: Sequence[str] = LABELS) -> None:
        self.folder = folder
        self.pin_file = folder / "pin"
        self.pin_file.write_text(PIN + "\n")
        self.pin_file.chmod(0o600)
        self.settings = folder / "softhsm2.conf"
        store = folder / "tokens"
        store.mkdir()
        self.settings.write_text(f"directories.tokendir = {store}\nobjectstore.backend = file\nlog.level = ERROR\n")
        self._store = store
        self._places = {label: self._make(label) for label in labels}

    def _make(self, label: str) -> Path:
        before = set(self._store.iterdir())
        words = ["softhsm2-util", "--init-token", "--free", "--label", label, "--pin", PIN, "--so-pin", "not-used-here"]
        subprocess.run(words, check=True, capture_output=True, env=os.environ | {"SOFTHSM2_CONF": str(self.settings)})
        (made,) = set(self._store.iterdir()) - before
        return made

    def uri(self, label: str = "hospital") -> str:
        return f"pkcs11:token={label}?module-path={MODULE}&pin-source=file:{self.pin_file}"

    def remove(self, label: str) -> None:
        """Pull the token out."""
        self._places[label].rename(self.folder / label)

    def put_back(self, label: str) -> None:
        (self.folder / label).rename(self._places[label])
        if token._sessions:
            # softhsm2 in this process has lost count of its tokens: it begins anew, as in a new process.
            import pkcs11

            token._sessions.clear()
            pkcs11.lib(MODULE).finalize()


@cache
def _made() -> SoftTokens:
    folder = Path(tempfile.mkdtemp(prefix="lazaret-token-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SoftTokens(folder)


def soft_tokens() -> SoftTokens:
    """Those of this process, and of the processes that it starts; a test's environment is its own (conftest)."""
    made = _made()
    os.environ["SOFTHSM2_CONF"] = str(made.settings)
    return made
