"""The mode of layers while a model is looked at."""

from __future__ import annotations

import pytest
from torch import nn

from npr.training import evaluating


def test_every_layer_is_in_its_own_mode_again_afterwards() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2))).train()
    model[0].eval()  # as a frozen layer is
    before = [layer.training for layer in model.modules()]
    assert before == [True, False, True, True, True]
    with evaluating(model):
        assert not any(layer.training for layer in model.modules())
    assert [layer.training for layer in model.modules()] == before


def test_an_error_leaves_no_layer_in_another_mode() -> None:
    model = nn.Sequential(nn.Dropout()).train()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert all(layer.training for layer in model.modules())
