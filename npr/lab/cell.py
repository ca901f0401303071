"""One cell: train a federation for some rounds, evaluate it, and write result, predictions and maps to its folder.

The federation is saved after every round, so that a killed cell continues at the round where it was.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazaret.errors import ToolkitError
from npr.data.catalogue import Catalogue, assemble
from npr.data.dataset import FederatedDataset
from npr.data.sources import open_catalogue
from npr.dp.federation import PrivateFederation
from npr.federation import Federation, check_sites
from npr.lab.plan import Cell, Settings
from npr.lab.plugins import load_plugins
from npr.lab.request import privacy_of, private_plan, train_config
from npr.lab.secure import SecureAggregator, require_enough_sites
from npr.lab.store import Json, read_json, write_atomically, write_json
from npr.lab.summary import percent
from npr.methods.base import Kind
from npr.methods.regulariser import cluster
from npr.metrics import Predictions, save_predictions, summarise
from npr.model import ModelSpec, build_model
from npr.training import extract

# Maps: features and prototypes of every site in two dimensions, for plots. Only the projection is kept.

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


# When set, a finished cell keeps its models (every site's and the global one), so that they can be looked at again.
KEEP_MODELS = "LAZARET_LAB_KEEP_MODELS"

OnRound = Callable[[int, str], None]
ByKind = dict[Kind, list[Predictions]]


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
            if settings.aggregation == "secure":
                require_enough_sites(len(dataset.sites))
            build_model(_spec(settings, cell, dataset))


def run_cell(settings: Settings, cell: Cell, directory: Path, *, on_round: OnRound) -> Json:
    """Runs the cell, or what is left of it, and returns its result as stored."""
    directory.mkdir(parents=True, exist_ok=True)
    load_plugins()
    federation = build_federation(settings, cell)
    history = _resume(federation, directory)
    while federation.round < settings.rounds:
        started = time.perf_counter()
        report = federation.run_round()
        entry: Json = {
            "round": federation.round,
            "loss": round(report.loss, 5),
            "seconds": round(time.perf_counter() - started, 2),
            "evaluation": {},
        }
        last = federation.round == settings.rounds
        if not last and federation.round % settings.evaluate_every == 0:
            entry["evaluation"] = _figures(_evaluate(federation, federation.method.reports))
        history.append(entry)
        if not last:
            _checkpoint(federation, history, directory)
        on_round(federation.round, _describe(entry))  # after it is saved: a round that was reported is not run again
    if os.environ.get(KEEP_MODELS):
        federation.checkpoint(directory / "final.safetensors")
    final = _evaluate_last(federation)
    history[-1]["evaluation"] = _figures(final)
    for kind, predictions in final.items():
        save_predictions(directory / f"predictions-{kind}.npz", predictions)
    save_maps(federation, directory / "maps.npz")
    result = _result(settings, cell, federation, final, history)
    # Written last: a cell is finished exactly when this file is there.
    write_json(directory / "result.json", result)
    _remove_checkpoint(directory)
    return result


def load_data(settings: Settings, fold: int | str) -> FederatedDataset:
    data = settings.data
    return assemble(_catalogue(data.source, data.image_size, data.seed), fold=fold, folds=data.folds, seed=data.seed)


@lru_cache(maxsize=1)
def _catalogue(source: str, image_size: int, seed: int) -> Catalogue:
    """Decoded once for all cells that run in this process."""
    return open_catalogue(source, image_size=image_size, seed=seed)


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
    if plan is None:
        federation = Federation(dataset=dataset, spec=spec, config=config, seed=cell.seed)
    else:
        federation = PrivateFederation(dataset=dataset, spec=spec, config=config, seed=cell.seed, plan=plan)
    if settings.aggregation == "secure":
        federation.aggregator = SecureAggregator(federation, rounds=settings.rounds)
    return federation


def _evaluate(federation: Federation, kinds: Iterable[Kind]) -> ByKind:
    return {kind: federation.evaluate(kind) for kind in kinds}


def _evaluate_last(federation: Federation) -> ByKind:
    """Locally updated models first: loading the last aggregate and fine-tuning, as some methods do, replaces them."""
    kinds = federation.method.reports
    before = _evaluate(federation, [kind for kind in kinds if kind == "local"])
    federation.finish()
    return _evaluate(federation, [kind for kind in kinds if kind != "local"]) | before


def _figures(evaluation: ByKind) -> Json:
    """The figures of a learning curve."""
    figures = {kind: summarise(predictions) for kind, predictions in evaluation.items()}
    return {
        kind: {name: _rounded(getattr(summary, name)) for name in ("pooled_recall", "mean_bacc", "mean_bauc")}
        for kind, summary in figures.items()
    }


def _rounded(value: float) -> float | None:
    """None for a figure that does not exist, as an AUC over test images of one class."""
    return round(value, 5) if math.isfinite(value) else None


def _describe(entry: Json) -> str:
    parts = [f"{kind} {percent(figures['pooled_recall'])}" for kind, figures in entry["evaluation"].items()]
    return ", ".join([f"loss {entry['loss']:.3f}", *parts, f"{entry['seconds']:.1f} s"])


def _result(settings: Settings, cell: Cell, federation: Federation, final: ByKind, history: list[Json]) -> Json:
    dataset = federation.dataset
    return {
        "key": cell.key,
        "slug": cell.slug,
        "method": cell.method,
        "variant": cell.variant,
        "options": dict(cell.options),
        "seed": cell.seed,
        "fold": cell.fold,
        "config_hash": federation.config.config_hash,
        "data_fingerprint": dataset.fingerprint,
        "classes": list(dataset.class_names),
        "counts": {
            side: {site.name: row for site, row in zip(dataset.sites, dataset.counts(side).tolist(), strict=True)}
            for side in ("train", "test")
        },
        "parameters_shared": federation.method.manifest(federation.model, settings.rounds).size,
        "privacy": privacy_of(federation),
        "seconds": round(sum(entry["seconds"] for entry in history), 1),
        "rounds": history,
        "final": {kind: summarise(predictions).as_dict() for kind, predictions in final.items()},
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
