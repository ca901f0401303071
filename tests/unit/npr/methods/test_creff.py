"""CReFF's server leaves alone a class that too few sites own: its gradient would be one site's mean feature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from npr.federation import Federation

Toy = Callable[..., Federation]

OWNERS = np.array([3.0, 1.0, 2.0, 0.0])
FAST = {"per_class": 4, "matching_steps": 5, "head_epochs": 3}


def served(toy: Toy, gradients: np.ndarray, **options: int) -> Federation:
    """One server step on the given sums of class gradients."""
    federation = toy("creff", options=FAST | options)
    manifest = federation.method.manifest(federation.model, 1)
    extras = {"class_gradients": gradients, "owners": OWNERS}
    federation.method.server_step(federation.model, manifest, manifest.flatten(federation.model), extras)
    return federation


def sums(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(4, 4 * 257))


@pytest.mark.parametrize(("least", "known"), [(1, [0, 1, 2]), (2, [0, 2]), (3, [0])])
def test_only_classes_with_enough_owners_are_matched(toy: Toy, least: int, known: list[int]) -> None:
    moved = served(toy, sums(0), min_owners=least).method.server_memory
    initial = served(toy, sums(0), min_owners=least, matching_steps=0).method.server_memory
    changes = (moved["synthetic"] - initial["synthetic"]).abs().amax(dim=(1, 2))
    assert torch.nonzero(moved["known"]).flatten().tolist() == known
    assert torch.nonzero(changes > 1e-6).flatten().tolist() == known


def test_what_a_lone_owner_sent_does_not_reach_the_head(toy: Toy) -> None:
    first, second = sums(0), sums(0)
    second[1] = sums(1)[1]

    def heads(least: int) -> list[torch.Tensor]:
        return [served(toy, part, min_owners=least).model.retrained_head.weight for part in (first, second)]

    assert torch.equal(*heads(2))
    assert not torch.allclose(*heads(1), atol=1e-6)


def test_the_threshold_holds_in_a_federation(toy: Toy) -> None:
    counts = ((3, 3, 0, 3), (3, 3, 3, 0), (0, 3, 3, 0))
    federation = toy("creff", counts=counts, options=FAST | {"min_owners": 2})
    federation.run_round()
    assert federation.method.server_memory["known"].tolist() == [True, True, True, False]
