"""The coordinator's side of S3: frames go to the spool and into one running sum as they arrive.

Memory is one vector however many sites send. An upload that turns out incomplete, or not to have the root its site
signed, is taken out of the sum again, frame by frame from the spool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from security import codec, merkle
from security.errors import RemoteProtocolError, VerificationFailed
from security.masking import Accumulator
from security.secagg.effects import Discard
from security.secagg.layout import Layout
from security.secagg.messages import ChunkPiece, UploadFrame, UploadHeader
from security.secagg.spool import Gone, Spool


def spool_key(header: UploadHeader) -> bytes:
    """By attempt, site and root, so that no site can write into another one's file."""
    return hashlib.sha256(header.kx + codec.text(header.site) + header.root).digest()


@dataclass
class Arriving:
    """An upload on its way."""

    header: UploadHeader
    leaves: list[bytes] = field(default_factory=list)


class Uploads:
    """All uploads of one attempt."""

    def __init__(self, layout: Layout, spool: Spool) -> None:
        self._layout = layout
        self._spool = spool
        self.sum = Accumulator(layout.words, layout.ring)
        self.arriving: dict[str, Arriving] = {}
        self.complete: dict[str, UploadHeader] = {}
        self._trees: dict[str, merkle.Tree] = {}

    def begin(self, header: UploadHeader) -> int:
        """Take a header; returns how many frames are already there, from before a restart."""
        upload = self.arriving[header.site] = Arriving(header)
        key = spool_key(header)
        for index in range(min(self._spool.frames(key), self._layout.frames - 1)):
            self._count(upload, self._spool.read(key, index))
        return len(upload.leaves)

    def take(self, site: str, frame: UploadFrame) -> UploadHeader | None:
        """Take a frame; returns the header once the upload is complete and has its root.

        :raises VerificationFailed: if it is complete and does not have it; the upload is gone then.
        """
        upload = self.arriving.get(site)
        if upload is None or frame.kx != upload.header.kx or frame.index > len(upload.leaves):
            raise RemoteProtocolError("frame is not the next one of an upload", where=f"site {site}")
        if frame.index < len(upload.leaves):
            return None  # sent again after a reconnect
        if len(frame.data) != self._layout.frame_bytes(frame.index):
            raise RemoteProtocolError("frame has the wrong length", where=f"site {site}")
        self._spool.write(spool_key(upload.header), frame.index, frame.data)
        self._count(upload, frame.data)
        return self._finish(site, upload) if len(upload.leaves) == self._layout.frames else None

    def _count(self, upload: Arriving, data: bytes) -> None:
        self.sum.add(len(upload.leaves), data)
        upload.leaves.append(merkle.leaf_hash(data))

    def _finish(self, site: str, upload: Arriving) -> UploadHeader:
        if merkle.root(upload.leaves) != upload.header.root:
            self.drop(site)
            raise VerificationFailed("upload does not have the root its site signed", where=f"site {site}")
        self._spool.seal(spool_key(upload.header))
        self.complete[site] = upload.header
        self._trees[site] = merkle.Tree(upload.leaves)
        del self.arriving[site]
        return upload.header

    def drop(self, site: str) -> None:
        """Take an unfinished upload out of the sum again."""
        upload = self.arriving.pop(site, None)
        if upload is None:
            return
        key = spool_key(upload.header)
        for index in range(len(upload.leaves)):
            self.sum.take_out(index, self._spool.read(key, index))
        self._spool.remove(key)

    def restore(self, header: UploadHeader, *, count: bool = True) -> None:
        """After a restart: take up a complete upload from the spool, and into the sum if that is still to be opened."""
        key = spool_key(header)
        leaves = []
        for index in range(self._layout.frames):
            data = self._spool.read(key, index)
            leaves.append(merkle.leaf_hash(data))
            if len(data) != self._layout.frame_bytes(index):
                break  # torn: its root is another one
            if count:
                self.sum.add(index, data)
        if merkle.root(leaves) != header.root:
            raise VerificationFailed("spooled upload is not what its site signed", where=f"site {header.site}")
        self.complete[header.site] = header
        self._trees[header.site] = merkle.Tree(leaves)

    def header(self, site: str) -> UploadHeader | None:
        """What a site has announced, arriving or complete."""
        upload = self.arriving.get(site)
        return upload.header if upload is not None else self.complete.get(site)

    def next_frame(self, site: str) -> int | None:
        """Where an unfinished upload goes on."""
        upload = self.arriving.get(site)
        return None if upload is None else len(upload.leaves)

    def pieces(self, result: bytes, chunk: int, survivors: Sequence[str]) -> Iterator[ChunkPiece]:
        """One chunk of every upload, each with its path; ends early if the uploads are covered and gone meanwhile."""
        if not 0 <= chunk < self._layout.frames:
            raise RemoteProtocolError("there is no such chunk", where="audit")
        for site in survivors:
            try:
                data = self._spool.read(spool_key(self.complete[site]), chunk)
            except Gone:
                return
            yield ChunkPiece(
                result=result,
                chunk=chunk,
                site=site,
                data=data,
                path=self._trees[site].inclusion_path(chunk),
            )

    def discard(self) -> Discard:
        """Every file: after the acknowledgements, or when the attempt is over for good."""
        headers = [*self.complete.values(), *(upload.header for upload in self.arriving.values())]
        return Discard(tuple(spool_key(header) for header in headers))
