"""What this site has learnt and what it has learnt from, from the files of its state directory. Nothing here leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

VECTORS, OWNERS = "prototypes/vectors", "prototypes/owners"
MOST_POINTS: Final = 512
_MEMORY: Final = re.compile(r"([0-9]+)\.safetensors")


def curves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures after each round, without the matrices; the last word on a round counts."""
    found = {}
    for row in rows:
        sides = {side: row[side] for side in ("validation", "test") if row.get(side)}
        kept = {side: {name: told.get(name) for name in ("bacc", "bauc")} for side, told in sides.items()}
        found[row["round"]] = {"round": row["round"], "best": bool(row.get("best")), **kept}
    return [found[number] for number in sorted(found)]


def confusion(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest matrix: of the test images if there are any, else of those for validation."""
    for row in reversed(rows):
        for side in ("test", "validation"):
            matrix = (row.get(side) or {}).get("confusion")
            if matrix:
                return {"round": row["round"], "side": side, "matrix": matrix}
    return None


def classes(path: Path) -> dict[str, Any] | None:
    """How many images of each class each side holds, as the agent wrote it down when it opened the data."""
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return told


def newest_memory(folder: Path) -> Path | None:
    numbers = [int(match[1]) for path in folder.glob("*.safetensors") if (match := _MEMORY.fullmatch(path.name))]
    return folder / f"{max(numbers)}.safetensors" if numbers else None


def prototypes(path: Path) -> dict[str, Any] | None:
    """The prototypes of a memory on the plane in which they differ most; None where there are none."""
    try:
        with safe_open(path, framework="numpy") as file:
            if VECTORS not in file.keys():  # noqa: SIM118  # not a mapping: it has keys and no `in`
                return None
            vectors, owners = file.get_tensor(VECTORS), file.get_tensor(OWNERS)
    except (FileNotFoundError, SafetensorError):
        return None  # it was replaced by that of the next round just now
    if not len(vectors):
        return None
    points, shares = on_a_plane(vectors[:MOST_POINTS].astype(np.float64))
    return {
        "round": int(path.stem),
        "points": [[round(float(x), 4), round(float(y), 4)] for x, y in points],
        "owners": [int(owner) for owner in owners[:MOST_POINTS]],
        "shares": [round(float(share), 4) for share in shares],
    }


def on_a_plane(vectors: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The first two principal components, and the share of the variance that each holds.

    The sign of a component means nothing; the largest loading is made positive, so that pictures do not flip.
    """
    centred = vectors - vectors.mean(axis=0)
    _, values, axes = np.linalg.svd(centred, full_matrices=False)
    count = min(2, len(values))
    axes = axes[:count] * np.sign(axes[np.arange(count), np.abs(axes[:count]).argmax(axis=1)])[:, None]
    points = np.zeros((len(vectors), 2))
    points[:, :count] = centred @ axes.T
    shares = np.zeros(2)
    shares[:count] = values[:count] ** 2
    total = (values**2).sum()
    return points, shares / total if total > 0 else shares
