"""Generated lesions as a data set: Fed-ISIC2019's sites and class counts, scaled, with patients of several images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npr.data.catalogue import Catalogue, NamedSplit
from npr.data.counts import ISIC_CLASSES, ISIC_SITES, ISIC_TEST, ISIC_TRAIN
from npr.data.lesions import CAMERAS, draw_lesions, photograph
from npr.data.store import digest_of
from security.errors import ConfigError

# Images per patient and how often: three in five have one, as in HAM10000 most lesions have.
PATIENT_SIZES = np.array([1, 2, 3, 4])
PATIENT_SHARE = np.array([0.6, 0.2, 0.12, 0.08])

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSpec:
    """What to generate.

    :param scale: share of Fed-ISIC2019's counts; a cell that is not empty keeps at least one image.
    :param sites: how many of the six sites, in the benchmark's order.
    :param balanced: this many training images (a quarter for test) of every class at every site instead.
    """

    scale: float = 1 / 16
    sites: int = len(ISIC_SITES)
    balanced: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 10.0:
            raise ConfigError(
                f"scale = {self.scale} generates nothing useful", hint="between 0 and 10; 1 is 23,247 images"
            )
        if not 1 <= self.sites <= len(ISIC_SITES):
            raise ConfigError(f"sites = {self.sites}", hint=f"between 1 and {len(ISIC_SITES)}")
        if self.balanced < 0 or self.seed < 0:
            raise ConfigError("balanced and seed must not be negative")

    @classmethod
    def parse(cls, text: str, *, seed: int = 0) -> GeneratedSpec:
        """From `scale=0.05,sites=4`, as written after `generated:`."""
        values: dict[str, float] = {"seed": seed}
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key not in ("scale", "sites", "balanced", "seed"):
                raise ConfigError(f"unknown setting {key!r}", where="generated", hint="scale, sites, balanced or seed")
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


def generate(spec: GeneratedSpec, *, image_size: int) -> Catalogue:
    """The catalogue, with the benchmark's own split under the name `fold` (patients on one side)."""
    rng = np.random.default_rng([spec.seed, 1])
    site_of, label_of, side_of, sizes = _patients(spec, rng)
    of = np.repeat(np.arange(len(sizes)), sizes)
    lesions = draw_lesions(label_of, rng)
    images = photograph(lesions, of, site_of[of] % len(CAMERAS), size=image_size, seed=spec.seed)
    sides = np.array(["train", "test"])
    return Catalogue(
        name="generated",
        class_names=ISIC_CLASSES,
        images=images,
        labels=label_of[of],
        ids=tuple(f"generated-{row:06d}" for row in range(len(of))),
        units=tuple(f"patient-{unit:06d}" for unit in of),
        unit_kind="patient",
        sites=tuple(ISIC_SITES[site] for site in site_of[of]),
        splits={"fold": NamedSplit(sides=tuple(sides[side_of[of]].tolist()))},
        where="generated",
        fingerprint=digest_of(("generated", 1, spec, image_size)),
    )


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
