"""Losses with one value per record. Each reads its own record and public or booked state, nothing else."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from npr.dp.prototypes import PrivatePrototypes, similarity


def balanced_softmax_per_record(logits: Tensor, labels: Tensor, prior: NDArray[np.float64]) -> Tensor:
    """Balanced softmax with the private prior, whose floor keeps every class in."""
    shift = torch.as_tensor(np.log(prior), dtype=logits.dtype, device=logits.device)
    return functional.cross_entropy(logits + shift, labels, reduction="none")


def npr_per_record(
    features: Tensor,
    labels: Tensor,
    prototypes: PrivatePrototypes,
    active: NDArray[np.bool_],
    *,
    temperature: float,
) -> Tensor:
    """Softmax over the similarity to the nearest prototype of each active class.

    A class whose noisy count is too small for a prototype is left out; its records get zero, each for itself.
    """
    on = torch.as_tensor(active, device=labels.device)
    # The label's own column is never masked, so that an inactive record's value is finite before it is dropped.
    masked = (~on)[None, :] & ~functional.one_hot(labels, len(on)).bool()
    logits = (similarity(features, prototypes) / temperature).masked_fill(masked, -torch.inf)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return torch.where(on[labels], losses, torch.zeros_like(losses))
