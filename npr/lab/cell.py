"""One cell: train a federation for some rounds, keep its models, and score them on the validation side.

The federation is saved after every round, so that a killed cell continues at the round where it was. The test side is
not here: it is opened once, when the choices are fixed (npr/lab/choices.py).
"""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazaret.errors import ConfigError, ToolkitError
from lazaret.files import write_atomically
from npr.config import LabelsOfImage
from npr.data.catalogue import Catalogue, assemble, sides_of
from npr.data.dataset import FederatedDataset, SiteData, joined
from npr.device import open_device, to_host
from npr.dp.federation import PrivateFederation
from npr.federation import Federation, check_sites
from npr.lab.models import MODELS, ByKind, TrainedCell, save_models
from npr.lab.plan import Cell, Settings
from npr.lab.plugins import load_plugins, open_data
from npr.lab.predictors import predictors_from
from npr.lab.request import labels_of, privacy_of, private_plan, train_config
from npr.lab.secure import SecureAggregator, require_enough_sites
from npr.lab.store import Json, read_json, write_json
from npr.lab.summary import percent
from npr.methods import registry
from npr.methods.regulariser import cluster
from npr.metrics import Predictions, codes, save_predictions, summarise
from npr.model import ModelSpec, build_model
from npr.training import extract
from security.crypto.ring import DEFAULT_BITS

# Maps: features and prototypes of every site in two dimensions, for plots. Only the projection is kept.

MOST_POINTS = 600

# The record of a finished training; with the models it is all that scoring needs.
TRAINED = "trained.json"


def save_maps(federation: Federation, path: Path) -> None:
    """For a method with prototypes: each site's unit features and prototypes on the features' two main axes.

    A point has one colour: images with several labels have no map.
    """
    if federation.method.regulariser is None or federation.config.labels == "many":
        return
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int64]] = {}
    for site in federation.sites:
        features, labels = extract(site.model, site.reading(site.train))
        prototypes = cluster(site, features, labels, federation.round)
        unit, vectors = to_host(torch.nn.functional.normalize(features, dim=1)), to_host(prototypes.vectors)
        centre, axes = unit.mean(0), main_axes(unit)
        if axes is None:
            continue
        step = -(-len(unit) // MOST_POINTS)
        arrays[f"{site.name}/points"] = ((unit - centre) @ axes)[::step].numpy()
        arrays[f"{site.name}/labels"] = to_host(labels)[::step].numpy()
        arrays[f"{site.name}/prototypes"] = ((vectors - centre) @ axes).numpy()
        arrays[f"{site.name}/owners"] = to_host(prototypes.owners).numpy()
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


OnRound = Callable[[int, str], None]


def try_cell(settings: Settings, cell: Cell, directory: Path, *, on_round: OnRound) -> tuple[Json | None, str]:
    """The cell's result, or None and what went wrong: one cell that fails does not take the others with it."""
    trace = directory / "error.txt"
    trace.unlink(missing_ok=True)
    try:
        return run_cell(settings, cell, directory, on_round=on_round), ""
    except ToolkitError as error:
        return None, f"{error} ({error.hint})" if error.hint else str(error)
    except Exception as error:
        write_atomically(trace, traceback.format_exc().encode())
        return None, f"unexpected {type(error).__name__}: see cells/{cell.slug}/{trace.name}"


def check_cells(settings: Settings, cells: Iterable[Cell]) -> None:
    """Everything about data and model that can be wrong, found before the first round and before anything is written.

    :raises ToolkitError: with file and row, or with the setting.
    """
    load_plugins()
    for number, (fold, cell) in enumerate({cell.fold: cell for cell in cells}.items()):
        dataset = load_data(settings, fold)
        check_sites(dataset)
        if number == 0:  # folds differ in images, not in sites or classes
            if settings.aggregation != "plain":
                require_enough_sites(len(dataset.sites))
            build_model(_spec(settings, cell, dataset))


def run_cell(settings: Settings, cell: Cell, directory: Path, *, on_round: OnRound) -> Json:
    """Trains the cell, or what is left of it, and scores it on the validation side. No test image is read here."""
    directory.mkdir(parents=True, exist_ok=True)
    load_plugins()
    dataset = load_data(settings, cell.fold)
    if not (directory / TRAINED).exists():
        _train(settings, cell, dataset, directory, on_round)
    trained = read_json(directory / TRAINED)
    if trained["train"] != train_digest(dataset):
        raise ConfigError(
            "these models were trained on other images", where=f"cells/{cell.slug}", hint="choose another --out"
        )
    found = TrainedCell(build_federation(settings, cell, dataset), directory).validate()
    for kind, by_part in found.items():
        for part, predictions in by_part.items():
            save_predictions(directory / predictions_file("validation", kind, part), predictions)
    result = _result(settings, cell, dataset, trained, found)
    # Written last: a cell is trained and validated exactly when this file is there.
    write_json(directory / "result.json", result)
    return result


def predictions_file(side: str, kind: str, part: str) -> str:
    return f"{side}-{kind.replace(' ', '-')}-{part}.npz"


def _train(settings: Settings, cell: Cell, dataset: FederatedDataset, directory: Path, on_round: OnRound) -> None:
    """All rounds, from the last checkpoint on; leaves the models and the record of the training."""
    seen = together(dataset) if registry.get(cell.method).method.central else dataset
    federation = build_federation(settings, cell, seen)
    history = _resume(federation, directory)
    while federation.round < settings.rounds:
        started = time.perf_counter()
        report = federation.run_round()
        seconds = round(time.perf_counter() - started, 2)
        entry: Json = {"round": federation.round, "loss": round(report.loss, 5), "seconds": seconds}
        if federation.round % settings.evaluate_every == 0 and federation.round < settings.rounds:
            entry["validation"] = _curve_point(federation, dataset)
        history.append(entry)
        if federation.round < settings.rounds:
            _checkpoint(federation, history, directory)
        on_round(federation.round, _describe(entry))  # after it is saved: a round that was reported is not run again
    record = {
        "key": cell.key,
        "train": train_digest(dataset),
        "parameters_shared": federation.method.manifest(federation.model, settings.rounds).size,
        "privacy": privacy_of(federation),
        "device": f"{federation.device.name}, {federation.device.precision}",
        "rounds": history,
    }
    save_maps(federation, directory / "maps.npz")
    save_models(federation, directory / MODELS, {"cell": cell.key, "round": federation.round})
    write_json(directory / TRAINED, record)
    _remove_checkpoint(directory)


def train_digest(dataset: FederatedDataset) -> str:
    """Names the training images, so that models are never scored on images that they were trained on."""
    parts = [np.sort(codes(site.train.ids)).tobytes() for site in dataset.sites]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def together(dataset: FederatedDataset) -> FederatedDataset:
    """The images of all sites at one."""
    sides = [joined([getattr(site, side) for site in dataset.sites]) for side in ("train", "test", "validation")]
    return replace(dataset, sites=(SiteData(name="all", train=sides[0], test=sides[1], validation=sides[2]),))


def load_data(settings: Settings, fold: int | str, *, with_test: bool = False) -> FederatedDataset:
    """One fold. The test side is empty unless `with_test`, which only npr/lab/choices.py may ask for."""
    data = settings.data
    catalogue = _catalogue(data.source, data.image_size, data.seed, labels_of(settings))
    own = "validation" in sides_of(catalogue, fold, folds=data.folds, seed=data.seed)
    cut = 0.0 if own else data.validation  # a split that came with a validation side keeps it
    dataset = assemble(catalogue, fold=fold, folds=data.folds, seed=data.seed, validation=cut)
    return dataset if with_test else without_test(dataset)


def without_test(dataset: FederatedDataset) -> FederatedDataset:
    """What a cell may see before the choices are fixed."""
    return replace(dataset, sites=tuple(replace(site, test=site.test.subset([])) for site in dataset.sites))


@lru_cache(maxsize=1)
def _catalogue(source: str, image_size: int, seed: int, labels: LabelsOfImage) -> Catalogue:
    """Decoded once for all cells that run in this process."""
    return open_data(source, image_size=image_size, seed=seed, labels=labels)


def _spec(settings: Settings, cell: Cell, dataset: FederatedDataset) -> ModelSpec:
    return ModelSpec(
        architecture=settings.model.architecture,
        num_classes=dataset.num_classes,
        in_channels=dataset.channels,
        weights=settings.model.weights,
        image_size=settings.data.image_size,
        seed=cell.seed,
    )


def build_federation(settings: Settings, cell: Cell, dataset: FederatedDataset | None = None) -> Federation:
    """The federation of a cell before its first round. The seed draws the initial model's head and all of training."""
    dataset = dataset or load_data(settings, cell.fold)
    spec = _spec(settings, cell, dataset)
    config, plan = train_config(settings, cell), private_plan(settings, cell)
    device = open_device(settings.computing, private=plan is not None)
    if plan is None:
        federation = Federation(dataset=dataset, spec=spec, config=config, seed=cell.seed, device=device)
    else:
        federation = PrivateFederation(
            dataset=dataset, spec=spec, config=config, seed=cell.seed, plan=plan, device=device
        )
    if settings.aggregation != "plain":
        bits = 16 if settings.aggregation == "secure-16" else DEFAULT_BITS
        federation.aggregator = SecureAggregator(federation, rounds=settings.rounds, ring_bits=bits)
    return federation


def _curve_point(federation: Federation, dataset: FederatedDataset) -> Json:
    """A point of the learning curves: every model by its head alone, on the validation side."""
    if len(federation.sites) != len(dataset.sites) or not federation.method.trains_head:
        return {}
    kinds = federation.method.reports
    return {kind: {"head": figures(federation.evaluate(kind, "validation"))} for kind in kinds}


def figures(predictions: list[Predictions]) -> Json:
    """What is chosen by and what stands beside it."""
    summary = summarise(predictions)
    return {name: _rounded(getattr(summary, name)) for name in ("pooled_recall", "mean_bacc", "mean_bauc")}


def _rounded(value: float) -> float | None:
    """None for a figure that does not exist, as an AUC over images of one class."""
    return round(value, 5) if math.isfinite(value) else None


def _describe(entry: Json) -> str:
    points = entry.get("validation", {})
    parts = [f"{kind} {percent(point['head']['pooled_recall'])}" for kind, point in points.items()]
    return ", ".join([f"loss {entry['loss']:.3f}", *parts, f"{entry['seconds']:.1f} s"])


def _result(settings: Settings, cell: Cell, dataset: FederatedDataset, trained: Json, found: ByKind) -> Json:
    history = trained["rounds"]
    return {
        "key": cell.key,
        "slug": cell.slug,
        "method": cell.method,
        "variant": cell.variant,
        "options": dict(cell.options),
        "tuned": dict(cell.tuned),
        "seed": cell.seed,
        "fold": cell.fold,
        "config_hash": train_config(settings, cell).config_hash,
        "data_fingerprint": dataset.fingerprint,
        "classes": list(dataset.class_names),
        "counts": {
            side: {site.name: row for site, row in zip(dataset.sites, dataset.counts(side).tolist(), strict=True)}
            for side in ("train", "validation")
        },
        "parameters_shared": trained["parameters_shared"],
        "privacy": trained.get("privacy"),
        "device": trained["device"],
        "seconds": round(sum(entry["seconds"] for entry in history), 1),
        "rounds": history,
        "validation": {
            kind: {p.name: figures(p.combine(by_part)) for p in predictors_from(tuple(by_part))}
            for kind, by_part in found.items()
        },
    }


def _resume(federation: Federation, directory: Path) -> list[Json]:
    """Goes back to the last checkpoint, if there is one; its history is cut to the rounds the checkpoint holds."""
    state, log = directory / "checkpoint.safetensors", directory / "history.json"
    if not state.exists() or not log.exists():
        return []
    federation.restore(state)
    rounds: list[Json] = read_json(log)["rounds"]
    return rounds[: federation.round]


def _checkpoint(federation: Federation, history: list[Json], directory: Path) -> None:
    """History before state: after a kill in between, the history is only longer, and `_resume` cuts it."""
    write_json(directory / "history.json", {"rounds": history})
    federation.checkpoint(directory / "checkpoint.safetensors")


def _remove_checkpoint(directory: Path) -> None:
    for name in ("checkpoint.safetensors", "history.json"):
        (directory / name).unlink(missing_ok=True)
