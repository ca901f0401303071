"""What follows from one label of an image and from several; and which methods and settings have only the first form."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lazaret.errors import ConfigError
from npr.config import TrainConfig
from npr.federation import Federation
from npr.lab.predictors import parts_of
from npr.methods import registry
from npr.model import ModelSpec
from npr.task import MANY, ONE, task_for, task_of
from tests.unit.npr.conftest import with_several

Toy = Callable[..., Federation]
LABELS = 4
FORMS = [name for name in registry.names() if not registry.get(name).method.one_label]
WITHOUT = [name for name in registry.names() if name not in FORMS]


@pytest.fixture
def many(toy: Toy) -> Toy:
    """As `toy`, with several labels of each image."""
    dataset = with_several(toy("fedavg").dataset)

    def build(method: str, **train: Any) -> Federation:
        config = TrainConfig(method=method, labels="many", batch_size=8, **train)
        spec = ModelSpec(num_classes=LABELS, architecture="test_efficientnet", image_size=32)
        return Federation(dataset=dataset, spec=spec, config=config, seed=1)

    return build


def test_which_task_it_is() -> None:
    assert task_of(TrainConfig()) is ONE and task_of(TrainConfig(labels="many")) is MANY
    assert task_for(torch.zeros(3)) is ONE and task_for(torch.zeros(3, 2)) is MANY


def test_right_means_with_all_labels() -> None:
    logits = torch.tensor([[2.0, -1.0], [2.0, 1.0], [0.0, -3.0]])
    assert MANY.right(logits, torch.tensor([[1, 0], [1, 0], [1, 0]])).tolist() == [True, False, True]
    assert ONE.right(logits, torch.tensor([0, 1, 0])).tolist() == [True, False, True]


def test_probabilities_and_labels_that_a_site_has_not() -> None:
    scores = MANY.probabilities(torch.tensor([[0.0, 2.0]]))
    assert scores[0].tolist() == pytest.approx([0.5, 1 / (1 + np.exp(-2.0))])
    assert MANY.only(scores, torch.tensor([1.0, 0.0]))[0].tolist() == pytest.approx([0.5, 0.0])
    assert ONE.only(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([1.0, 1.0, 0.0]))[0].tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0.0]
    )


def test_both_of_the_papers_methods_and_those_it_compares_with_have_a_form() -> None:
    assert {"local", "fedavg", "fedprox", "fedper", "fednpr", "fednpr-per"} <= set(FORMS)
    assert set(WITHOUT) >= {"fedrs", "fedlc", "balancefl", "creff", "fedrod"}


@pytest.mark.parametrize("method", [name for name in FORMS if "+" not in name])
def test_a_round_of_every_method_that_has_a_form(many: Toy, method: str) -> None:
    federation = many(method)
    before = [site.model.head.weight.detach().clone() for site in federation.sites]
    report = federation.run_round()
    assert np.isfinite(report.loss)
    for site, start in zip(federation.sites, before, strict=True):
        absent = ~site.prior.present
        # As for absent classes: no gradient, so that the row does not move at a site that cannot say anything.
        assert torch.equal(site.model.head.weight[absent], start[absent]) or method == "central"
    kind = federation.method.reports[0]
    if kind != "local":
        federation.finish()
    for predictions in federation.evaluate(kind):
        assert predictions.scores.shape == (len(predictions), LABELS)
        assert ((predictions.scores >= 0) & (predictions.scores <= 1)).all()
    assert "refit" not in parts_of(federation.method, private=False)


@pytest.mark.parametrize("method", WITHOUT)
def test_every_other_method_says_why_not(method: str) -> None:
    reason = registry.get(method).method.one_label
    with pytest.raises(ConfigError, match=re.escape(f"'{registry.get(method).original}': {reason}")):
        registry.build(TrainConfig(method=method, labels="many"))
    registry.build(TrainConfig(method=method))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"logit_norm": "layernorm"}, "only their order is left; use 'none'"),
        ({"method": "fedper", "personal_start": "prototypes"}, "use 'shared'"),
    ],
)
def test_settings_without_a_form(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        registry.build(TrainConfig(labels="many", **settings))
    registry.build(TrainConfig(**settings))


def test_data_of_the_other_kind_are_refused(toy: Toy, many: Toy) -> None:
    with pytest.raises(ConfigError, match="the images have one label, and the settings say several"):
        toy("fedavg", labels="many")
    federation = many("fedavg")
    with pytest.raises(ConfigError, match="the images have several labels, and the settings say one"):
        Federation(dataset=federation.dataset, spec=federation.spec, config=TrainConfig(method="fedavg"), seed=1)


@pytest.mark.parametrize("settings", [{"supervision": "ce"}, {"supervision": "none", "predict": "prototype"}])
def test_other_losses(many: Toy, settings: dict[str, Any]) -> None:
    federation, plain = many("fednpr-per", **settings), many("fednpr-per")
    assert federation.run_round().loss != plain.run_round().loss
    assert np.isfinite(federation.evaluate("personal")[0].scores).all()


def test_npr_has_a_part_in_it_and_memory_is_kept(many: Toy, same: Callable[[Federation, Federation], bool]) -> None:
    federation = many("fednpr")
    federation.run_round()
    plain = _after(many("fedavg"))
    assert not same(federation, plain) and same(_after(many("fednpr", lambda_npr=0.0)), plain)
    site = federation.sites[0]
    assert site.prototypes is not None and set(site.prototypes.owners.tolist()) == set(range(2 * LABELS))
    memory = site.memory()
    site.remember(memory)
    assert torch.equal(site.prototypes.owners, memory["prototypes/owners"])


def _after(federation: Federation) -> Federation:
    federation.run_round()
    return federation
