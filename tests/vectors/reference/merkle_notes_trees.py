"""RFC 6962 section 2.1 as it is written there: recursive, slow, and with nothing but SHA-256."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

# The eight inputs that Certificate Transparency implementations test with.
INPUTS = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]


def mth(data: list[bytes]) -> bytes:
    """The Merkle tree hash of a list of inputs."""
    if not data:
        return sha256(b"").digest()
    if len(data) == 1:
        return sha256(b"\x00" + data[0]).digest()
    k = split(len(data))
    return sha256(b"\x01" + mth(data[:k]) + mth(data[k:])).digest()


def split(n: int) -> int:
    """The largest power of two smaller than n."""
    k = 1
    while k * 2 < n:
        k *= 2
    return k


def path(m: int, data: list[bytes]) -> list[bytes]:
    """PATH(m, D[n]) of section 2.1.1."""
    if len(data) == 1:
        return []
    k = split(len(data))
    if m < k:
        return [*path(m, data[:k]), mth(data[k:])]
    return [*path(m - k, data[k:]), mth(data[:k])]


def proof(m: int, data: list[bytes]) -> list[bytes]:
    """PROOF(m, D[n]) of section 2.1.2, for 0 < m < n."""
    return _subproof(m, data, True)


def _subproof(m: int, data: list[bytes], whole: bool) -> list[bytes]:
    if m == len(data):
        return [] if whole else [mth(data)]
    k = split(len(data))
    if m <= k:
        return [*_subproof(m, data[:k], whole), mth(data[k:])]
    return [*_subproof(m - k, data[k:], False), mth(data[:k])]


def _hexes(hashes: list[bytes]) -> list[str]:
    return [value.hex() for value in hashes]


def _inclusion(index: int, size: int) -> dict[str, Any]:
    data = INPUTS[:size]
    return {
        "comment": f"leaf {index} of {size}",
        "expect": "ok",
        "kind": "inclusion",
        "leaf": sha256(b"\x00" + data[index]).hexdigest(),
        "index": index,
        "size": size,
        "path": _hexes(path(index, data)),
        "root": mth(data).hex(),
    }


def _consistency(old: int, new: int) -> dict[str, Any]:
    return {
        "comment": f"from {old} to {new} leaves",
        "expect": "ok",
        "kind": "consistency",
        "old_size": old,
        "old_root": mth(INPUTS[:old]).hex(),
        "new_size": new,
        "new_root": mth(INPUTS[:new]).hex(),
        "path": [] if old in (0, new) else _hexes(proof(old, INPUTS[:new])),
    }


def _wrong(case: dict[str, Any], fault: str, **changes: Any) -> dict[str, Any]:
    return {**case, **changes, "expect": "verification", "comment": f"{case['comment']}: {fault}"}


def _negative() -> Iterator[tuple[str, dict[str, Any]]]:
    good = _inclusion(4, 7)
    steps = good["path"]
    yield "inclusion_wrong_index", _wrong(good, "another index", index=3)
    yield "inclusion_index_outside", _wrong(good, "an index outside the tree", index=7)
    yield "inclusion_wrong_size", _wrong(good, "another size", size=6)
    yield "inclusion_short", _wrong(good, "a step is missing", path=steps[:-1])
    yield "inclusion_long", _wrong(good, "a step too many", path=[*steps, "00" * 32])
    yield "inclusion_swapped", _wrong(good, "steps in another order", path=[steps[1], steps[0], *steps[2:]])
    yield "inclusion_truncated_hash", _wrong(good, "a hash of 31 bytes", path=[steps[0][:-2], *steps[1:]])
    yield "inclusion_wrong_root", _wrong(good, "another root", root="00" * 32)
    yield "inclusion_short_root", _wrong(good, "a root of 12 bytes", root="00" * 12)
    grown = _consistency(3, 7)
    steps = grown["path"]
    yield "consistency_shrinks", _wrong(grown, "the tree shrinks", old_size=7, new_size=3)
    yield "consistency_short", _wrong(grown, "a step is missing", path=steps[:-1])
    yield "consistency_long", _wrong(grown, "a step too many", path=[*steps, "00" * 32])
    yield "consistency_empty", _wrong(grown, "no proof at all", path=[])
    yield "consistency_old_root", _wrong(grown, "another old root", old_root="00" * 32)
    yield "consistency_new_root", _wrong(grown, "another new root", new_root="00" * 32)
    yield "consistency_needless", _wrong(_consistency(5, 5), "a proof where none is due", path=["00" * 32])
    yield "consistency_same_size_fork", _wrong(_consistency(5, 5), "two roots of one size", new_root="00" * 32)
    yield "consistency_empty_tree", _wrong(_consistency(0, 5), "an empty tree with a root", old_root="00" * 32)


def merkle() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every vector of the folder `merkle`."""
    for size in range(len(INPUTS) + 1):
        leaves = [data.hex() for data in INPUTS[:size]]
        yield (
            f"root_{size}",
            {
                "comment": f"{size} leaves",
                "expect": "ok",
                "kind": "root",
                "data": leaves,
                "root": mth(INPUTS[:size]).hex(),
            },
        )
    for size in (1, 2, 3, 5, 7, 8):
        for index in range(size):
            yield f"inclusion_{index}_of_{size}", _inclusion(index, size)
    for new in (1, 3, 4, 6, 7, 8):
        for old in range(new + 1):
            yield f"consistency_{old}_to_{new}", _consistency(old, new)
    yield from _negative()
