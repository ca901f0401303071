"""Every random draw of the learning core comes from one seed and the place where it is used.

The lab's seed is public. A hospital's own is a secret (`secret_seed`): whoever knew its order of images and its
augmentation could compare an update, or a sum, with what a guessed image would have given. The same (seed, site, round)
gives the same draws in the lab and in a real federation.
"""

from __future__ import annotations

import hashlib
import hmac

import torch

from security import labels


def derive(seed: int, *parts: str | int) -> int:
    """Return 63 bits that depend on `seed` and on every part, in order."""
    digest = hashlib.sha256()
    for part in (seed, *parts):
        # Type and length go in first, so that ("ab", "c") and ("a", "bc"), or 1 and "1", differ.
        encoded = str(part).encode()
        digest.update(f"{type(part).__name__}:{len(encoded)}:".encode() + encoded)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def secret_seed(seed: int, key: bytes) -> int:
    """The seed of a hospital's own draws: 63 bits that depend on the public seed and on a key that stays there."""
    return int.from_bytes(hmac.digest(key, labels.TRAINING_SEED + str(seed).encode(), "sha256")[:8], "big") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """Return a torch generator seeded with `derive`."""
    return torch.Generator().manual_seed(derive(seed, *parts))
