"""What our processes ask of the C library, so that they keep little more memory than they use.

Left to itself, glibc keeps what was freed for the next request: a heap for every thread, and above each what was once
needed. So there are two heaps, of which little more than is in use is kept; and what the uploads leave behind at a
coordinator, or a round at an agent or a trainer, is given back. Tighter bounds would save a little more and cost far
more time than the masks do: every frame would be copied into pages that have just been fetched from the system. In a
trainer the same bounds would slow training down. Other C libraries do so by themselves, or have no such switch.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any, Final

# malloc.h of glibc; the numbers are part of its interface.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
HEAPS: Final = 2
# Set by hand, the bounds stay where they are: glibc would raise them with the first large block that is freed.
BLOCK_BYTES: Final = 1_048_576  # larger ones, such as vectors, are mapped on their own
HEAP_END_BYTES: Final = 2_097_152


def _library() -> Any:
    return ctypes.CDLL(None)


def keep_small() -> None:
    """Once, before anything large is allocated."""
    change = getattr(_library(), "mallopt", None)
    if change is None:
        return
    for what, value in (
        (_ARENA_MAX, HEAPS),
        (_MMAP_THRESHOLD, BLOCK_BYTES),
        (_TRIM_THRESHOLD, HEAP_END_BYTES),
    ):
        change(what, value)


def settle() -> None:
    """Once, when everything is set up: what is there now stays, and later collections need not look at it."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Drop what only cycles hold, and return free pages in the midst of the heap as well; takes some milliseconds."""
    gc.collect()
    trim()


def trim() -> None:
    """Return free pages alone. For a trainer, in which a search for cycles would take longer than a small round."""
    give = getattr(_library(), "malloc_trim", None)
    if give is not None:
        give(0)
