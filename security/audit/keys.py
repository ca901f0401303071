"""Where an auditor's keys come from: the signed manifest in a log folder, pinned by the consortium's root or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from security.audit.findings import Finding
from security.audit.roster import Roster
from security.audit.store import LogFolder
from security.audit.verify import Keys
from security.errors import ConfigError, ToolkitError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from security.consortium.manifest import Manifest


def keys_for(path: Path, root_key: Path | None) -> Keys:
    """The roster of a log folder's own `manifest.json`, checked where the auditor brought the consortium's root."""
    root = _root(root_key)
    manifest = LogFolder(path).manifest
    if not manifest.exists():
        return Keys(roster=None, pinned=False)
    try:
        return Keys(roster=_roster(manifest, root), pinned=root is not None)
    except ToolkitError as error:
        return Keys(roster=None, pinned=False, problem=Finding(code="ManifestRejected", log="", detail=error.message))


def roster_from(manifest: Path, root_key: Path | None) -> Roster:
    """The roster of a manifest file that the auditor gave."""
    return _roster(manifest, _root(root_key))


def manifest_from(manifest: Path, root_key: Path | None) -> Manifest:
    """A manifest file that the auditor gave."""
    return _manifest(manifest, _root(root_key))


def _root(root_key: Path | None) -> Certificate | None:
    from security.pki import read_certificate

    if root_key is None:
        return None
    try:
        return read_certificate(root_key.read_text(encoding="ascii"), str(root_key))
    except (OSError, UnicodeDecodeError, ToolkitError) as error:
        raise ConfigError("the root certificate cannot be read", where=str(root_key)) from error


def _roster(manifest_path: Path, root: Certificate | None) -> Roster:
    from security.consortium.views import audit_roster

    return audit_roster(_manifest(manifest_path, root))


def _manifest(path: Path, root: Certificate | None) -> Manifest:
    """Dates are not checked: a log is audited years after its certificates have ended."""
    # pydantic and the X.509 code take longer to import than a small log takes to verify.
    from security.consortium.manifest import unseal
    from security.consortium.rules import check_federation, check_signature

    manifest, signature = unseal(path.read_bytes(), str(path))
    if root is not None:
        check_signature(manifest, signature, root)
        check_federation(manifest, root)
    return manifest
