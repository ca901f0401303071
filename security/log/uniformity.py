"""Does a vector look like noise? The tripwire on everything masked that leaves a site.

Pearson's chi-square over byte values. A masked upload is uniform, so a p-value below what the egress filter asks for
(`security.log.egress.LEAST_UNIFORMITY`) means that masking did not happen. Passing proves nothing, which is why this
is a tripwire and not a proof.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc

_EXPECTED: Final = 16  # the smallest expected count of a bin; below it the chi-square law does not hold in the tail
_CHUNK: Final = 1 << 16  # as whole numbers, half a megabyte: stays in the cache, and in the heap (lazaret/malloc.py)


def _byte_counts(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Count byte values two at a time: half as many look-ups as single bytes."""
    pairs = data[: len(data) // 2 * 2].view("<u2")
    counts = np.zeros(65_536, dtype=np.int64)
    scratch = np.empty(min(_CHUNK, len(pairs)), dtype=np.intp)
    for start in range(0, len(pairs), _CHUNK):
        part = scratch[: len(pairs) - start]
        np.copyto(part, pairs[start : start + _CHUNK])
        counts += np.bincount(part, minlength=65_536)
    table = counts.reshape(256, 256)
    last = np.bincount(data[len(pairs) * 2 :], minlength=256)
    return np.asarray(table.sum(axis=0) + table.sum(axis=1) + last, dtype=np.int64)


def p_value(data: bytes | bytearray | memoryview) -> float:
    """Return the probability that uniform bytes are as uneven as these; 1.0 if they are too few to tell.

    Short vectors are counted by half bytes, so that every bin still expects enough.
    """
    values = np.frombuffer(data, dtype=np.uint8)
    counts = _byte_counts(values)
    if len(values) < 256 * _EXPECTED:
        table = counts.reshape(16, 16)
        counts = table.sum(axis=0) + table.sum(axis=1)
    expected = counts.sum() / len(counts)
    if expected < _EXPECTED:
        return 1.0
    statistic = float(((counts - expected) ** 2).sum() / expected)
    return float(chdtrc(len(counts) - 1, statistic))
