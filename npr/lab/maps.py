"""Features and prototypes of every site in two dimensions, for plots. Only the projection is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from npr.federation import Federation
from npr.methods.regulariser import cluster
from npr.training import extract

MOST_POINTS = 600


def save_maps(federation: Federation, path: Path) -> None:
    """For a method with prototypes: each site's unit features and prototypes on the features' two main axes."""
    if federation.method.regulariser is None:
        return
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {}
    for site in federation.sites:
        features, labels = extract(site.model, site.reading(site.train))
        unit = torch.nn.functional.normalize(features, dim=1)
        prototypes = cluster(site, features, labels, federation.round)
        centre, axes = unit.mean(0), main_axes(unit)
        if axes is None:
            continue
        step = -(-len(unit) // MOST_POINTS)
        arrays[f"{site.name}/points"] = ((unit - centre) @ axes)[::step].numpy()
        arrays[f"{site.name}/labels"] = labels[::step].numpy()
        arrays[f"{site.name}/prototypes"] = ((prototypes.vectors - centre) @ axes).numpy()
        arrays[f"{site.name}/owners"] = prototypes.owners.numpy()
    if arrays:
        np.savez_compressed(path, allow_pickle=False, **arrays)


def main_axes(unit: Tensor) -> Tensor | None:
    """The plane in which features spread most; None where they are not numbers.

    In double precision: features that have collapsed onto a few directions defeat the solver in single, and a plot must
    not cost a finished cell.
    """
    if not torch.isfinite(unit).all():
        return None
    vectors: Tensor = torch.linalg.eigh(torch.cov(unit.T.double()))[1]
    return vectors[:, -2:].float()
