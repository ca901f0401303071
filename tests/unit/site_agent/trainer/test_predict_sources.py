"""What `predict` reads: the same pixels as training, few at a time, and every damaged file as its own problem."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom.data import get_testdata_file

from lazaret.errors import ConfigError, DataError
from npr.data.manifest import Decoding, image_decoding
from npr.data.sources import open_catalogue
from site_agent.trainer.predict import InputFiles, decoding_for, find, pieces

SLICE = Path(get_testdata_file("CT_small.dcm"))


def paint(path: Path, colour: int = 120) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 12), (colour, 40, 90)).save(path)
    return path


def test_memory_holds_two_pieces_however_many_files_there_are() -> None:
    """Files that are read but not yet handed over never exceed one piece in work and one ahead."""
    alive, most, lock = 0, 0, threading.Lock()

    def read(path: Path, where: str) -> NDArray[np.uint8]:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return np.zeros((8, 8, 3), dtype=np.uint8)

    decoding = Decoding(read=read, channels=3, image_size=8, settings="")
    found = InputFiles(files=tuple((f"{n}.png", Path(f"{n}.png")) for n in range(203)))
    seen = []
    for piece in pieces(found, decoding, size=10):
        seen += piece.names
        assert len(piece.pixels) == len(piece.names)
        with lock:
            alive -= len(piece.names)
    assert seen == [name for name, _ in found.files]
    assert most <= 20


def test_pixels_are_those_of_training(tmp_path: Path) -> None:
    for label in ("a", "b"):
        paint(tmp_path / label / "1.png", 10 if label == "a" else 200)
    trained = open_catalogue(f"folders:{tmp_path}", image_size=8)
    decoding = decoding_for(f"folders:{tmp_path}", 8, 3)
    (piece,) = pieces(find(tmp_path, decoding), decoding, size=5)
    assert piece.names == ("a/1.png", "b/1.png") and np.array_equal(piece.pixels, trained.images)


def test_dicom_is_found_with_and_without_a_suffix_and_windowed_as_in_training(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    shutil.copy(SLICE, tmp_path / "x" / "one.dcm")
    shutil.copy(SLICE, tmp_path / "x" / "IM0002")
    (tmp_path / "x" / "torn.dcm").write_bytes(SLICE.read_bytes()[:900])
    (tmp_path / "x" / "report.txt").write_text("no slice")
    (tmp_path / "DICOMDIR").write_bytes(b"index")
    source = f"dicom:{tmp_path}?window=0/400"
    decoding = decoding_for(source, 16, 1)
    found = find(tmp_path, decoding)
    assert [name for name, _ in found.files] == ["x/IM0002", "x/one.dcm", "x/torn.dcm"] and found.ignored == 1
    (piece,) = pieces(found, decoding, size=8)
    assert [bool(problem) for problem in piece.problems] == [False, False, True]
    assert piece.pixels.shape == (2, 16, 16, 1) and np.array_equal(piece.pixels[0], piece.pixels[1])
    other = decoding_for(f"dicom:{tmp_path}", 16, 1).read(SLICE, "slice")
    assert not np.array_equal(piece.pixels[0], other), "the window of the data source was not used"


def test_a_colour_model_takes_grey_slices(tmp_path: Path) -> None:
    assert decoding_for(f"dicom:{tmp_path}", 16, 3).channels == 3


def test_a_grey_model_does_not_take_colour_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes 1 channels"):
        decoding_for(f"folders:{tmp_path}", 16, 1)


def test_hidden_files_are_left_alone_and_order_is_by_name(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", ".hidden.png", ".trash/c.png", "sub/d.tiff"):
        paint(tmp_path / name)
    found = find(tmp_path, image_decoding(8))
    assert [name for name, _ in found.files] == ["a.JPG", "b.png", "sub/d.tiff"]


@pytest.mark.parametrize(
    ("text", "match"),
    [("path\nx.png\n", "column 'image' is missing"), ("image\n \n", "image is empty"), ('image\n"x', "not a UTF-8")],
)
def test_a_table_that_is_none(tmp_path: Path, text: str, match: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(text)
    with pytest.raises(DataError, match=match):
        find(table, image_decoding(8))


def test_a_listed_file_that_is_missing_is_a_problem_of_its_row(tmp_path: Path) -> None:
    paint(tmp_path / "there.png")
    (tmp_path / "t.csv").write_text("image\nthere.png\ngone.png\n")
    decoding = image_decoding(8)
    (piece,) = pieces(find(tmp_path / "t.csv", decoding), decoding, size=4)
    assert piece.problems[0] is None and "missing" in str(piece.problems[1])


def test_whatever_a_decoder_raises_is_the_files_own_problem() -> None:
    def read(path: Path, where: str) -> NDArray[np.uint8]:
        raise MemoryError

    decoding = Decoding(read=read, channels=3, image_size=8, settings="")
    (piece,) = pieces(InputFiles(files=(("x.png", Path("x.png")),)), decoding, size=4)
    assert piece.problems == ("cannot be read (MemoryError)",) and piece.pixels.shape == (0, 8, 8, 3)
