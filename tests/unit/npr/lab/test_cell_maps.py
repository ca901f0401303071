"""The plane that features are drawn in."""

from __future__ import annotations

import pytest
import torch

from npr.lab.cell import main_axes

GENERATOR = torch.Generator().manual_seed(1)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_collapsed_features_have_a_plane(rank: int) -> None:
    """Most directions are exactly alike, up to rounding: eigenvalues that repeat hundreds of times."""
    spread = torch.randn(400, rank, generator=GENERATOR) @ torch.randn(rank, 640, generator=GENERATOR)
    unit = torch.nn.functional.normalize(1 + spread + 1e-7 * torch.randn(400, 640, generator=GENERATOR), dim=1)
    axes = main_axes(unit)
    assert axes is not None and axes.shape == (640, 2)
    torch.testing.assert_close(axes.T @ axes, torch.eye(2), atol=1e-5, rtol=0)


def test_the_plane_holds_what_spreads_most() -> None:
    unit = torch.zeros(100, 8)
    unit[:, 3] = torch.linspace(-1, 1, 100)
    unit[:, 5] = torch.linspace(-1, 1, 100) ** 2
    axes = main_axes(unit)
    assert axes is not None and axes[[3, 5]].abs().sum(1).min() > 0.99


def test_features_that_are_no_numbers_have_none() -> None:
    assert main_axes(torch.full((4, 8), torch.nan)) is None
