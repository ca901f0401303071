"""The models that a cell leaves: saved without optimisers, loaded again, and their scores on one side of the data.

They are kept until the cell is judged, so that another predictor costs a pass over images and no training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lazaret.errors import DataError
from npr.data.dataset import Samples
from npr.device import to_host
from npr.dp.federation import PrivateFederation
from npr.federation import Federation
from npr.lab.predictors import SitePredictors, parts_of
from npr.methods.base import Kind
from npr.methods.local import Local
from npr.metrics import Predictions, pooled_recall
from npr.model import SplitModel

MODELS = "models.safetensors"
FITTED = "fitted.safetensors"
# The model of the one site that does best everywhere: a baseline that comes with `local`.
BEST_SITE = "best site"

ByKind = dict[str, dict[str, list[Predictions]]]
"""Model, then part of a predictor, to the predictions of every site."""
Tensors = dict[str, Tensor]


def save_models(federation: Federation, path: Path, about: Mapping[str, Any]) -> None:
    """The aggregate, and of every site's models what differs from it. Ends the federation.

    Locally updated models first: loading the last aggregate and fine-tuning, as some methods do, replaces them.
    """
    base = {name: to_host(tensor).clone() for name, tensor in federation.model.state_dict().items()}
    tensors = {f"global/{name}": tensor for name, tensor in base.items()}
    for kind in ("local", "personal"):
        if kind == "personal":
            federation.finish()
        if kind in federation.method.reports:
            for number, site in enumerate(federation.sites):
                own = {name: to_host(tensor) for name, tensor in site.model.state_dict().items()}
                changed = {name: own[name] for name in own if not torch.equal(own[name], base[name])}
                tensors |= {f"{kind}/{number}/{name}": tensor.clone() for name, tensor in changed.items()}
    _write(path, tensors, about)


def read_models(path: Path) -> tuple[dict[str, Any], Tensors]:
    """What the file says about itself, and its tensors."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {}).get("lazaret", "{}"))
            return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except FileNotFoundError:
        raise DataError("the trained models are gone", where=str(path), hint="train the cell again") from None


def _write(path: Path, tensors: Tensors, about: Mapping[str, Any]) -> None:
    """Complete or absent."""
    temporary = path.with_suffix(".partial")
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(stored, str(temporary), metadata={"lazaret": json.dumps(about)})
    os.replace(temporary, path)


class TrainedCell:
    """A federation that was trained, as its folder holds it; it predicts and does not train on."""

    def __init__(self, federation: Federation, directory: Path) -> None:
        self._federation = federation
        self._directory = directory
        self.about, self._tensors = read_models(directory / MODELS)
        self._base = {k.partition("/")[2]: t for k, t in self._tensors.items() if k.startswith("global/")}
        private = isinstance(federation, PrivateFederation)
        self.parts = parts_of(federation.method, private=private)
        self.best_site: int | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self._federation.method.reports

    def validate(self) -> ByKind:
        """Scores on the validation side. What the sites fit to their own images is kept for the day of the test."""
        found: ByKind = {}
        fitted: Tensors = {}
        for kind in self.kinds:
            heads = [SitePredictors.fit(site, self._model(kind, n), self.parts) for n, site in self._numbered()]
            fitted |= {f"{kind}/{n}/{name}": t for n, head in enumerate(heads) for name, t in head.tensors().items()}
            found[kind] = self._scores(kind, heads, lambda data: data.validation)
        if isinstance(self._federation.method, Local) and "head" in self.parts:
            everywhere = [self._everywhere(n, lambda data: data.validation) for n, _ in self._numbered()]
            recalls = [pooled_recall(predictions) for predictions in everywhere]
            self.best_site = recalls.index(max(recalls))
            found[BEST_SITE] = {"head": everywhere[self.best_site]}
        _write(self._directory / FITTED, fitted, {"best_site": self.best_site})
        return found

    def test(self) -> ByKind:
        """Scores on the test side, by what `validate` left. Nothing is fitted or chosen here."""
        about, tensors = read_models(self._directory / FITTED)
        found: ByKind = {}
        for kind in self.kinds:
            heads = [SitePredictors.of(_below(tensors, f"{kind}/{n}/"), site) for n, site in self._numbered()]
            found[kind] = self._scores(kind, heads, lambda data: data.test)
        if about["best_site"] is not None:
            found[BEST_SITE] = {"head": self._everywhere(about["best_site"], lambda data: data.test)}
        return found

    def _numbered(self) -> list[tuple[int, Any]]:
        return list(enumerate(self._federation.sites))

    def _model(self, kind: str, number: int) -> SplitModel:
        own = _below(self._tensors, f"{kind}/{number}/") if kind != "global" else {}
        model = self._federation.model if kind == "global" else self._federation.sites[number].model
        model.load_state_dict(self._base | own)
        return model

    def _scores(
        self, kind: Kind, heads: Sequence[SitePredictors], side: Callable[[Any], Samples | None]
    ) -> dict[str, list[Predictions]]:
        found: dict[str, list[Predictions]] = {part: [] for part in self.parts}
        for (number, site), head in zip(self._numbered(), heads, strict=True):
            samples = _samples(self._federation.dataset.sites[number], side)
            model = self._model(kind, number)
            scores = head.scores(self._federation.method, site, model, kind, samples, self.parts)
            for part in self.parts:
                found[part].append(self._predictions(site.name, samples, scores[part]))
        return found

    def _everywhere(self, owner: int, side: Callable[[Any], Samples | None]) -> list[Predictions]:
        """One site's model, by its head, on the images of all sites."""
        model, found = self._model("local", owner), []
        for number, site in self._numbered():
            samples = _samples(self._federation.dataset.sites[number], side)
            head = SitePredictors(None, None)
            scores = head.scores(self._federation.method, site, model, "global", samples, ("head",))["head"]
            found.append(self._predictions(site.name, samples, scores))
        return found

    def _predictions(self, site: str, samples: Samples, scores: Any) -> Predictions:
        federation = self._federation
        return Predictions.of(site, samples, scores, fold=federation.dataset.fold, seed=federation.seed)


def _samples(data: Any, side: Callable[[Any], Samples | None]) -> Samples:
    samples = side(data)
    return data.train.subset([]) if samples is None else samples


def _below(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
