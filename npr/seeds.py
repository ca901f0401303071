"""Every random draw of the learning core comes from one seed and the place where it is used.

None of this is secret: the same (seed, site, round) must give the same draws in the lab and in a real federation.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *parts: str | int) -> int:
    """Return 63 bits that depend on `seed` and on every part, in order."""
    digest = hashlib.sha256()
    for part in (seed, *parts):
        # Type and length go in first, so that ("ab", "c") and ("a", "bc"), or 1 and "1", differ.
        encoded = str(part).encode()
        digest.update(f"{type(part).__name__}:{len(encoded)}:".encode() + encoded)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """Return a torch generator seeded with `derive`."""
    return torch.Generator().manual_seed(derive(seed, *parts))
