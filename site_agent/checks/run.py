"""`site-agent check`: which checks there are, and the checks of the data set.

Nothing that it trains is kept, and no message is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from lazaret.checks import Line, Unchecked, ok, problem, run, tried, warning
from lazaret.errors import ToolkitError
from npr.data.dataset import Samples
from npr.data.sources import Look, Survey, inspect_images
from npr.data.store import Fault, FaultKind
from site_agent.checks import agreement  # noqa: F401  # its checks add themselves to the list
from site_agent.checks.context import CHECKS, SiteCheckContext
from site_agent.config import SiteConfig

# The data set: what is in it, what cannot be used, what occurs twice, and what the policy does not find. Rows are named
# by table and number, never by patient or file, so that the lines can be mailed.

SHOWN: Final = 3
_KINDS: Final = (FaultKind.LABEL, FaultKind.MISSING, FaultKind.TWO_SIDES, FaultKind.REPEATED, FaultKind.SPLIT)


@CHECKS.add
def data(context: SiteCheckContext) -> Iterator[Line]:
    """The table: everything but the pixels."""
    listed = context.survey
    for kind in _KINDS:
        yield from _faults([fault for fault in listed.faults if fault.kind is kind])
    dataset, site = context.dataset, context.data
    unit = site.train.unit_kind
    yield ok(f"{context.config.data.source}: {len(listed.catalogue)} usable images, one unit is one {unit}")
    for side, samples in (("training", site.train), ("validation", site.validation), ("test", site.test)):
        if samples is not None:
            yield _counts(side, samples, dataset.class_names)
    yield from _under_privacy(context, unit) if context.manifest.privacy else _required(context)


def _required(context: SiteCheckContext) -> Iterator[Line]:
    policy, names = context.config.policy, context.dataset.class_names
    if policy.required_classes:
        counts = context.data.train.class_counts().tolist()
        yield tried("every class that the policy requires is there", lambda: policy.check_classes(names, counts))


def _under_privacy(context: SiteCheckContext, unit: str) -> Iterator[Line]:
    promised = context.manifest.privacy
    if promised is not None and promised.unit != unit:
        yield problem(
            f"the federation protects each {promised.unit}, and these data are grouped by {unit}",
            f"add a column {promised.unit!r} to the table (docs/data.md)",
        )
    yield ok("these counts are exact: do not pass them on, or epsilon is no longer valid")


def _counts(side: str, samples: Samples, names: Sequence[str]) -> Line:
    counts = samples.class_counts()
    listed = ", ".join(f"{name} {count}" for name, count in zip(names, counts.tolist(), strict=True))
    if len(samples) == 0:
        return warning(f"{side}: no images", "local figures need some; see [data] fold and validation")
    return ok(f"{side}: {len(samples)} images of {len(set(samples.units))} {samples.unit_kind}s ({listed})")


def _faults(faults: Sequence[Fault]) -> Iterator[Line]:
    """One line for all of a kind; the agent would stop at the first."""
    if not faults:
        return
    shown = "; ".join(str(fault.error) for fault in faults[:SHOWN])
    rest = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    yield problem(f"{faults[0].kind}, {len(faults)} times: {shown}{rest}", faults[0].error.hint or "correct these rows")


@CHECKS.add
def images(context: SiteCheckContext) -> Iterator[Line]:
    """The pixels: every image is decoded once."""
    listed = context.survey
    seen = inspect_images(listed)
    yield from _faults(seen.unreadable)
    if not seen.unreadable:
        yield ok(f"all {len(listed.catalogue)} images can be read")
    yield from _twice(listed, seen, _sides(context))


def _sides(context: SiteCheckContext) -> dict[str, str]:
    """The side of each image id; empty where the data could not be divided."""
    try:
        site = context.data
    except (ToolkitError, Unchecked):
        return {}
    sides = (("training", site.train), ("validation", site.validation), ("test", site.test))
    return {name: side for side, samples in sides if samples is not None for name in samples.ids}


def _twice(listed: Survey, seen: Look, sides: dict[str, str]) -> Iterator[Line]:
    if not seen.same:
        yield ok("no image occurs twice")
        return
    rows, labels = listed.catalogue, listed.catalogue.labels
    pairs = np.array(seen.same)
    later, first = seen.same[0]
    across = sum(sides.get(rows.ids[a]) != sides.get(rows.ids[b]) for a, b in seen.same)
    torn = int((labels[pairs[:, 0]] != labels[pairs[:, 1]]).sum())
    others = sum(rows.units[a] != rows.units[b] for a, b in seen.same)
    remarks = [
        f"{len(seen.same)} images have the pixels of another, such as {listed.name(later)} and {listed.name(first)}",
        *([f"{across} of them on different sides, which makes local figures too good"] if across else []),
        *([f"{torn} with different labels"] if torn else []),
        *([f"{others} under different {rows.unit_kind}s"] if others and rows.unit_kind != "image" else []),
    ]
    yield warning("; ".join(remarks), "keep one row for each image")


@CHECKS.add
def configuration(context: SiteCheckContext) -> Iterator[Line]:
    yield ok(f"{context.config.path} is valid")


@CHECKS.add
def trial(context: SiteCheckContext) -> Iterator[Line]:
    from site_agent.checks.trial import trial as train_once  # imports torch

    yield from train_once(context)


def look(config_path: Path, *, skip: Collection[str] = ()) -> Iterator[Line]:
    """Every check, whatever the others say.

    :raises ConfigError: if the configuration itself cannot be read.
    """
    return run(CHECKS, SiteCheckContext(config=SiteConfig.read(config_path)), skip=skip)
