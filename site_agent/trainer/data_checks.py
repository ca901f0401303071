"""The checks of `site-agent check` that see images or train on them: what is in the data set, and a trial round.

They run in a trainer's process, which has neither network nor keys; `answer_checks` is its loop. Rows are named by
table and number, never by patient or file, so that the lines can be mailed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lazaret.checks import CheckList, Line, Unchecked, ok, problem, run, shared, tried, warning
from lazaret.errors import LocalProtocolError, ToolkitError
from lazaret.process import end
from lazaret.terminal import show_progress
from npr.data.catalogue import NO_SITE, assemble
from npr.data.dataset import FederatedDataset, Samples, SiteData
from npr.data.sources import ImageFindings, Survey, inspect_images, survey
from npr.data.store import Fault, FaultKind
from npr.recipe import Recipe, check_code, recipe_of
from security.crypto import encoding
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel, pinned_model
from site_agent.config import SiteConfig
from site_agent.trainer.channel import MAX_REMARK, Channel, CheckDone, CheckLine, CheckOrder, CheckSetup, TrainerStop
from site_agent.trainer.data import image_size_of, labels_by, ours, side_rule
from site_agent.trainer.shared_memory import shared_document


@dataclass(eq=False, kw_only=True)
class DataCheckContext:
    """One site's data, and what the agent says about it."""

    config: SiteConfig
    manifest: Manifest
    setup: CheckSetup

    @shared("the initial model cannot be used")
    def initial(self) -> InitialModel:
        return pinned_model(self.config.model_file(self.manifest.model.initial_file), self.manifest)[0]

    @shared("the settings are not those of the manifest")
    def recipe(self) -> Recipe:
        training = self.manifest.training
        if training.plugin is not None:  # a method that nobody has is refused by the trial
            from site_agent.trainer.plugin import load_plugin  # imports torch

            load_plugin(self.config, training.method, training.plugin)
        return recipe_of(self.manifest)

    @shared("the data set cannot be listed")
    def survey(self) -> Survey:
        table = self.config.data
        size = image_size_of(self.manifest)
        return survey(
            table.source,
            image_size=size,
            seed=table.seed,
            class_names=self.manifest.model.classes,
            class_map=table.class_map,
            labels=labels_by(self.manifest),
        )

    @shared("the data set cannot be divided")
    def dataset(self) -> FederatedDataset:
        """The fold in force, without pixels."""
        table = self.config.data
        if self.manifest.privacy is not None and not self.setup.ledger:
            raise Unchecked("patients get their sides by a key that is made with the ledger")
        rule = side_rule(self.config, self.manifest, bytes.fromhex(self.setup.data_key), keep=False)
        return assemble(self.survey.catalogue, fold=table.fold, rule=rule)

    @shared("this site's part of the data set is not known")
    def data(self) -> SiteData:
        return ours(self.dataset, self.config.data, self.setup.site)


DATA_CHECKS: Final = CheckList[DataCheckContext](("device", "data", "images", "code", "trial"))


def answer_checks(config: SiteConfig, channel: Channel) -> None:
    """Until the agent's side is gone."""
    begun = channel.receive()
    if begun is None or isinstance(begun[0], TrainerStop):
        end(0)
        return
    setup, document = begun
    if not isinstance(setup, CheckSetup) or document is None:
        raise LocalProtocolError("the first order says how to begin", where="trainer")
    if setup.progress:
        show_progress()
    manifest = Manifest.from_dict(encoding.loads(shared_document(document)), "manifest")
    context = DataCheckContext(config=config, manifest=manifest, setup=setup)
    while (received := channel.receive()) is not None:
        order = received[0]
        if not isinstance(order, CheckOrder) or order.name not in DATA_CHECKS:
            break
        for line in run({order.name: DATA_CHECKS[order.name]}, context):
            what, hint = line.what[:MAX_REMARK], line.hint[:MAX_REMARK]
            channel.send(CheckLine(verdict=line.verdict.value, what=what, hint=hint))
        channel.send(CheckDone())
    end(0)


SHOWN: Final = 3
_KINDS: Final = tuple(kind for kind in FaultKind if kind is not FaultKind.UNREADABLE)


@DATA_CHECKS.add
def device(context: DataCheckContext) -> Iterator[Line]:
    from site_agent.trainer.trial import computing  # imports torch

    yield from computing(context)


@DATA_CHECKS.add
def data(context: DataCheckContext) -> Iterator[Line]:
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


def _required(context: DataCheckContext) -> Iterator[Line]:
    policy, names = context.config.policy, context.dataset.class_names
    if policy.required_classes:
        counts = context.data.train.class_counts().tolist()
        yield tried("every class that the policy requires is there", lambda: policy.check_classes(names, counts))


def _under_privacy(context: DataCheckContext, unit: str) -> Iterator[Line]:
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
    hint = faults[0].error.hint or "correct these rows"
    if faults[0].kind is FaultKind.LABEL:
        hint += "; where this hospital has other names, [data] class_map says which is which"
    yield problem(f"{faults[0].kind}, {len(faults)} times: {shown}{rest}", hint)


@DATA_CHECKS.add
def images(context: DataCheckContext) -> Iterator[Line]:
    """The pixels: every image of this site is decoded once."""
    listed = context.survey
    rows = _own_rows(context)
    seen = inspect_images(listed, rows)
    yield from _faults(seen.unreadable)
    if not seen.unreadable:
        yield ok(f"all {len(rows)} images can be read")
    yield from _twice(listed, seen, _sides(context))


def _own_rows(context: DataCheckContext) -> Sequence[int]:
    """A data set may be that of several sites; all rows where this one's part is not known."""
    try:
        own = {context.data.name, NO_SITE}
    except (ToolkitError, Unchecked):
        return range(len(context.survey.catalogue))
    return [row for row, name in enumerate(context.survey.catalogue.sites) if name in own]


def _sides(context: DataCheckContext) -> dict[str, str]:
    """The side of each image id; empty where the data could not be divided."""
    try:
        site = context.data
    except (ToolkitError, Unchecked):
        return {}
    sides = (("training", site.train), ("validation", site.validation), ("test", site.test))
    return {name: side for side, samples in sides if samples is not None for name in samples.ids}


def _twice(listed: Survey, seen: ImageFindings, sides: dict[str, str]) -> Iterator[Line]:
    if not seen.same:
        yield ok("no image occurs twice")
        return
    rows, labels = listed.catalogue, listed.catalogue.labels
    pairs = np.array(seen.same)
    later, first = seen.same[0]
    across = sum(sides.get(rows.ids[a]) != sides.get(rows.ids[b]) for a, b in seen.same)
    torn = int((labels[pairs[:, 0]] != labels[pairs[:, 1]]).reshape(len(pairs), -1).any(axis=1).sum())
    others = sum(rows.units[a] != rows.units[b] for a, b in seen.same)
    remarks = [
        f"{len(seen.same)} images have the pixels of another, such as {listed.name(later)} and {listed.name(first)}",
        *([f"{across} of them on different sides, which makes local figures too good"] if across else []),
        *([f"{torn} with different labels"] if torn else []),
        *([f"{others} under different {rows.unit_kind}s"] if others and rows.unit_kind != "image" else []),
    ]
    yield warning("; ".join(remarks), "keep one row for each image")


@DATA_CHECKS.add
def code(context: DataCheckContext) -> Iterator[Line]:
    yield tried("the learning code is the manifest's", lambda: check_code(context.manifest.model.code_digest))
    yield tried("the settings are the manifest's", lambda: context.recipe)


@DATA_CHECKS.add
def trial(context: DataCheckContext) -> Iterator[Line]:
    from site_agent.trainer.trial import trial as train_once  # imports torch

    yield from train_once(context)
