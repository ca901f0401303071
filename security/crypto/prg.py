"""Mask streams: AES-256 in counter mode from a zero counter, read as little-endian words.

A key masks one vector once, which is why the fixed counter is right. Byte `o` of a stream lies in counter block
``o // 16``, so any chunk can be made without the ones before it; that is what lets threads share a vector and sites
re-derive single chunks of a sum. Work goes chunk by chunk: a chunk stays in the cache while every stream is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from lazaret.errors import LocalProtocolError
from security.secrets import Secret

BLOCK_BYTES: Final = 16
CHUNK_BYTES: Final = 256 * 1024
_ZEROS: Final = memoryview(bytes(CHUNK_BYTES))

Words = npt.NDArray[Any]  # of 16, 32 or 64 bits, little-endian, one dimension


def _stream(key: Secret, offset: int) -> CipherContext:
    if offset % BLOCK_BYTES:
        raise LocalProtocolError(f"a mask stream is positioned in steps of {BLOCK_BYTES} bytes, not to byte {offset}")
    counter = (offset // BLOCK_BYTES).to_bytes(BLOCK_BYTES, "big")
    return Cipher(algorithms.AES(key.reveal()), modes.CTR(counter)).encryptor()


def keystream(key: Secret, length: int, *, offset: int = 0) -> bytes:
    """Return `length` bytes of the stream from byte `offset`, a multiple of 16."""
    return _stream(key, offset).update(bytes(length))


def _require_words(words: Words) -> None:
    if words.ndim != 1 or words.dtype.str not in ("<u2", "<u4", "<u8") or not words.flags.c_contiguous:
        raise LocalProtocolError("masks are added to one contiguous vector of little-endian words of 16, 32 or 64 bits")


def _apply_range(
    words: Words, source: Words | None, add: Sequence[Secret], subtract: Sequence[Secret], offset: int
) -> None:
    plus = [_stream(key, offset) for key in add]
    minus = [_stream(key, offset) for key in subtract]
    scratch = bytearray(min(CHUNK_BYTES, words.nbytes))
    zeros = _ZEROS[: len(scratch)]
    masks = np.frombuffer(scratch, dtype=words.dtype)
    step = CHUNK_BYTES // words.itemsize
    for start in range(0, len(words), step):
        chunk = words[start : start + step]
        mask = masks[: len(chunk)]
        if source is not None:
            np.copyto(chunk, source[start : start + step])
        # Only the last chunk is shorter, and there the streams end, so that drawing a full chunk does no harm.
        for stream in plus:
            stream.update_into(zeros, scratch)
            np.add(chunk, mask, out=chunk)
        for stream in minus:
            stream.update_into(zeros, scratch)
            np.subtract(chunk, mask, out=chunk)


def apply_streams(
    words: Words,
    *,
    source: Words | None = None,
    add: Iterable[Secret] = (),
    subtract: Iterable[Secret] = (),
    offset: int = 0,
    workers: int = 1,
) -> None:
    """Add and subtract whole streams in place, modulo 2^16, 2^32 or 2^64; the ring of 24 bits is wrapped afterwards.

    :param source: where the words come from, if not from `words` itself; copied chunk by chunk on the way.
    :param offset: the byte of the streams that the first word of `words` meets; a multiple of 16.
    :param workers: threads; AES runs outside the interpreter lock, so that they share the work.
    """
    _require_words(words)
    if source is not None and (source.shape, source.dtype) != (words.shape, words.dtype):
        raise LocalProtocolError("the source of a masked vector must have its length and type")
    plus, minus = tuple(add), tuple(subtract)
    chunks = -(-words.nbytes // CHUNK_BYTES)
    parts = max(1, min(workers, chunks))
    if parts == 1:
        _apply_range(words, source, plus, minus, offset)
        return
    step = -(-chunks // parts) * CHUNK_BYTES // words.itemsize
    with ThreadPoolExecutor(parts) as pool:
        futures = []
        for start in range(0, len(words), step):
            part = slice(start, start + step)
            taken = None if source is None else source[part]
            futures.append(pool.submit(_apply_range, words[part], taken, plus, minus, offset + start * words.itemsize))
        for future in futures:
            future.result()
