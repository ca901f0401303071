"""How long a round will take here, and how much memory: a short local round on some of this site's own images.

Nothing of it is kept. Time and the memory of images are scaled up to all of them.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from lazaret import checks
from lazaret.checks import Line, Unchecked, ok, problem, warning
from lazaret.errors import DataError
from lazaret.terminal import progress
from npr.data.dataset import Samples
from npr.device import driver_version, open_device
from npr.methods import registry
from npr.methods.base import Method
from npr.methods.site import Site
from npr.recipe import Recipe
from npr.training import LocalReport
from npr.wire_layout import build_initial, spec_of
from security.dp.ledger import Ledger, Terms
from security.dp.ledger_store import MemoryStore
from security.secagg.layout import Layout
from site_agent.privacy import PrivatePlan
from site_agent.trainer.data_checks import DataCheckContext

BATCHES: Final = 3
LONG_SECONDS: Final = 10.0
PRIVATE_IMAGES: Final = 1000
TRIAL_CAP: Final = 1e6
TRIAL_ORDER: Final = 2.0
# Masked and unmasked vector, decoded sum, pieces of others: beside training there are never more.
VECTORS_IN_MEMORY: Final = 8
# Clips leave room for eight times the largest step that is expected: this many still give a step to within a percent.
FEWEST_STEPS: Final = 2000


def computing(context: DataCheckContext) -> Iterator[Line]:
    """What training will run on; one convolution was compared with the processor's."""
    device = open_device(context.config.site.computing, private=context.manifest.privacy is not None)
    yield ok(f"trains on the {device}" if not device.is_card else f"trains on {device}")
    free, driver = device.free_memory(), driver_version()
    if free is not None:
        version = f"driver {driver}" if driver else "the driver's version is not known"
        yield ok(f"{free[0] / 2**30:.1f} of {free[1] / 2**30:.1f} GiB of the card are free; {version}")


def trial(context: DataCheckContext) -> Iterator[Line]:
    """The figures of one round."""
    recipe, train = context.recipe, context.data.train
    plan = PrivatePlan.of(context.config, context.manifest)
    # A private step draws few of the images: with more of them the time of the drawing itself is not scaled up.
    wanted = PRIVATE_IMAGES if plan else BATCHES * recipe.config.batch_size
    some = _decoded(context, train, np.linspace(0, len(train) - 1, min(len(train), wanted)).astype(np.int64))
    few = some.subset(range(min(len(some), recipe.config.batch_size)))
    with _threads(context.config.site.threads), progress("a trial round") as tell:
        # The first round of a process pays for starting up; where it takes long all the same, it is the measurement.
        measured, seconds = few, _seconds(_rounds(context, recipe, few, plan))
        tell(1, 2)
        if seconds < LONG_SECONDS:
            measured, seconds = some, _seconds(_rounds(context, recipe, some, plan))
        tell(2, 2)
    estimate = seconds * len(train) / len(measured)
    yield _time(estimate, context.manifest.timing.train, f"measured on {len(measured)} of {len(train)} images")
    yield _memory(context, len(some))
    if (card := _card_memory(context)) is not None:
        yield card
    yield _resolution(context.manifest.aggregation.layout, len(train))


def _seconds(round_of: Callable[[int], LocalReport]) -> float:
    started = time.monotonic()
    round_of(1)
    return time.monotonic() - started


def _time(seconds: float, given: int, how: str) -> Line:
    time = f"training takes about {_duration(seconds)} a round, the manifest gives {_duration(given)} ({how})"
    if seconds > 0.9 * given:
        return problem(time, "a faster machine or more threads; or ask the consortium for more time")
    if seconds > 0.5 * given:
        return warning(time, "the margin is small: other work on this machine may make it too slow")
    return ok(time)


def _resolution(layout: Layout, samples: int) -> Line:
    """Quantisation error of this site's update: its part of the steps that a site at the weight cap has."""
    steps = layout.quantum * min(samples, layout.weight_cap) // layout.weight_cap
    resolution = f"quantisation of this site's update: {steps:,} steps on either side of zero"
    if layout.rounds_at_random and steps:
        # Each of N sites errs by at most half a step (standard deviation), and the mean by sqrt(N) / N of that.
        error = 0.5 / steps / math.sqrt(layout.roster_size)
        resolution += f", rounded at random; the sum errs by about {error:.1g} of a clip if all sites are like this one"
    if steps < FEWEST_STEPS:
        return warning(
            f"{resolution}: {samples} images are few for a weight_cap of {layout.weight_cap}",
            "ask the consortium for ring_bits = 32, or for a weight_cap just above the images of the largest site",
        )
    return ok(resolution)


def _memory(context: DataCheckContext, measured: int) -> Line:
    """What this process has taken at most, and what a real round holds beside it."""
    available = context.setup.available
    if available is None:
        raise Unchecked("this system does not report how much memory there is")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    images = context.survey.catalogue.images
    pool = (len(images) - measured) * int(np.prod(images.shape[1:]))
    vectors = VECTORS_IN_MEMORY * context.manifest.aggregation.layout.memory_bytes
    return checks.memory(available=available + peak, needed=peak + pool + vectors, what="a round")


def _card_memory(context: DataCheckContext) -> Line | None:
    """Of the trial's steps, which hold as much as those of a round; None on a processor."""
    device = open_device(context.config.site.computing, private=context.manifest.privacy is not None)
    free, peak = device.free_memory(), device.peak_memory()
    if free is None or peak is None:
        return None
    return checks.memory(available=free[0] + peak, needed=peak, what="a round on the card")


def _decoded(context: DataCheckContext, train: Samples, rows: NDArray[np.int64]) -> Samples:
    """Some training images with their pixels; another check reports which ones cannot be read."""
    listed = context.survey
    place = {name: row for row, name in enumerate(listed.catalogue.ids)}
    pixels: dict[int, NDArray[np.uint8]] = {}
    for row in np.unique(rows).tolist():
        try:
            pixels[row] = listed.decode(place[train.ids[row]])
        except DataError:
            continue
    if len(pixels) < 2:
        raise Unchecked("too few training images can be read")
    some = train.subset(list(pixels))
    columns: dict[str, Any] = {
        name: getattr(some, name) for name in ("labels", "ids", "units", "unit_kind", "num_classes")
    }
    return Samples(images=np.stack(list(pixels.values())), **columns)


def _rounds(
    context: DataCheckContext, recipe: Recipe, train: Samples, plan: PrivatePlan | None
) -> Callable[[int], LocalReport]:
    """A local round by its number, as the agent would begin a run."""
    model = context.manifest.model
    spec = spec_of(model.architecture, len(model.classes), recipe)
    method = registry.build(recipe.config)
    device = open_device(context.config.site.computing, private=plan is not None)
    first = build_initial(method, spec, context.initial.tensors)
    site = Site.of(context.data.name, train, first, spec, recipe.config, seed=recipe.seed, device=device)
    if plan is None:
        return lambda number: method.local_round(site, number)
    return _private(context, method, site, plan)


def _private(
    context: DataCheckContext, method: Method, site: Site, plan: PrivatePlan
) -> Callable[[int], LocalReport]:
    """With a ledger that is forgotten: nothing is released, so nothing is booked."""
    from npr.dp.private_site import PrivateTraining

    terms = Terms(population="trial", unit=plan.unit, delta=plan.delta, cap=TRIAL_CAP, order=TRIAL_ORDER)
    return PrivateTraining(
        method,
        site,
        schedule=plan.schedule,
        books=Ledger.create(MemoryStore(), terms, version="trial"),
        run=plan.run,
        dimensions=plan.settings.dimensions,
        engine=plan.settings.engine,
        views=plan.settings.views,
        micro_batch=context.config.privacy.micro_batch,
    ).local_round


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "a second"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
