"""A model on its way to disk while it is still coming in.

Ten megabytes take the disk a moment; begun with the first frame of a sum, most of that moment lies in the time that the
network needs anyway. A draft counts for nothing: what it says is believed once it has been judged and renamed.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from security import keystore
from security.disk import naming
from security.errors import LocalProtocolError
from security.secagg.effects import Vector
from security.secagg.layout import Layout

SYNC_BYTES: Final = 2 * 1024 * 1024


class Draft:
    """One file of safetensors, whose values come in the layout's order."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self._left = layout.state_words
        self._done = 0
        self._unsynced = 0
        self._syncing: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._file = keystore.open_private(path)
        with naming(path):
            self._file.write(_header(layout))

    def extend(self, start: int, values: Vector) -> None:
        """Write the next values; now and then a second thread has the disk take them, one call at a time."""
        if start != self._done or len(values) > self._left:
            raise LocalProtocolError("these are not the next values of the draft", where=str(self._path))
        self._done += len(values)
        self._left -= len(values)
        self._unsynced += values.nbytes
        with naming(self._path):
            self._file.write(np.ascontiguousarray(values).view(np.uint8).data)
            if self._unsynced >= SYNC_BYTES and (self._syncing is None or self._syncing.done()):
                self._last_sync()
                self._file.flush()
                self._unsynced = 0
                self._syncing = self._worker.submit(os.fdatasync, self._file.fileno())

    def _last_sync(self) -> None:
        """A failed write is told once: whoever does not ask takes lost pages for stored ones."""
        if self._syncing is not None:
            self._syncing.result()

    def keep(self, path: Path) -> None:
        """Make it durable under its name."""
        if self._left:
            raise LocalProtocolError("the draft is not complete", where=str(self._path))
        with naming(self._path):
            self._last_sync()
        self._worker.shutdown()
        keystore.settle(self._file, self._path, path)

    def drop(self) -> None:
        """Another one begins; the file is written over."""
        self._worker.shutdown()
        self._file.close()


def _header(layout: Layout) -> bytes:
    """Of a safetensors file whose data are the state as it lies in memory."""
    tensors = {
        block.name: {"dtype": "F32", "shape": list(block.shape), "data_offsets": [4 * place.start, 4 * place.stop]}
        for block, place in layout.placed()
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
