"""Features of the training images are read once for each model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npr.federation import Federation
from npr.methods import site as site_module
from npr.training import extract

Toy = Callable[..., Federation]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each pass over training images has read."""
    found: list[int] = []

    def counted(model: object, batches: object) -> object:
        found.append(len(batches.samples))  # type: ignore[attr-defined]
        return extract(model, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(site_module, "extract", counted)
    return found


def test_a_model_that_was_evaluated_is_not_read_again_when_a_round_starts_from_it(
    toy: Toy, passes: list[int], same: Callable[[Federation, Federation], bool]
) -> None:
    settings = {"predict": "both"}
    plain, evaluated = toy("fednpr", **settings), toy("fednpr", **settings)
    plain.run_round(), plain.run_round()
    passes.clear()
    evaluated.run_round()
    evaluated.evaluate("global")
    assert len(passes) == 6, "three sites: prototypes of the round, prototypes of the new model"
    evaluated.run_round()
    assert len(passes) == 6, "the second round starts from the model that was evaluated"
    assert same(plain, evaluated)


def test_another_model_is_read(toy: Toy, passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    site = toy("fednpr").sites[0]
    first, _ = site.training_features(site.model)
    assert site.training_features(site.model)[0] is first and passes == [len(site.train)]
    with torch.no_grad():
        next(site.model.extractor.parameters()).add_(1e-3)
    second, _ = site.training_features(site.model)
    assert len(passes) == 2 and not torch.equal(first, second)
    monkeypatch.setattr(site.model, "extractor_dtype", torch.bfloat16)
    monkeypatch.setattr(site_module, "extract", lambda model, batches: (passes.append(0), torch.zeros(1)))
    site.training_features(site.model)
    assert len(passes) == 3, "another precision gives other features"
    site.forget_features()
    site.training_features(site.model)
    assert len(passes) == 4


def test_processes_that_train_together_all_read(toy: Toy, passes: list[int]) -> None:
    site = toy("fednpr").sites[0]
    site.training_features(site.model)
    site.group = site_module.Group(rank=0, size=2)
    with pytest.raises(Exception, match="process"):
        site.training_features(site.model)
    assert len(passes) == 2, "a process that had them already would leave the others waiting"
