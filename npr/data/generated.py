"""Generated lesions as a data set: Fed-ISIC2019's sites and class counts, scaled, with patients of several images.

First the class counts of the two benchmarks, then the data set. Images are drawn in `lesions`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError
from npr.config import LabelsOfImage
from npr.data.catalogue import Catalogue, NamedSplit
from npr.data.lesions import CAMERAS, TEXTURES, Lesions, chunk_rows, draw_lesions, photograph, photograph_chunk
from npr.data.store import Decode, ImageStorage, digest_of

# Class counts of the two benchmarks, counted again from their split files; generated data and tests use them.

ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
ISIC_SITES = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk4", "vienna_dias")

# Sites x classes of Fed-ISIC2019 (Ogier du Terrail et al., 2022) in the order of its centre numbers.
ISIC_TRAIN = np.array(
    [
        [2279, 3363, 2245, 606, 923, 97, 87, 330],
        [20, 2977, 2, 0, 96, 23, 45, 0],
        [533, 1470, 174, 20, 379, 40, 64, 11],
        [276, 649, 223, 86, 406, 20, 3, 144],
        [166, 349, 0, 0, 140, 0, 0, 0],
        [58, 276, 5, 0, 6, 4, 2, 0],
    ]
)
ISIC_TEST = np.array(
    [
        [578, 843, 564, 131, 215, 27, 24, 101],
        [4, 743, 0, 0, 28, 7, 9, 0],
        [147, 362, 37, 1, 96, 11, 18, 0],
        [66, 154, 73, 23, 84, 10, 0, 42],
        [49, 66, 0, 0, 49, 0, 0, 0],
        [9, 74, 0, 0, 4, 0, 1, 0],
    ]
)

# Alphabetical, as in the RSNA challenge; the split file itself holds only numbers.
ICH_CLASSES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")

# Sites x classes of the FedNPR paper's ten-site partition of RSNA-ICH.
ICH_TRAIN = np.array(
    [
        [0, 0, 1112, 2245, 4033],
        [88, 5522, 0, 1926, 0],
        [89, 1122, 2339, 0, 7627],
        [0, 2430, 0, 3574, 2944],
        [132, 518, 0, 930, 1828],
        [269, 0, 0, 1034, 1834],
        [538, 928, 2662, 0, 0],
        [9, 502, 0, 0, 2869],
        [69, 62, 0, 1635, 957],
        [4, 62, 1017, 429, 1033],
    ]
)
ICH_TEST = np.array(
    [
        [0, 0, 278, 561, 1009],
        [22, 1381, 0, 481, 0],
        [22, 281, 585, 0, 1907],
        [0, 608, 0, 893, 736],
        [33, 129, 0, 233, 457],
        [67, 0, 0, 259, 459],
        [135, 232, 666, 0, 0],
        [2, 125, 0, 0, 718],
        [17, 15, 0, 409, 240],
        [1, 15, 255, 108, 258],
    ]
)
# The paper's Dirichlet concentration per class, in the order of ICH_CLASSES, and its chance of dropping a class.
ICH_ALPHA = (0.5, 5.0, 10.0, 30.0, 50.0)
ICH_MISSING = 0.3


# The data set.

# Images per patient and how often: three in five have one, as in HAM10000 most lesions have.
PATIENT_SIZES = np.array([1, 2, 3, 4])
PATIENT_SHARE = np.array([0.6, 0.2, 0.12, 0.08])

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSpec:
    """What to generate.

    :param scale: share of Fed-ISIC2019's counts; a cell that is not empty keeps at least one image.
    :param sites: how many of the six sites, in the benchmark's order.
    :param dealt: deal the same patients at random to this many hospitals instead; each keeps its camera.
    :param balanced: this many training images (a quarter for test) of every class at every site instead.
    """

    scale: float = 1 / 16
    sites: int = len(ISIC_SITES)
    balanced: int = 0
    seed: int = 0
    dealt: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 10.0:
            raise ConfigError(
                f"scale = {self.scale} generates nothing useful", hint="between 0 and 10; 1 is 23,247 images"
            )
        if not 1 <= self.sites <= len(ISIC_SITES):
            raise ConfigError(f"sites = {self.sites}", hint=f"between 1 and {len(ISIC_SITES)}")
        if self.balanced < 0 or self.seed < 0 or self.dealt < 0:
            raise ConfigError("balanced, seed and dealt must not be negative")

    @classmethod
    def parse(cls, text: str, *, seed: int = 0) -> GeneratedSpec:
        """From `scale=0.05,sites=4`, as written after `generated:`."""
        values: dict[str, float] = {"seed": seed}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key not in ("scale", "sites", "balanced", "seed", "dealt"):
                hint = "scale, sites, balanced, seed or dealt"
                raise ConfigError(f"unknown setting {key!r}", where="generated", hint=hint)
            try:
                values[key] = float(value) if key == "scale" else int(value)
            except ValueError:
                raise ConfigError(f"{key} = {value!r} is not a number", where="generated") from None
        return cls(**values)  # type: ignore[arg-type]  # whole numbers except scale, checked above

    def counts(self) -> tuple[Counts, Counts]:
        """Train and test images, sites x classes."""
        if self.balanced:
            shape = (self.sites, len(ISIC_CLASSES))
            return np.full(shape, self.balanced), np.full(shape, max(1, self.balanced // 4))
        return scaled(ISIC_TRAIN[: self.sites], self.scale), scaled(ISIC_TEST[: self.sites], self.scale)


def scaled(counts: Counts, scale: float) -> Counts:
    """Rounded, and at least one where there was one: which classes a site lacks does not depend on the scale."""
    return np.where(counts > 0, np.maximum(1, np.rint(counts * scale)), 0).astype(np.int64)


# Two textures as labels: a lesion has both, one, or neither of them. And the share of patients who have each, at the
# sites in the order of ISIC_SITES: common at one site, rare at another.
FINDINGS = ("stripes", "rings")
FINDING_SHARE = np.array([[0.5, 0.3], [0.25, 0.6], [0.6, 0.25], [0.4, 0.4], [0.2, 0.2], [0.7, 0.5]])


def _with_findings(site_of: NDArray[np.int64], rng: np.random.Generator) -> tuple[Lesions, NDArray[np.int64]]:
    """Lesions that differ in nothing but these two textures, and which of them each has."""
    found = rng.random((len(site_of), len(FINDINGS))) < FINDING_SHARE[site_of]
    first, second = (np.full(len(site_of), TEXTURES.index(name)) for name in FINDINGS)
    strength = (found * rng.uniform(0.6, 1.0, found.shape)).astype(np.float32)
    return replace(draw_lesions(first, rng), second=second, strength=strength), found.astype(np.int64)


def generate(
    spec: GeneratedSpec, *, image_size: int, storage: ImageStorage | None = None, labels: LabelsOfImage = "one"
) -> Catalogue:
    """The catalogue, with the benchmark's own split under the name `fold` (patients on one side).

    :param storage: may want to draw the images itself, those that it needs.
    :param labels: with `many`, two overlapping labels in place of the eight classes; sites, patients and counts stay.
    """
    rng = np.random.default_rng([spec.seed, 1])
    site_of, label_of, side_of, sizes = _patients(spec, rng)
    of = np.repeat(np.arange(len(sizes)), sizes)
    many = labels == "many"
    lesions, label_of = _with_findings(site_of, rng) if many else (draw_lesions(label_of, rng), label_of)
    cameras = site_of[of] % len(CAMERAS)
    draw = _drawing(lesions, of, cameras, size=image_size, seed=spec.seed)
    images = storage.instead(draw, (len(of), image_size, image_size, 3)) if storage is not None else None
    if images is None:
        images = photograph(lesions, of, cameras, size=image_size, seed=spec.seed)
    names = [ISIC_SITES[site] for site in site_of]
    if spec.dealt:
        hospitals = np.random.default_rng([spec.seed, 3]).integers(0, spec.dealt, len(sizes))
        names = [f"hospital-{number:02d}" for number in hospitals]
    sides = np.array(["train", "test"])
    return Catalogue(
        name="generated",
        class_names=FINDINGS if many else ISIC_CLASSES,
        images=images,
        labels=label_of[of],
        ids=tuple(f"generated-{row:06d}" for row in range(len(of))),
        units=tuple(f"patient-{unit:06d}" for unit in of),
        unit_kind="patient",
        sites=tuple(names[patient] for patient in of),
        splits={"fold": NamedSplit(sides=tuple(sides[side_of[of]].tolist()))},
        where="generated",
        fingerprint=digest_of(("generated", 1, spec, image_size, *(["many"] if many else []))),
    )


def _drawing(
    lesions: Lesions, of: NDArray[np.int64], cameras: NDArray[np.int64], *, size: int, seed: int
) -> Decode:
    """How to draw one row: with the others of its chunk, which are asked for next."""
    step, lock = chunk_rows(size), Lock()

    @lru_cache(maxsize=2)
    def chunk(start: int) -> NDArray[np.uint8]:
        return photograph_chunk(lesions, of, cameras, start, size=size, seed=seed)

    def draw(row: int) -> NDArray[np.uint8]:
        with lock:  # a second thread would draw the same chunk again
            drawn = chunk(row - row % step)
        picture: NDArray[np.uint8] = drawn[row % step]
        return picture

    return draw


def _patients(spec: GeneratedSpec, rng: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    """Site, class, side and number of images of each patient; the counts of every cell come out exactly."""
    rows: list[tuple[int, int, int, int]] = []
    for side, counts in enumerate(spec.counts()):
        for (site, label), count in np.ndenumerate(counts):
            left = int(count)
            while left:
                size = min(left, int(rng.choice(PATIENT_SIZES, p=PATIENT_SHARE)))
                rows.append((site, label, side, size))
                left -= size
    site_of, label_of, side_of, sizes = np.array(rows, dtype=np.int64).T
    return site_of, label_of, side_of, sizes
