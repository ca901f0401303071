"""A whole small run on images whose patients and files have telling names: none of them, and no key, is ever said.

Real agents train in this process; every logger of every library is read at its most talkative, with everything printed,
every byte sent, every file written beside the keys, and every error of a spoilt data set with its traceback.
"""

from __future__ import annotations

import base64
import csv
import logging
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from lazaret.errors import DataError
from npr.config import TrainConfig
from npr.model import ModelSpec
from npr.recipe import Recipe
from npr.wire_layout import export
from security.clock import SystemClock
from security.identity.enrolment import Identity
from site_agent.cli import cli
from site_agent.config import DataTable
from site_agent.run import Agent
from site_agent.trainer.data import open_data
from tests.support.consortium_world import SITES
from tests.support.in_process import in_process
from tests.support.site_world import SiteWorld

NAMES = ("Zwettler", "Quendler", "Oberhollenzer")
PATIENT = "SVNR4711"
CLASSES = ("bcc", "melanoma", "nevus")
RECIPE = Recipe(config=TrainConfig(method="fednpr-per", batch_size=8, augmentation="none"), image_size=16)
PLAN = """
run = "run-1"
[model]
initial = "initial.safetensors"
[training]
rounds = 3
steps = 20
[timing]
train = 100
"""
PERSONAL = re.compile("|".join((*NAMES, PATIENT)), re.IGNORECASE)


def paint(folder: Path, seed: int) -> Path:
    """A table of 36 images of 18 people, in folders that are called after them."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(36):
        person = f"{NAMES[number // 2 % 3]}_{number // 2:02d}"
        path = folder / person / f"{person}_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
        patient = f"{PATIENT}-{number // 2:02d}"
        rows.append((path.relative_to(folder).as_posix(), CLASSES[number // 2 % 3], patient))
    write(folder / "table.csv", rows)
    return folder / "table.csv"


def write(path: Path, rows: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "label", "patient", "split")[: len(rows[0])], *rows])


def rows_of(path: Path) -> list[tuple[str, ...]]:
    with path.open(newline="") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


class LearningWorld(SiteWorld):
    """Sites that learn from such images."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, plan=PLAN)
        for number, site in enumerate(SITES):
            self.point(site, paint(folder / "images" / site, number))

    def write_model(self) -> None:
        spec = ModelSpec(architecture="test_efficientnet", num_classes=len(CLASSES), image_size=16)
        export(self.model_path, spec, RECIPE, rounds=3, classes=CLASSES)

    def make_learner(self, site: str):  # type: ignore[no-untyped-def]  # a factory, see site_agent/assembly.py
        return in_process

    def point(self, site: str, table: Path) -> None:
        lines = self.configs[site].read_text().splitlines()
        text = "\n".join(f'source = "csv:{table}"' if line.startswith("source = ") else line for line in lines)
        self.configs[site].write_text(text + "\n")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Everything(logging.Handler):
    """All that any logger says, at every level."""

    def __init__(self) -> None:
        super().__init__(level=0)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name} {self.format(record)}")


@pytest.fixture
def heard(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Everything that was logged or printed so far."""
    everything, root = Everything(), logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in ("", "site-agent", "PIL")}
    root.addHandler(everything)
    for name in levels:
        logging.getLogger(name).setLevel(1)

    def so_far() -> str:
        said = capfd.readouterr()
        return "\n".join([*everything.lines, said.out, said.err])

    yield so_far
    root.removeHandler(everything)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def key_material(identity: Identity) -> list[bytes]:
    """Every private key of a folder in the forms in which it could slip out."""
    found: list[bytes] = []
    for path in sorted((identity.folder / "keys").rglob("*")):
        if path.is_file():
            body = b"".join(line for line in path.read_bytes().splitlines() if b"-----" not in line)
            raw = base64.b64decode(body)[-32:]
            found += [raw, raw.hex().encode(), base64.b64encode(raw).rstrip(b"=")[:40], repr(raw).encode()]
    assert len(found) >= 4 * 5
    return found


def assert_silent(said: bytes, keys: list[bytes], where: str) -> None:
    found = PERSONAL.search(said.decode("utf-8", "replace"))
    assert found is None, f"{where}: {said[max(0, found.start() - 80) : found.end() + 40]!r}"
    assert not any(key in said for key in keys), where


def test_a_run_names_nobody(tmp_path: Path, heard: Callable[[], str]) -> None:
    world = LearningWorld(tmp_path)
    world.start_all()
    for _ in range(2):
        world.run_round()
    world.kill(SITES[0])
    world.start(SITES[0])
    world.hub.connect(SITES[0])
    world.run_round()
    assert world.hub.round == 3 and all(agent.session.rounds_done == 3 for agent in world.agents.values())

    keys = [key for site in SITES for key in key_material(world.base.identity(site))]
    said = heard()
    assert "round 2: training" in said and "local balanced accuracy" in said
    assert not re.search(r"\d\.\d{5}", said), "figures for people are rounded"
    assert_silent(said.encode(), keys, "logs")
    assert_silent(b"".join(data for _, _, data in world.hub.payloads), keys, "the wire")
    for agent in world.agents.values():
        assert_no_file_tells(agent, keys)


def assert_no_file_tells(agent: Agent, keys: list[bytes]) -> None:
    """The privacy log, its annex, metrics, memories: what an auditor, a backup or a page may show."""
    files = [path for path in agent.state_dir.folder.rglob("*") if path.is_file()]
    assert any("segments" in path.parts for path in files)
    for path in files:
        assert_silent(path.read_bytes(), keys, str(path))


@pytest.mark.parametrize("slip", ["patient svnr4711-03 is missing", "cannot open Quendler_04_9.png"])
def test_a_slip_would_be_heard_twin(heard: Callable[[], str], slip: str) -> None:
    """The test above can fail: any logger, or anything printed."""
    logging.getLogger("some.library").debug(slip)
    with pytest.raises(AssertionError, match="logs"):
        assert_silent(heard().encode(), [], "logs")
    print(slip)
    with pytest.raises(AssertionError, match="printed"):
        assert_silent(heard().encode(), [], "printed")


# Errors of a spoilt data set.


def _unreadable(table: Path) -> None:
    path = table.parent / rows_of(table)[5][0]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + path.read_bytes()[8:50])


def _missing(table: Path) -> None:
    (table.parent / rows_of(table)[5][0]).unlink()


def _a_folder_in_its_place(table: Path) -> None:
    _missing(table)
    (table.parent / rows_of(table)[5][0]).mkdir()


def _unknown_label(table: Path) -> None:
    rows = rows_of(table)
    write(table, [(*rows[0][:1], "naevus", *rows[0][2:]), *rows[1:]])


def _columns_mixed_up(table: Path) -> None:
    write(table, [(row[0], row[2], row[1]) for row in rows_of(table)])


def _twice(table: Path) -> None:
    write(table, [*rows_of(table), rows_of(table)[3]])


def _two_sides(table: Path) -> None:
    write(table, [(*row, "test" if number % 2 else "train") for number, row in enumerate(rows_of(table))])


def _cut_off(table: Path) -> None:
    table.write_text(table.read_text() + f'"{NAMES[0]}/x.png\n')


@pytest.mark.parametrize(
    "spoil",
    [_unreadable, _missing, _a_folder_in_its_place, _unknown_label, _columns_mixed_up, _twice, _two_sides, _cut_off],
)
def test_an_error_names_nobody(tmp_path: Path, spoil: Callable[[Path], None], heard: Callable[[], str]) -> None:
    table = paint(tmp_path / "images", 1)
    spoil(table)
    for source in (f"csv:{table}", f"folders:{_as_folders(table)}"):
        try:
            open_data(DataTable(source=source), site="graz", image_size=16, classes=CLASSES)
        except DataError as error:
            told = "".join(traceback.format_exception(error)) + str(error.hint)
            # The path of the data set is the hospital's own choice; what is in it is not.
            assert_silent(told.encode(), [], "error")
        else:
            assert source.startswith("folders:"), "nothing was wrong"
    assert_silent(heard().encode(), [], "logs")


def _as_folders(table: Path) -> Path:
    """The same files in a folder per class, as far as they are there."""
    target = table.parent.parent / "folders"
    for name, label, *_ in (row for row in rows_of_any(table) if (table.parent / row[0]).is_file()):
        (target / label).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(table.parent / name, target / label / Path(name).name)
    return target


def rows_of_any(table: Path) -> list[tuple[str, ...]]:
    return [row for row in rows_of(table) if len(row) >= 3]


def test_folders_called_after_people_name_nobody(tmp_path: Path, heard: Callable[[], str]) -> None:
    """A folder per patient where a folder per class is meant."""
    table = paint(tmp_path / "images", 1)
    table.unlink()
    for names in (None, {name: name for name in CLASSES}):
        with pytest.raises(DataError) as caught:
            open_data(
                DataTable(source=f"folders:{table.parent}", class_map=names), site="x", image_size=16, classes=CLASSES
            )
        assert_silent(
            ("".join(traceback.format_exception(caught.value)) + str(caught.value.hint)).encode(), [], "error"
        )
    assert_silent(heard().encode(), [], "logs")


def test_a_check_of_a_spoilt_data_set_names_nobody(
    tmp_path: Path, heard: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several things wrong at once, as the command prints them, in both forms."""
    world = LearningWorld(tmp_path)
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: world.clock.now_ms())
    table = tmp_path / "images" / "graz" / "table.csv"
    for spoil in (_two_sides, _unreadable):
        spoil(table)
    keys = key_material(world.base.identity("graz"))
    for words in ([], ["--json"]):
        done = CliRunner().invoke(cli, ["check", "--config", str(world.configs["graz"]), "--skip", "trial", *words])
        assert "unreadable image, 1 times" in done.output and "on two sides, 18 times" in done.output
        assert_silent(done.output.encode(), keys, "check")
    assert_silent(heard().encode(), keys, "logs")
