"""Balanced assignment of features to sub-clusters, all classes at once, in the log domain.

For one class with n features and K prototypes, maximise <Q, S> + eps H(Q) over plans with row sums 1/n and column sums
1/K (Sinkhorn-Knopp; paper eq. 1 with the exponential it leaves out). With L = S / eps the scaling iteration is

    f_j = -log n - logsumexp_k(L_jk + g_k)        g_k = -log K - logsumexp_j(L_jk + f_j)

and putting the first into the second leaves g alone: g_k <- g_k - log(K mean_j softmax_k(L + g)_jk). One softmax is a
whole iteration, its maximum is subtracted so nothing overflows for any eps, and rows are exact at every moment.

Classes differ in size and in K, so nothing is padded: features of all classes stand in one matrix, and an indicator
matrix carries column sums to classes and potentials back to features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from npr.device import number

TOLERANCE = 1e-3
MAX_ITERATIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlan:
    """`weights` (N, K): row j is n_c Q_j, so it sums to 1. `column_error` is max |K_c sum_j Q_jk - 1|."""

    weights: Tensor
    column_error: float
    iterations: int


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each step takes tens of microseconds: on a busy machine a second thread would mostly be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@_one_thread()
def balanced_plan(
    similarity: Tensor,
    labels: Tensor,
    clusters: Tensor,
    *,
    smoothing: float,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
) -> TransportPlan:
    """Solve the transport problem of every class.

    :param smoothing: weight of the entropy: a small value gives a hard assignment.
    :param similarity: (N, K) similarity of feature j to prototype k of its own class; columns past K_c are ignored.
    :param labels: (N,) class of each feature.
    :param clusters: (C,) K_c, 0 for an absent class.
    """
    width = similarity.shape[1]
    used = torch.arange(width, device=similarity.device)[:, None] < clusters[None, :]  # (K, C)
    # Prototypes run along the first axis: every reduction over the features is then along contiguous memory.
    scores = (similarity.T / smoothing).masked_fill(~used[:, labels], -torch.inf).contiguous()
    indicator = functional.one_hot(labels, len(clusters)).to(scores.dtype)  # (N, C)
    to_classes = indicator * (clusters / indicator.sum(0).clamp(min=1.0)).to(scores.dtype)
    to_features = indicator.T.contiguous()
    potentials = scores.new_zeros(width, len(clusters))
    for iteration in range(max_iterations + 1):
        weights = torch.softmax(scores + potentials @ to_features, dim=0)
        columns = weights @ to_classes  # (K, C), 1 when balanced
        error = number(torch.where(used, columns - 1.0, 0.0).abs().max())
        if error < tolerance or iteration == max_iterations:
            break
        # A column that nobody can reach underflows to zero; the floor keeps its potential finite until it catches up.
        step = torch.log(columns.clamp(min=torch.finfo(columns.dtype).tiny))
        potentials = potentials - torch.where(used, step, 0.0)
    return TransportPlan(weights=weights.T, column_error=error, iterations=iteration)
