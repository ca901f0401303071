"""Prediction as an axis: parts and mixtures worked out by hand, the same for every method."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from npr.config import TrainConfig
from npr.lab.predictors import PARTS, PREDICTORS, REFIT_C, LogisticHead, Mixture, parts_of, predictors_from
from npr.methods import registry
from npr.metrics import Predictions


def predictions(scores):
    scores = np.array(scores, dtype=np.float32)
    rows = np.arange(len(scores))
    return [Predictions(site="a", labels=rows % 2, scores=scores, units=rows, ids=rows)]


def test_single_parts_come_first_and_names_are_unique():
    assert tuple(PREDICTORS)[:3] == PARTS and len(PREDICTORS) == 13
    assert "0.75 head + 0.25 prototypes" in PREDICTORS
    assert all(sum(share for _, share in each.shares) == pytest.approx(1.0) for each in PREDICTORS.values())


def test_a_mixture_mixes_probabilities():
    by_part = {"head": predictions([[0.8, 0.2]]), "refit": predictions([[0.4, 0.6]])}
    (mixed,) = Mixture((("head", 0.25), ("refit", 0.75))).combine(by_part)
    assert mixed.scores[0] == pytest.approx([0.5, 0.5])
    assert PREDICTORS["head"].combine(by_part) == by_part["head"]


def test_only_parts_that_are_there_are_mixed():
    assert {each.name for each in predictors_from(("prototypes", "refit"))} == {
        "prototypes", "refit", "0.75 prototypes + 0.25 refit", "0.50 prototypes + 0.50 refit",
        "0.25 prototypes + 0.75 refit",
    }


@pytest.mark.parametrize("name", registry.names())
def test_every_method_has_the_same_predictors_whatever_it_was_registered_with(name):
    method = registry.build(TrainConfig(method=name))
    assert parts_of(method, private=False) == (PARTS[1:] if name == "frozen" else PARTS)
    assert parts_of(method, private=True) == ("head",), "the others would read patients outside the ledger"


def test_a_head_that_was_never_trained_does_not_predict():
    config = TrainConfig(method="fednpr", supervision="none", predict="prototype")
    assert parts_of(registry.build(config), private=False) == ("prototypes", "refit")


def clouds(classes):
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([owner for owner in classes for _ in range(30)])
    return torch.randn(len(labels), 6, generator=generator) + 3 * torch.eye(8)[labels][:, :6], labels


@pytest.mark.parametrize("classes", [(0, 2, 5), (1, 4)])
def test_refit_is_scikit_learns_balanced_logistic_regression_on_scaled_features(classes):
    features, labels = clouds(classes)
    scores = LogisticHead.fit(features, labels, 7).scores(features).numpy()
    scaled = (features - features.mean(0)) / features.std(0)
    model = LogisticRegression(C=REFIT_C, class_weight="balanced", max_iter=100).fit(scaled.double(), labels)
    assert scores[:, list(classes)] == pytest.approx(model.predict_proba(scaled.double()), abs=1e-3)
    absent = [owner for owner in range(7) if owner not in classes]
    assert (scores[:, absent] == 0).all() and scores.sum(1) == pytest.approx(1.0)


def test_a_site_of_one_class_predicts_it():
    features, labels = clouds((3,))
    assert (LogisticHead.fit(features, labels, 7).scores(features)[:, 3] == 1).all()
