"""One patient's rows more or less in the *table*: nobody else changes sides, is dropped, renamed or refused.

Hundreds of random CSV tables through the code that a hospital runs: patients with many images, in all classes, with
extreme pixels, alone in their class, spelt in two ways, with images of other patients, with rows that cannot be used,
among them lines that are no CSV.
The twin is the even split, in which one patient moves others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from npr.data.catalogue import sides_of
from npr.data.dataset import Samples, SiteData
from npr.data.sides import KeyedSides, SideRule, unit_key
from npr.dp.clipping import ClippedGradient
from npr.dp.releases import count_sums
from security.dp.accountant import LATTICE_ONE, counts_event
from security.dp.noise import Units
from site_agent.config import DataTable
from site_agent.trainer.data import open_data

TABLES = 200
CLASSES = ("nevus", "melanoma", "keratosis", "rare")
SIZE, CLIP = 8, 1.0
Row = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images, white, grey and of noise, one that is black and one that is torn."""
    made = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(1)
    for number in range(40):
        pixels = rng.integers(0, 256, (SIZE, SIZE, 3)) if number % 3 else np.full((SIZE, SIZE, 3), 255 - number)
        Image.fromarray(pixels.astype(np.uint8)).save(made / f"{number}.png")
    Image.fromarray(np.zeros((SIZE, SIZE, 3), dtype=np.uint8)).save(made / "black.png")
    (made / "torn.png").write_bytes((made / "1.png").read_bytes()[:40])
    return made


def patient_rows(rng: np.random.Generator, name: str) -> Iterator[Row]:
    """All rows of one patient, good or not."""
    count = int(rng.choice([1, 1, 2, 3, 12]))
    labels = CLASSES if count > 3 else CLASSES[:3] if rng.random() < 0.9 else ("rare",)
    for _ in range(count):
        image = rng.choice([f"{rng.integers(40)}.png"] * 17 + ["black.png", "torn.png", "missing.png"])
        label = rng.choice([*labels] * 5 + ["", "unheard of"])
        # Also a quote that is not closed, and a letter of another encoding: a line that is no UTF-8 CSV.
        spelt = rng.choice([name] * 30 + [name.upper(), f"{name}\u200b", f'"{name}', f"{name}\udcfc"])
        yield str(image), str(label), str(spelt), str(rng.choice(["train", "train", "test", "validation", ""]))


def random_table(seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = [row for number in range(rng.integers(1, 14)) for row in patient_rows(rng, f"p-{number}")]
    return [rows[place] for place in rng.permutation(len(rows))]


def opened(folder: Path, rows: list[Row], rule: SideRule, fold: int | str = 0) -> SiteData:
    table = folder / "table.csv"
    text = "image,label,patient,split\n" + "".join(f"{','.join(row)}\n" for row in rows)
    table.write_bytes(text.encode("utf-8", "surrogateescape"))
    source = DataTable(source=f"csv:{table}", fold=fold)
    return open_data(source, site="graz", image_size=SIZE, classes=CLASSES, rule=rule, private=True)[1]


def told(data: SiteData) -> dict[str, list[tuple[str, str, int]]]:
    """Everything that training can see, in its order."""
    sides = {"train": data.train, "test": data.test, "validation": data.validation}
    return {
        side: list(zip(part.units, part.ids, part.labels.tolist(), strict=True)) if part is not None else []
        for side, part in sides.items()
    }


def neighbours(seed: int) -> tuple[str, list[Row], list[Row]]:
    rows = random_table(seed)
    names = sorted({unit_key(row[2]) for row in rows})
    leaver = names[seed % len(names)]
    return leaver, rows, [row for row in rows if unit_key(row[2]) != leaver]


def gradient_sum(samples: Samples) -> np.ndarray:
    """The production clip over the first image of every patient: what one full step sums up before its noise."""
    torch.manual_seed(0)
    model = nn.Linear(SIZE * SIZE * 3, len(CLASSES))
    clipped = ClippedGradient(model, clip=CLIP)
    clipped.zero()
    units = Units(samples.units)
    if len(units):
        numbers = np.arange(len(units))
        first = units.image_of(numbers, np.zeros_like(numbers))
        pixels = torch.from_numpy(np.asarray(samples.images)[first].reshape(len(first), -1)).float() / 25.0
        labels = torch.from_numpy(samples.labels[first])
        clipped.add(lambda: functional.cross_entropy(model(pixels), labels, reduction="none"))
    return clipped.sum.numpy().copy()


@pytest.mark.parametrize("fold", [0, "split"])
def test_a_patient_more_or_less_changes_nothing_else(folder: Path, fold: int | str) -> None:
    rule = KeyedSides(key=bytes(range(32)), fold=fold, validation=0.2)
    furthest = 0.0
    for seed in range(TABLES // 2):
        leaver, rows, less = neighbours(seed if fold == 0 else seed + TABLES)
        whole, without = opened(folder, rows, rule, fold), opened(folder, less, rule, fold)
        kept = {side: [row for row in part if unit_key(row[0]) != leaver] for side, part in told(whole).items()}
        assert kept == told(without), f"table {seed}"
        counts = [count_sums(data.train.labels, Units(data.train.units), 4) for data in (whole, without)]
        assert np.linalg.norm((counts[0] - counts[1]).astype(float)) <= counts_event(5.0).sensitivity * LATTICE_ONE
        moved = float(np.linalg.norm(gradient_sum(whole.train) - gradient_sum(without.train)))
        furthest = max(furthest, moved)
        assert moved <= CLIP * (1 + 1e-5)
    assert furthest > 0.99 * CLIP, "patients whose gradient reaches the clip were among them"


def test_the_twin_with_even_sides_moves_others(folder: Path) -> None:
    even: Callable[..., tuple[str, ...]] = lambda catalogue: sides_of(catalogue, 0, folds=2)  # noqa: E731
    worst, moved = 0.0, 0
    for seed in range(40):
        leaver, rows, less = neighbours(seed)
        if len({unit_key(row[2]) for row in rows}) < 6:
            continue
        whole, without = opened(folder, rows, even), opened(folder, less, even)
        kept = [row for row in told(whole)["train"] if unit_key(row[0]) != leaver]
        moved += kept != told(without)["train"]
        worst = max(worst, float(np.linalg.norm(gradient_sum(whole.train) - gradient_sum(without.train))))
    assert moved > 5 and worst > 1.5 * CLIP


def test_names_are_never_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = KeyedSides(key=bytes(32))
    for seed in range(20):
        opened(folder, random_table(seed), rule)
    assert "left out" in caplog.text and "p-" not in caplog.text.lower()
