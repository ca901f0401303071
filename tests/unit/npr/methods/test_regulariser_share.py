"""Lambda that grows over the first rounds."""

from __future__ import annotations

import pytest
import torch

from npr.config import TrainConfig
from npr.methods.regulariser import Regulariser


@pytest.mark.parametrize(("rounds", "shares"), [(0, [1, 1, 1]), (2, [1 / 3, 2 / 3, 1, 1])])
def test_lambda_grows_to_its_value(toy, rounds, shares) -> None:
    federation = toy("fednpr", lambda_rounds=rounds, lambda_npr=0.5)
    site, regulariser = federation.sites[0], Regulariser()
    features = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    regulariser.begin_round(site, 1)
    labels = site.prototypes.classes[torch.tensor([0, 1, 0, 1])]
    features = torch.randn(4, site.prototypes.vectors.shape[1], generator=torch.Generator().manual_seed(0))
    losses = []
    for number in range(1, len(shares) + 1):
        start = site.prototypes
        regulariser.begin_round(site, number)
        site.prototypes = start  # the same prototypes in every round, so that only the weight differs
        losses.append(float(regulariser.add(site, torch.zeros(()), features, labels)))
    assert losses == pytest.approx([share * losses[-1] for share in shares], rel=1e-5)
    assert TrainConfig().lambda_rounds == 0
