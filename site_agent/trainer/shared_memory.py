"""Vectors and documents as descriptors of memory that is sealed: what was checked cannot be changed afterwards.

Neither side copies a vector again. A descriptor that comes from the other side is looked at before it is mapped.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final

import numpy as np

from lazaret.errors import CodecError
from security.secagg.layout import Vector

MAX_DOCUMENT: Final = 1 << 23
_NOEXEC_SEAL: Final = 0x0008  # MFD_NOEXEC_SEAL, from Linux 6.3 on
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def share(content: Vector | bytes) -> int:
    """A descriptor of memory that holds this, and that nobody can change from now on."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("lazaret", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("lazaret", flags)
    try:
        # Four bytes each: floats, or with shared noise whole numbers (`shared_vector` says which).
        data = content if isinstance(content, bytes) else np.ascontiguousarray(content, dtype=_words_of(content)).data
        left = memoryview(data).cast("B")
        while left:
            left = left[os.write(descriptor, left) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _words_of(content: Vector) -> str:
    return "<i4" if content.dtype.kind == "i" else "<f4"


def shared_vector(descriptor: int, words: int, *, whole: bool = False) -> Vector:
    """The vector behind a descriptor, without a copy. Takes the descriptor.

    :param whole: whether it holds whole numbers: the noisy units of shared noise.
    :raises CodecError: if it has another length, or can still be changed.
    """
    data = _mapped(descriptor, least=4 * words, most=4 * words)
    return np.frombuffer(data, dtype="<i4" if whole else "<f4")


def shared_document(descriptor: int) -> bytes:
    """The bytes behind a descriptor. Takes the descriptor."""
    return bytes(_mapped(descriptor, least=1, most=MAX_DOCUMENT))


def _mapped(descriptor: int, *, least: int, most: int) -> mmap.mmap:
    try:
        size = os.fstat(descriptor).st_size
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0  # not memory at all
        if seals & _SEALS != _SEALS:
            raise CodecError("shared memory is not sealed", where="trainer")
        if not least <= size <= most:
            raise CodecError(f"shared memory has {size} bytes, not {most}", where="trainer")
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise CodecError("shared memory cannot be mapped", where="trainer") from error
    finally:
        os.close(descriptor)
