"""Which manifests count where a consortium has turned on ML-DSA: those that its signature reaches.

Every version names the digest of the one before it. So one ML-DSA signature vouches for all earlier versions, as far as
none between them is missing. A party may skip versions; what its folder lacks, the folder of another may have, and what
only a missing version could tell is not held against anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from security.identity.manifest import Manifest

_FORGED: Final = "is not signed with the root's ML-DSA key, and no later version names it"
_UNKNOWN: Final = "is from before the root's ML-DSA signature, and a version between them is not here"


def unvouched(
    found: Mapping[str, Manifest], known: str | None, beside: Iterable[Manifest] = ()
) -> list[tuple[str, str, str]]:
    """Manifests of a folder that a forger of ECDSA signatures could have made: name, code of the finding, reason.

    One that names the root's ML-DSA key has its signature. One that does not counts if the version after it, which
    counts, names its digest; and if the auditor has not brought the key, also before the first version that names it.
    All others are rejected, except where a version that is missing could name them: that cannot be decided.

    :param found: the folder's manifests by the name that entries have for them.
    :param known: the root's ML-DSA key, if the auditor has brought it.
    :param beside: manifests of other folders. They vouch for those of this one, and never speak against them by
        themselves: the root's signature is on all that counts here.
    """
    own = min((one.version for one in found.values() if one.root_ml_dsa is not None), default=None)
    key = known or next((one.root_ml_dsa for one in found.values() if one.version == own), None)
    if key is None:
        return []
    named, lowest = _vouched([*found.values(), *beside], key)
    wrong = []
    for digest, manifest in found.items():
        before = known is None and own is not None and manifest.version < own
        if before or manifest.root_ml_dsa == key or manifest.digest.hex() in named:
            continue
        # There is one manifest for each version, and no way back from ML-DSA.
        forged = manifest.root_ml_dsa is not None or (lowest is not None and manifest.version >= lowest)
        wrong.append((digest, "ManifestRejected", _FORGED) if forged else (digest, "OneSignature", _UNKNOWN))
    return wrong


def _vouched(manifests: Iterable[Manifest], key: str) -> tuple[set[str], int | None]:
    """The digests that ML-DSA signatures lead back to, and the lowest version that they reach."""
    by_digest = {one.digest.hex(): one for one in manifests}
    waiting = [one for one in by_digest.values() if one.root_ml_dsa == key]
    named, versions = set[str](), set[int]()
    while waiting:
        one = waiting.pop()
        versions.add(one.version)
        if one.previous is None or one.previous in named:
            continue
        named.add(one.previous)
        versions.add(one.version - 1)
        if one.previous in by_digest:
            waiting.append(by_digest[one.previous])
    return named, min(versions, default=None)
