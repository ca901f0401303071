"""Generated lesions as a data set: Fed-ISIC2019's sites and class counts, scaled, with patients of several images.

First how lesions are drawn, then the class counts of the benchmark and the data set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError
from npr.config import LabelsOfImage
from npr.data.catalogue import Catalogue, NamedSplit
from npr.data.store import Decode, ImageStorage, digest_of

# Drawing dermoscopy-like lesions: skin, a lesion with a border and a texture, hair, and the camera of a site.
#
# Classes differ in texture and border; position, size, rotation, phase and colour have the same distribution in all of
# them. So single pixels say little, and a network has something to learn. Each lesion also has a weaker second texture,
# which makes classes overlap. No image imitates a diagnosis: this is for tests and demonstrations.


Floats = NDArray[np.float32]


def _f32(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float32)


# How ragged the border is, per class; neighbours overlap.
RAGGED = np.array([0.11, 0.04, 0.06, 0.08, 0.05, 0.04, 0.05, 0.09], dtype=np.float32)
# Mean pigment against skin (red, green, blue), per class; every lesion strays from it by more than classes differ.
PIGMENT = np.array(
    [
        [0.52, 0.46, 0.46],
        [0.62, 0.52, 0.46],
        [0.70, 0.56, 0.52],
        [0.72, 0.54, 0.50],
        [0.62, 0.54, 0.50],
        [0.68, 0.58, 0.54],
        [0.62, 0.42, 0.44],
        [0.70, 0.50, 0.48],
    ],
    dtype=np.float32,
)
# Pictures are drawn some at a time, fewer of large ones: a few hundred bytes per pixel are in use at once.
CHUNK, CHUNK_PIXELS = 128, 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Camera:
    """The look of one site: colour gain per channel, darkening of the corners, hairs per image, noise."""

    tint: tuple[float, float, float]
    vignette: float
    hairs: float
    noise: float
    zoom: float


CAMERAS = (
    Camera(tint=(1.00, 0.98, 0.96), vignette=0.10, hairs=0.8, noise=0.020, zoom=1.00),
    Camera(tint=(1.06, 0.94, 0.90), vignette=0.35, hairs=0.4, noise=0.030, zoom=1.10),
    Camera(tint=(0.97, 1.00, 1.03), vignette=0.15, hairs=0.8, noise=0.015, zoom=0.95),
    Camera(tint=(1.08, 0.92, 0.98), vignette=0.05, hairs=1.6, noise=0.020, zoom=1.15),
    Camera(tint=(0.92, 0.97, 1.06), vignette=0.25, hairs=0.6, noise=0.025, zoom=0.90),
    Camera(tint=(1.10, 0.98, 0.84), vignette=0.45, hairs=0.3, noise=0.035, zoom=1.05),
)


@dataclass(frozen=True, slots=True)
class Lesions:
    """What all pictures of one lesion share; one entry per lesion in every array."""

    labels: NDArray[np.int64]
    skin: Floats
    pigment: Floats
    radius: Floats
    oval: Floats
    harmonics: NDArray[np.complex64]
    softness: Floats
    second: NDArray[np.int64]
    strength: Floats
    frequency: Floats
    phase: Floats
    coarse: Floats


def draw_lesions(labels: NDArray[np.int64], rng: np.random.Generator) -> Lesions:
    """The lesions themselves, before anybody takes a picture."""
    n = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Floats:
        return rng.uniform(low, high, size=(n, *shape)).astype(np.float32)

    tone = uniform(0.75, 1.05, 1)
    skin = _f32([0.86, 0.66, 0.56]) * tone + uniform(-0.04, 0.04, 3)
    pigment = skin * PIGMENT[labels % len(PIGMENT)] * uniform(0.75, 1.25, 1) * uniform(0.93, 1.07, 3)
    ragged = RAGGED[labels % len(RAGGED), None] * uniform(0.6, 1.5, 1)
    waves = rng.normal(size=(n, 5)) + 1j * rng.normal(size=(n, 5))
    strength = np.stack([uniform(0.45, 0.95), uniform(0.0, 0.45)], axis=1)
    return Lesions(
        labels=labels,
        skin=skin.astype(np.float32),
        pigment=pigment.astype(np.float32),
        radius=uniform(0.44, 0.68),
        oval=uniform(0.75, 1.0),
        harmonics=(ragged * waves / np.sqrt(2)).astype(np.complex64),
        softness=uniform(0.03, 0.10),
        second=rng.integers(0, len(TEXTURES), size=n),
        strength=strength,
        frequency=uniform(4.5, 6.0),
        phase=uniform(0.0, 2 * np.pi, 4),
        coarse=rng.normal(size=(n, 7, 7)).astype(np.float32),
    )


def photograph(
    lesions: Lesions, of: NDArray[np.int64], cameras: NDArray[np.int64], *, size: int, seed: int
) -> NDArray[np.uint8]:
    """Picture i shows lesion `of[i]` through camera `cameras[i]`: (N, size, size, 3)."""
    images = np.empty((len(of), size, size, 3), dtype=np.uint8)
    for start in range(0, len(of), chunk_rows(size)):
        taken = photograph_chunk(lesions, of, cameras, start, size=size, seed=seed)
        images[start : start + len(taken)] = taken
    return images


def chunk_rows(size: int) -> int:
    """How many pictures of this size are taken at a time."""
    return min(CHUNK, max(1, CHUNK_PIXELS // size**2))


def photograph_chunk(
    lesions: Lesions, of: NDArray[np.int64], cameras: NDArray[np.int64], start: int, *, size: int, seed: int
) -> NDArray[np.uint8]:
    """The pictures from `start` on that are taken at a time; they do not depend on those before them."""
    rows = slice(start, start + chunk_rows(size))
    return _photograph(lesions, of[rows], cameras[rows], size, np.random.default_rng([seed, 2, start]))


def _photograph(
    lesions: Lesions, of: NDArray[np.int64], cameras: NDArray[np.int64], size: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    n = len(of)
    zoom = np.array([CAMERAS[c].zoom for c in cameras], dtype=np.float32)
    u, v = _frame(n, size, zoom, rng)
    oval = lesions.oval[of, None, None]
    distance = np.hypot(u, v / oval)
    turned = ((u + 1j * v / oval) / np.maximum(distance, 1e-3)).astype(np.complex64)
    border = lesions.radius[of, None, None] * (1 + _waves(turned, lesions.harmonics[of]))
    inside = 1 / (1 + np.exp(np.clip((distance - border) / lesions.softness[of, None, None], -20, 20)))

    relative = _f32(distance / lesions.radius[of, None, None])
    shade = np.zeros((n, size, size), dtype=np.float32)
    for rank, kinds in enumerate((lesions.labels[of] % len(TEXTURES), lesions.second[of])):
        for kind in np.unique(kinds):
            rows = np.flatnonzero(kinds == kind)
            field = _Field(
                u=u[rows],
                v=v[rows],
                relative=relative[rows],
                turned=turned[rows],
                wave=_f32(2 * np.pi * lesions.frequency[of[rows], None, None]),
                phase=lesions.phase[of[rows]].T[:, :, None, None],
                coarse=lesions.coarse[of[rows]],
                rng=rng,
            )
            shade[rows] += lesions.strength[of[rows], rank, None, None] * _PATTERNS[TEXTURES[kind]](field)
    lesion = lesions.pigment[of, None, None, :] * (1 + 0.45 * shade[..., None])
    skin = lesions.skin[of, None, None, :]
    picture = skin + inside[..., None] * (lesion - skin)
    return _develop(picture.astype(np.float32), cameras, rng)


def _frame(n: int, size: int, zoom: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Coordinates in the lesion's own frame; each picture is turned and shifted anew."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    x = axis[None, None, :] - rng.uniform(-0.18, 0.18, size=(n, 1, 1))
    y = axis[None, :, None] - rng.uniform(-0.18, 0.18, size=(n, 1, 1))
    angle = rng.uniform(0, 2 * np.pi, size=(n, 1, 1))
    cos, sin = np.cos(angle) / zoom[:, None, None], np.sin(angle) / zoom[:, None, None]
    return (cos * x + sin * y).astype(np.float32), (cos * y - sin * x).astype(np.float32)


def _waves(turned: NDArray[np.complex64], harmonics: NDArray[np.complex64]) -> Floats:
    """Sum of the 2nd to 6th harmonic of the angle, as powers of a unit complex number."""
    power = turned * turned
    total = np.zeros(turned.shape, dtype=np.float32)
    for k in range(harmonics.shape[1]):
        total += (power * harmonics[:, k, None, None]).real
        power = power * turned
    return total


@dataclass(frozen=True, slots=True)
class _Field:
    """What a texture may look at: coordinates of each pixel and what its lesion was born with."""

    u: Floats
    v: Floats
    relative: Floats
    turned: NDArray[np.complex64]
    wave: Floats
    phase: Floats
    coarse: Floats
    rng: np.random.Generator


# Patterns of about -1 to 1; frequencies are in cycles over half the image, whatever its size.
_PATTERNS: dict[str, Callable[[_Field], NDArray[Any]]] = {
    "blotches": lambda f: np.tanh(2.5 * _smooth(f.coarse, f.u, f.v)),
    "network": lambda f: (
        1 - 1.6 * np.maximum(np.cos(f.wave * f.u + f.phase[0]), np.cos(f.wave * f.v + f.phase[1])).clip(0, None)
    ),
    "stripes": lambda f: np.tanh(2 * np.cos(f.wave * (f.u + 0.08 * np.sin(3 * f.v + f.phase[2])) + f.phase[0])),
    "speckle": lambda f: np.tanh(1.2 * f.rng.standard_normal(f.u.shape, dtype=np.float32)),
    "globules": lambda f: (
        0.5
        - 2.2
        * (np.cos(0.75 * f.wave * f.u + f.phase[0]) * np.cos(0.75 * f.wave * f.v + f.phase[1]) - 0.2).clip(0, None)
    ),
    "centre": lambda f: 1.6 * np.exp(-((f.relative / 0.45) ** 2)) - 0.6,
    "rings": lambda f: np.tanh(2 * np.cos(0.7 * f.wave * f.relative + f.phase[0])),
    "spokes": lambda f: np.tanh(2 * (f.turned**12 * np.exp(1j * f.phase[3])).real) * np.minimum(1, f.relative / 0.4),
}
TEXTURES = tuple(_PATTERNS)


def _smooth(coarse: Floats, u: Floats, v: Floats) -> Floats:
    """Bilinear reading of a coarse grid of values per lesion, in the lesion's frame."""
    cells = coarse.shape[1] - 1
    a, b = (np.clip((w + 1.3) / 2.6, 0, 0.9999) * cells for w in (u, v))
    i, j = a.astype(np.int64), b.astype(np.int64)
    fa, fb = a - i, b - j
    n = np.arange(len(coarse))[:, None, None]
    top = coarse[n, i, j] * (1 - fb) + coarse[n, i, j + 1] * fb
    low = coarse[n, i + 1, j] * (1 - fb) + coarse[n, i + 1, j + 1] * fb
    return _f32(top * (1 - fa) + low * fa)


def _develop(picture: Floats, cameras: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Hair, then the site's camera: light, tint, dark corners, noise, eight bits."""
    n, size = picture.shape[:2]
    used = [CAMERAS[c] for c in cameras]
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1
    _hairs(picture, axis, rng.poisson([camera.hairs for camera in used]), rng)
    corner = 1 - _f32([c.vignette for c in used])[:, None, None] * (axis[:, None] ** 2 + axis**2) / 2
    gain = _f32([c.tint for c in used]) * rng.uniform(0.88, 1.10, size=(n, 1)).astype(np.float32)
    picture = picture * corner[..., None] * gain[:, None, None, :]
    noise = rng.standard_normal(picture.shape, dtype=np.float32) * _f32([c.noise for c in used])[:, None, None, None]
    return np.asarray(np.clip((picture + noise) * 255 + 0.5, 0, 255), dtype=np.uint8)


def _hairs(picture: Floats, axis: Floats, number: NDArray[np.int64], rng: np.random.Generator) -> None:
    """Dark thin arcs across the image, painted in place, one hair of every image at a time."""
    for hair in range(int(number.max(initial=0))):
        rows = np.flatnonzero(number > hair)
        angle, offset, bend = (
            rng.uniform(low, high, size=(len(rows), 1, 1)) for low, high in ((0, np.pi), (-0.8, 0.8), (-0.4, 0.4))
        )
        along = np.cos(angle) * axis + np.sin(angle) * axis[:, None]
        across = np.cos(angle) * axis[:, None] - np.sin(angle) * axis
        gap = (across - offset - bend * along**2) * (len(axis) / 2)
        picture[rows] *= (1 - 0.7 * np.exp(-(gap**2))).astype(np.float32)[..., None]


# Class counts of the benchmark, counted again from its split file.

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


def _drawing(lesions: Lesions, of: NDArray[np.int64], cameras: NDArray[np.int64], *, size: int, seed: int) -> Decode:
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
