"""One part of an answer, however it arrives."""

from __future__ import annotations

import pytest

from lazaret.errors import ArchiveObjectError
from site_agent.archive.dicomweb import PartReader, boundary_of

# Bytes that look like the delimiter, nearly.
CONTENT = b"\0" * 128 + b"DICM\r\n--\r\n--edg\r\n\r\n--\r" + bytes(range(256))
WHOLE = b"--edge\r\nContent-Type: application/dicom\r\nX: y\r\n\r\n" + CONTENT + b"\r\n--edge--\r\n"


def read(data: bytes, size: int) -> tuple[bytes, bool]:
    reader = PartReader(b"edge")
    content = b"".join(part for at in range(0, len(data), size) for part in reader.feed(data[at : at + size]))
    return content, reader.complete


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 10_000])
@pytest.mark.parametrize("before", [b"", b"a preamble\r\n"])
def test_pieces_of_any_size(size: int, before: bytes) -> None:
    assert read(before + WHOLE, size) == (CONTENT, True)


def test_an_answer_that_was_cut_is_never_complete() -> None:
    for end in range(len(WHOLE) - len(b"--\r\n")):
        assert not read(WHOLE[:end], 50)[1]


def test_a_part_without_headers() -> None:
    assert read(b"--edge\r\n\r\nabc\r\n--edge--", 4) == (b"abc", True)


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 20_000,
        b"--edge\r\n" + b"X: " + b"y" * 20_000,
        WHOLE.replace(b"--edge--", b"--edge\r\n\r\nsecond\r\n--edge--"),
    ],
    ids=["preamble", "headers", "second part"],
)
def test_what_is_not_one_part_is_refused(data: bytes) -> None:
    with pytest.raises(ArchiveObjectError):
        read(data, 1000)


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/html",
        "multipart/related",
        f"multipart/related; boundary={'x' * 300}",
        "multipart/related; boundary=",
        f"multipart/related; boundary*{'9' * 5000}=x",
    ],
)
def test_kinds_of_answers_that_hold_no_image(kind: str) -> None:
    with pytest.raises(ArchiveObjectError):
        boundary_of(kind)


def test_a_boundary_in_quotes() -> None:
    assert boundary_of('multipart/related; type="application/dicom"; boundary="a b:c"') == b"a b:c"
