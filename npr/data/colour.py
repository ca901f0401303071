"""Colour constancy and brightness of dermoscopy images, before they are squashed to a square."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def shorter_side(image: Image.Image, size: int) -> Image.Image:
    """Bilinear, aspect kept, so that the shorter side is `size`."""
    factor = size / min(image.size)
    width, height = (max(size, round(side * factor)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def shades_of_gray(pixels: NDArray[np.uint8], power: int = 6) -> NDArray[np.uint8]:
    """Divide out the colour of the light, estimated by a Minkowski mean per channel (Finlayson and Trezzi, 2004).

    A gain can lift a value above 255: it is clipped, where a plain cast to bytes would wrap a highlight to black.
    """
    values = pixels.astype(np.float64)
    light = np.mean(values**power, axis=(0, 1)) ** (1.0 / power)
    norm = float(np.linalg.norm(light))
    if norm == 0.0:
        return pixels
    gain = norm / (np.sqrt(len(light)) * np.maximum(light, norm * 1e-6))
    return np.asarray(np.clip(np.rint(values * gain), 0, 255), dtype=np.uint8)


def normal_brightness(pixels: NDArray[np.uint8], target: float = 140.0) -> NDArray[np.uint8]:
    """One gain for all channels that brings the mean to `target`, at most a factor of two either way."""
    mean = float(pixels.mean())
    gain = float(np.clip(target / max(mean, 1e-6), 0.5, 2.0))
    return np.asarray(np.clip(np.rint(pixels * gain), 0, 255), dtype=np.uint8)
