"""Augmentation of whole batches: flips on bytes, blur as two matrix products, rotation as one resampling.

Every image of a batch draws its own flips, angle and blur. The random numbers come from the caller's generator and
always in the same order, so that a batch is a function of its seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from lazaret.errors import ConfigError


class Draws(Protocol):
    """What is needed of a numpy generator."""

    def random(self, size: int, /) -> NDArray[np.float64]: ...

    def uniform(self, low: float, high: float, size: int) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True)
class PartOfDraws:
    """Draws for a whole batch, of which one part is wanted: what an image meets does not depend on who works on it."""

    whole: np.random.Generator
    count: int
    part: slice

    def random(self, size: int, /) -> NDArray[np.float64]:
        del size
        return self.whole.random(self.count)[self.part]

    def uniform(self, low: float, high: float, size: int) -> NDArray[np.float64]:
        del size
        return self.whole.uniform(low, high, self.count)[self.part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blur:
    """Gaussian blur with a kernel of `width` x `height` pixels and a standard deviation drawn from `sigma`."""

    width: int = 5
    height: int = 9
    sigma: tuple[float, float] = (0.1, 5.0)

    def __post_init__(self) -> None:
        if self.width % 2 == 0 or self.height % 2 == 0 or min(self.width, self.height) < 1:
            raise ConfigError(f"a blur kernel of {self.width} x {self.height} has no centre", hint="use odd sizes")
        if not 0.0 < self.sigma[0] <= self.sigma[1]:
            raise ConfigError(f"blur sigma {self.sigma} is not a range of positive numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """What training images go through; probabilities of flips, degrees of rotation either way.

    :param fill: what rotation brings in at the corners: `zeros` (black, as in the FedNPR release) or `border`.
    """

    flip_horizontal: float = 0.5
    flip_vertical: float = 0.5
    rotation: float = 10.0
    blur: Blur | None = None
    fill: str = "border"

    def __post_init__(self) -> None:
        if self.fill not in ("zeros", "border"):
            raise ConfigError(f"unknown fill {self.fill!r}", hint="zeros or border")

    @classmethod
    def paper(cls) -> Augmentation:
        """The FedNPR release: blur always on (5 x 9, sigma up to 5 pixels), black corners."""
        return cls(blur=Blur(), fill="zeros")


def flip(images: NDArray[np.uint8], augmentation: Augmentation, rng: Draws) -> NDArray[np.uint8]:
    """Mirror some images of an (N, H, W, C) batch, in place; the caller owns the array."""
    for probability, axis in ((augmentation.flip_horizontal, 2), (augmentation.flip_vertical, 1)):
        chosen = np.flatnonzero(rng.random(len(images)) < probability)
        images[chosen] = np.flip(images[chosen], axis=axis)
    return images


def blur(images: torch.Tensor, spec: Blur, rng: Draws) -> torch.Tensor:
    """Separable blur of a float (N, C, H, W) batch, edges reflected, one sigma per image."""
    sigma = torch.from_numpy(rng.uniform(*spec.sigma, size=len(images)).astype(np.float32)).to(images.device)
    rows = blur_matrix(images.shape[2], spec.height, sigma)
    columns = blur_matrix(images.shape[3], spec.width, sigma)
    return torch.matmul(torch.matmul(rows[:, None], images), columns[:, None].transpose(-1, -2))


def blur_matrix(length: int, taps: int, sigma: torch.Tensor) -> torch.Tensor:
    """(N, length, length): multiplying by it blurs one axis, reflection at the edges included."""
    radius = taps // 2
    if radius >= length:
        raise ConfigError(f"a blur of {taps} pixels does not fit an image of {length}")
    offsets = torch.arange(-radius, radius + 1, device=sigma.device)
    weights = torch.exp(-0.5 * (offsets[None] / sigma[:, None]) ** 2)
    weights = weights / weights.sum(dim=1, keepdim=True)
    source = (torch.arange(length, device=sigma.device)[:, None] + offsets[None]).abs()
    source = (length - 1) - ((length - 1) - source).abs()
    # One-hot (length, taps, length), contracted with the taps: where reflection folds two taps they add up.
    return torch.einsum("nt,ltm->nlm", weights, F.one_hot(source, length).float())


def rotate(images: torch.Tensor, augmentation: Augmentation, rng: Draws) -> torch.Tensor:
    """Turn every image about its centre by its own angle, bilinear."""
    angles = rng.uniform(-augmentation.rotation, augmentation.rotation, size=len(images)) * (math.pi / 180.0)
    height, width = images.shape[2:]
    cos, sin = np.cos(angles), np.sin(angles)
    zero = np.zeros_like(cos)
    # The sampling grid runs from -1 to 1 on both axes: the two ratios keep a turn a turn on images that are not square.
    theta = np.stack(
        [np.stack([cos, -sin * height / width, zero], 1), np.stack([sin * width / height, cos, zero], 1)], 1
    )
    turns = torch.from_numpy(theta.astype(np.float32)).to(images.device)
    grid = F.affine_grid(turns, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=augmentation.fill, align_corners=False)
