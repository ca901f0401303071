"""Colour constancy and brightness."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from npr.data.fed_isic import normal_brightness, shades_of_gray, shorter_side


def test_sanity_26_shades_of_gray_leaves_a_grey_image_alone():
    grey = np.repeat(np.random.default_rng(0).integers(0, 256, (12, 9, 1), dtype=np.uint8), 3, axis=2)
    assert np.array_equal(shades_of_gray(grey), grey)


def test_sanity_26_highlights_are_clipped_and_do_not_wrap_around():
    # A red cast: blue gets a gain above two, so that a blue highlight would pass 255 and wrap to a dark value.
    image = np.full((10, 10, 3), (240, 120, 60), dtype=np.uint8)
    image[0, 0] = (255, 255, 255)
    light = np.mean(image.astype(np.float64) ** 6, axis=(0, 1)) ** (1 / 6)
    gain = np.linalg.norm(light) / (np.sqrt(3) * light)
    assert (image[0, 0] * gain).max() > 300
    out = shades_of_gray(image)
    assert out.dtype == np.uint8 and out[0, 0, 2] == 255
    assert np.array_equal(out, np.clip(np.rint(image * gain), 0, 255).astype(np.uint8))
    wrapped = np.rint(image * gain).astype(np.int64).astype(np.uint8)
    assert wrapped[0, 0, 2] < 128  # what the missing clip would have stored


def test_a_cast_is_removed():
    base = np.random.default_rng(1).integers(30, 120, (40, 40, 1)).repeat(3, axis=2)
    tinted = np.rint(base * np.array([1.5, 1.0, 0.7])).astype(np.uint8)
    means = shades_of_gray(tinted).mean(axis=(0, 1))
    assert means.max() / means.min() < 1.02 < tinted.mean(axis=(0, 1)).max() / tinted.mean(axis=(0, 1)).min()


def test_black_and_single_colour_images_survive():
    assert not shades_of_gray(np.zeros((4, 4, 3), np.uint8)).any()
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 200
    assert shades_of_gray(red)[..., 1:].max() == 0


def test_brightness_goes_to_the_target_within_a_factor_of_two():
    dull = np.full((4, 4, 3), 100, np.uint8)
    assert normal_brightness(dull, target=140.0).mean() == 140
    assert normal_brightness(np.full((4, 4, 3), 10, np.uint8)).mean() == 20
    assert normal_brightness(np.full((4, 4, 3), 250, np.uint8), target=100.0).mean() == pytest.approx(125)


def test_shorter_side_keeps_the_aspect():
    assert shorter_side(Image.new("RGB", (600, 450)), 224).size == (299, 224)
    assert shorter_side(Image.new("RGB", (450, 600)), 224).size == (224, 299)
    assert shorter_side(Image.new("RGB", (100, 100)), 224).size == (224, 224)
