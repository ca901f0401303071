"""What a coordinator asks of the C library, so that its memory does not grow with the number of its sites.

Left to itself, glibc keeps what was freed for the next request: a heap for every thread, and blocks between others that
are still in use. Fifty uploads at once would leave buffers worth several vectors behind, long after the last frame is
in the spool. So there is one heap, it is cut as soon as its end is free, and every block of a buffer's size is mapped
on its own and goes back to the system when it is freed. Other C libraries do so by themselves, or have no such switch.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any, Final

# malloc.h of glibc; the numbers are part of its interface.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
# gRPC decrypts into blocks of 8 KiB; they are the smallest that come in numbers.
BLOCK_BYTES: Final = 4096
HEAP_END_BYTES: Final = 32_768


def _library() -> Any:
    return ctypes.CDLL(None)


def keep_small() -> None:
    """Once, before anything large is allocated."""
    change = getattr(_library(), "mallopt", None)
    if change is None:
        return
    for what, value in (
        (_ARENA_MAX, 1),
        (_MMAP_THRESHOLD, BLOCK_BYTES),
        (_TRIM_THRESHOLD, HEAP_END_BYTES),
        (_TOP_PAD, 0),
    ):
        change(what, value)


def give_back() -> None:
    """Drop what only cycles hold, and return free pages in the midst of the heap as well; takes some milliseconds."""
    gc.collect()
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)
