"""Splits that keep a patient (or lesion) on one side, balanced by stratum, the same on every machine.

The order in which units are dealt comes from SHA-256 and not from a library's generator: a published fold must not
change when numpy does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from security.errors import DataError


def _rank(seed: int, unit: str) -> bytes:
    return hashlib.sha256(f"{seed}\x00{unit}".encode()).digest()


def grouped_folds(units: Sequence[str], strata: Sequence[Hashable], *, folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold (0 .. folds-1) of every row; all rows of a unit get the same one.

    Stratum by stratum (site x class), larger units first, each unit goes to the fold that has the fewest rows of its
    stratum so far, and among those to the fold with the fewest rows in all: small strata spread over the folds
    instead of piling up in the first.
    """
    if folds < 2:
        raise DataError(f"{folds} folds cannot hold a train and a test side", hint="use 2 or more")
    rows_of: dict[str, list[int]] = {}
    for row, unit in enumerate(units):
        rows_of.setdefault(unit, []).append(row)
    if len(rows_of) < folds:
        raise DataError(f"{len(rows_of)} units cannot be dealt to {folds} folds", hint="use fewer folds")
    members: dict[str, list[str]] = {}
    for unit, rows in rows_of.items():
        # A unit seen at two sites is counted in the stratum that most of its rows are in; ties go by name.
        names = sorted(str(strata[row]) for row in rows)
        members.setdefault(max(names, key=names.count), []).append(unit)
    fold_of = np.empty(len(units), dtype=np.int64)
    totals = np.zeros(folds, dtype=np.int64)
    for stratum in sorted(members):
        held = np.zeros(folds, dtype=np.int64)
        for unit in sorted(members[stratum], key=lambda u: (-len(rows_of[u]), _rank(seed, u))):
            fold = int(np.lexsort((totals, held))[0])
            rows = rows_of[unit]
            held[fold] += len(rows)
            totals[fold] += len(rows)
            fold_of[rows] = fold
    return fold_of


def grouped_holdout(
    units: Sequence[str], strata: Sequence[Hashable], *, fraction: float, seed: int = 0
) -> NDArray[np.bool_]:
    """True for the rows held out: about `fraction` of every stratum, whole units."""
    if not 0.0 < fraction < 1.0:
        raise DataError(f"a holdout of {fraction} leaves one side empty", hint="use a fraction between 0 and 1")
    parts = max(2, round(1.0 / min(fraction, 1.0 - fraction)))
    folds = grouped_folds(units, strata, folds=parts, seed=seed)
    return np.asarray((folds == 0) if fraction <= 0.5 else (folds != 0))


def check_grouped(units: Sequence[str], sides: Sequence[str], *, unit_kind: str, names: Sequence[str]) -> None:
    """Raise if a unit has rows on two sides; the error names the two rows and keeps the patient's id out."""
    for _, error in on_two_sides(units, sides, unit_kind=unit_kind, names=names):
        raise error


def on_two_sides(
    units: Sequence[str], sides: Sequence[str], *, unit_kind: str, names: Sequence[str]
) -> Iterator[tuple[int, DataError]]:
    """Every row whose unit began on another side, with what to say about it."""
    first: dict[str, int] = {}
    for row, (unit, side) in enumerate(zip(units, sides, strict=True)):
        seen = first.setdefault(unit, row)
        if sides[seen] != side:
            yield (
                row,
                DataError(
                    f"one {unit_kind} is in {side!r} here and in {sides[seen]!r} in {names[seen]}",
                    where=names[row],
                    hint=f"put all images of a {unit_kind} on one side, or leave the split out and let it be made",
                ),
            )
