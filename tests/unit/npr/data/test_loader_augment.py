"""Batch augmentation against slow image-by-image references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import correlate1d

from lazaret.errors import ConfigError
from npr.data.loader import Augmentation, Blur, blur, blur_matrix, flip, rotate


def batch(rows=6, size=16, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, size, size, 3), dtype=np.uint8)


def test_flips_mirror_whole_images_and_only_some():
    before = batch(rows=200, size=4)
    after = flip(before.copy(), Augmentation(), np.random.default_rng(0))
    kinds = {"none": 0, "across": 0, "down": 0, "both": 0}
    for old, new in zip(before, after, strict=True):
        variants = {"none": old, "across": old[:, ::-1], "down": old[::-1], "both": old[::-1, ::-1]}
        kinds[next(name for name, image in variants.items() if np.array_equal(image, new))] += 1
    assert min(kinds.values()) > 30
    never = Augmentation(flip_horizontal=0.0, flip_vertical=0.0)
    assert np.array_equal(flip(before.copy(), never, np.random.default_rng(0)), before)


@pytest.mark.parametrize(("taps", "sigma"), [(5, 0.7), (9, 5.0), (9, 0.1)])
def test_blur_matrix_is_reflected_correlation(taps, sigma):
    line = np.random.default_rng(1).normal(size=20).astype(np.float32)
    offsets = np.arange(taps) - taps // 2
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    expected = correlate1d(line.astype(np.float64), kernel / kernel.sum(), mode="mirror")
    matrix = blur_matrix(20, taps, torch.tensor([sigma]))[0]
    assert np.allclose((matrix @ torch.from_numpy(line)).numpy(), expected, atol=1e-5)


def test_blur_is_wide_across_and_down_as_asked_and_keeps_flat_images():
    spike = torch.zeros(1, 1, 21, 21)
    spike[0, 0, 10, 10] = 1.0
    out = blur(spike, Blur(width=5, height=9, sigma=(3.0, 3.0)), np.random.default_rng(0))[0, 0]
    rows, columns = torch.nonzero(out > 0, as_tuple=True)
    assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == (9, 5)
    flat = torch.full((3, 3, 16, 16), 80.0)
    assert torch.allclose(blur(flat, Blur(), np.random.default_rng(0)), flat, atol=1e-3)


@pytest.mark.parametrize("degrees", [90.0, 25.0])
def test_rotation_agrees_with_pillow(degrees, monkeypatch):
    smooth = np.asarray(Image.fromarray(batch(rows=1, size=8)[0]).resize((64, 64), Image.Resampling.BICUBIC))

    class Fixed:
        def uniform(self, low, high, size):
            return np.full(size, high)

    images = torch.from_numpy(smooth.copy()).permute(2, 0, 1)[None].float()
    ours = rotate(images, Augmentation(rotation=degrees, fill="zeros"), Fixed())[0].permute(1, 2, 0).numpy()
    theirs = [
        np.asarray(Image.fromarray(smooth).rotate(sign * degrees, Image.Resampling.BILINEAR), dtype=np.float32)
        for sign in (1, -1)
    ]
    inner = (slice(16, 48), slice(16, 48))
    assert min(np.abs(ours[inner] - image[inner]).mean() for image in theirs) < 1.0


def test_rotation_of_a_wide_image_is_a_turn_not_a_shear():
    images = torch.zeros(1, 1, 20, 40)
    images[0, 0, 10, 5:35] = 1.0

    class Quarter:
        def uniform(self, low, high, size):
            return np.full(size, 90.0)

    out = rotate(images, Augmentation(rotation=90.0, fill="zeros"), Quarter())[0, 0]
    assert (out.sum(dim=0) > 0.5).sum() <= 2 and (out.sum(dim=1) > 0.5).sum() == 20


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="no centre"):
        Blur(width=4)
    with pytest.raises(ConfigError, match="positive"):
        Blur(sigma=(0.0, 1.0))
    with pytest.raises(ConfigError, match="fill"):
        Augmentation(fill="mirror")
    with pytest.raises(ConfigError, match="does not fit"):
        blur(torch.zeros(1, 1, 4, 4), Blur(), np.random.default_rng(0))
    assert Augmentation.paper().blur == Blur(width=5, height=9, sigma=(0.1, 5.0))
