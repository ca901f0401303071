"""RFC 6962 section 2.1 Merkle trees over SHA-256: roots, inclusion and consistency proofs, made and checked.

Shared by the privacy log (entries) and by secure aggregation (share lists, upload chunks). Every function here works
on 32-byte *leaf hashes*; `leaf_hash` makes one from data. Hash lengths are checked before anything else, because a
verifier that hashes whatever it is given accepts "proofs" made of short or empty strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from lazaret.errors import LocalProtocolError, VerificationFailed

HASH_SIZE: Final = 32
EMPTY_ROOT: Final = sha256().digest()
MAX_PATH: Final = 63  # a tree of 2^63 leaves; C2SP tlog-witness allows no more lines in a proof

_LEAF: Final = b"\x00"
_NODE: Final = b"\x01"


def leaf_hash(data: bytes | bytearray | memoryview) -> bytes:
    """MTH({d}) = SHA-256(0x00 || d)."""
    hasher = sha256(_LEAF)
    hasher.update(data)
    return hasher.digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """SHA-256(0x01 || left || right)."""
    return sha256(_NODE + left + right).digest()


def _largest_power_below(size: int) -> int:
    """k of RFC 6962: the largest power of two smaller than `size` (`size` > 1)."""
    return 1 << ((size - 1).bit_length() - 1)


class CompactRange:
    """The frontier of a growing tree: one hash per complete subtree, so the root costs O(log n) space.

    `extend` is the tight loop of the log verifier: two hashes for each leaf on average.
    """

    __slots__ = ("peaks", "size")

    def __init__(self) -> None:
        self.size = 0
        self.peaks: list[bytes] = []  # largest subtree first

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Take more leaf hashes."""
        peaks, size = self.peaks, self.size
        pop, push, hasher, prefix = peaks.pop, peaks.append, sha256, _NODE
        for leaf in leaves:
            value, carry = leaf, size
            # As many complete subtrees merge as the old size has ones at its end.
            while carry & 1:
                value = hasher(prefix + pop() + value).digest()
                carry >>= 1
            push(value)
            size += 1
        self.size = size

    def root(self) -> bytes:
        """The root over all leaves so far."""
        if not self.peaks:
            return EMPTY_ROOT
        value = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            value = node_hash(peak, value)
        return value


class Tree:
    """A growing tree that keeps the hashes of its complete subtrees, so any proof at any past size is O(log^2 n)."""

    __slots__ = ("_levels",)

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self._levels: list[list[bytes]] = [[]]
        self.extend(leaves)

    @property
    def size(self) -> int:
        """How many leaves there are."""
        return len(self._levels[0])

    def leaf(self, index: int) -> bytes:
        """One leaf hash."""
        return self._levels[0][index]

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Take more leaf hashes, each 32 bytes."""
        levels = self._levels
        bottom = levels[0]
        for leaf in leaves:
            if len(leaf) != HASH_SIZE:
                raise LocalProtocolError(f"a leaf hash is {HASH_SIZE} bytes, not {len(leaf)}")
            bottom.append(leaf)
            depth, row = 0, bottom
            while not len(row) & 1:
                depth += 1
                if depth == len(levels):
                    levels.append([])
                parent = levels[depth]
                parent.append(sha256(_NODE + row[-2] + row[-1]).digest())
                row = parent

    def _hash(self, start: int, end: int) -> bytes:
        """MTH(D[start:end]); every range RFC 6962 asks for starts on a boundary of the subtrees kept here."""
        width = end - start
        if width & (width - 1) == 0 and start % width == 0:
            depth = width.bit_length() - 1
            return self._levels[depth][start >> depth]
        middle = start + _largest_power_below(width)
        return node_hash(self._hash(start, middle), self._hash(middle, end))

    def _size(self, size: int | None) -> int:
        if size is None:
            return self.size
        if not 0 <= size <= self.size:
            raise LocalProtocolError(f"no tree of size {size}: there are {self.size} leaves")
        return size

    def root(self, size: int | None = None) -> bytes:
        """The root at `size` leaves (default: now)."""
        size = self._size(size)
        return self._hash(0, size) if size else EMPTY_ROOT

    def inclusion_path(self, index: int, size: int | None = None) -> tuple[bytes, ...]:
        """PATH(index, D[size]) of RFC 6962 section 2.1.1, lowest sibling first."""
        size = self._size(size)
        if not 0 <= index < size:
            raise LocalProtocolError(f"no leaf {index} in a tree of size {size}")
        path = []
        start, end = 0, size
        while end - start > 1:
            middle = start + _largest_power_below(end - start)
            if index < middle:
                path.append(self._hash(middle, end))
                end = middle
            else:
                path.append(self._hash(start, middle))
                start = middle
        return tuple(reversed(path))

    def consistency_path(self, old_size: int, size: int | None = None) -> tuple[bytes, ...]:
        """PROOF(old_size, D[size]) of RFC 6962 section 2.1.2; empty where nothing has to be shown."""
        size = self._size(size)
        if not 0 <= old_size <= size:
            raise LocalProtocolError(f"no consistency from size {old_size} to {size}")
        if old_size in (0, size):
            return ()
        path = []
        start, end, whole = 0, size, True
        while old_size != end:
            middle = start + _largest_power_below(end - start)
            if old_size <= middle:
                path.append(self._hash(middle, end))
                end = middle
            else:
                path.append(self._hash(start, middle))
                start, whole = middle, False
        if not whole:
            path.append(self._hash(start, end))
        return tuple(reversed(path))


def root(leaf_hashes: Iterable[bytes]) -> bytes:
    """The root over leaf hashes; of no leaves it is SHA-256 of nothing."""
    frontier = CompactRange()
    frontier.extend(leaf_hashes)
    return frontier.root()


def _check_hashes(*hashes: bytes) -> None:
    if any(len(value) != HASH_SIZE for value in hashes):
        raise VerificationFailed("a hash in the proof is not 32 bytes")


def verify_inclusion(*, leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> None:
    """Check that the leaf hash `leaf` is number `index` of the `size` leaves under `root` (RFC 9162 section 2.1.3.2).

    :raises VerificationFailed: if it is not shown to be.
    """
    _check_hashes(leaf, root, *path)
    if not 0 <= index < size:
        raise VerificationFailed("the proof names a leaf outside the tree")
    node, last, value = index, size - 1, leaf
    for sibling in path:
        if last == 0:
            raise VerificationFailed("inclusion proof is too long")
        # A right child, or the last node of its level, has its sibling on the left; levels on which it has none are
        # skipped.
        if node & 1 or node == last:
            value = node_hash(sibling, value)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            value = node_hash(value, sibling)
        node, last = node >> 1, last >> 1
    if last:
        raise VerificationFailed("inclusion proof is too short")
    if value != root:
        raise VerificationFailed("inclusion proof does not lead to the root")


def verify_consistency(
    *, old_size: int, old_root: bytes, new_size: int, new_root: bytes, path: Sequence[bytes]
) -> None:
    """Check that the tree `old_size`, `old_root` is a prefix of `new_size`, `new_root` (RFC 9162 section 2.1.4.2).

    :raises VerificationFailed: if it is not shown to be.
    """
    _check_hashes(old_root, new_root, *path)
    if not 0 <= old_size <= new_size:
        raise VerificationFailed("a tree cannot shrink")
    if old_size in (0, new_size):
        if path:
            raise VerificationFailed("consistency proof must be empty")
        if old_root != (new_root if old_size == new_size else EMPTY_ROOT):
            raise VerificationFailed("consistency proof does not lead to the root")
        return
    # Where the old tree is itself one complete subtree, its root is the start and is not repeated in the path.
    steps = list(path) if old_size & (old_size - 1) else [old_root, *path]
    if not steps:
        raise VerificationFailed("consistency proof is too short")
    node, last = old_size - 1, new_size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    old_value = new_value = steps[0]
    for sibling in steps[1:]:
        if last == 0:
            raise VerificationFailed("consistency proof is too long")
        if node & 1 or node == last:
            old_value = node_hash(sibling, old_value)
            new_value = node_hash(sibling, new_value)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            new_value = node_hash(new_value, sibling)
        node, last = node >> 1, last >> 1
    if last:
        raise VerificationFailed("consistency proof is too short")
    if old_value != old_root or new_value != new_root:
        raise VerificationFailed("consistency proof does not lead to the root")
