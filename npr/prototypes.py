"""Local prototypes: K unit vectors per class that a site owns, made from its own features by balanced clustering.

They never leave the site: there is no way from here to a vector that is summed (docs/methods.md, what stays home).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from npr.config import TrainConfig
from npr.device import number, to_host, wide_on

# Balanced assignment of features to sub-clusters, all classes at once, in the log domain.
#
# For one class with n features and K prototypes, maximise <Q, S> + eps H(Q) over plans with row sums 1/n and column
# sums 1/K (Sinkhorn-Knopp; paper eq. 1 with the exponential it leaves out). With L = S / eps the scaling iteration is
#
#     f_j = -log n - logsumexp_k(L_jk + g_k)        g_k = -log K - logsumexp_j(L_jk + f_j)
#
# and putting the first into the second leaves g alone: g_k <- g_k - log(K mean_j softmax_k(L + g)_jk). One softmax is a
# whole iteration, its maximum is subtracted so nothing overflows for any eps, and rows are exact at every moment.
#
# Classes differ in size and in K, so nothing is padded: features of all classes stand in one matrix, and an indicator
# matrix carries column sums to classes and potentials back to features.

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


_CHUNK = 4096
_HELD_BACK = 4
_WORTH = 0.1


@dataclass(frozen=True)
class Prototypes:
    """`vectors` (P, d) of unit norm and the class of each, sorted by class; an absent class has none."""

    vectors: Tensor
    owners: Tensor

    @cached_property
    def classes(self) -> Tensor:
        """The classes that have prototypes, ascending."""
        return torch.tensor(sorted(set(to_host(self.owners).tolist()))).to(self.owners.device)

    @cached_property
    def columns(self) -> Tensor:
        """(classes, K): rows of `vectors` per class. A shorter class repeats its first, which changes no maximum."""
        positions = [torch.nonzero(self.owners == owner).flatten() for owner in self.classes]
        width = max(len(position) for position in positions)
        return torch.stack([torch.cat([p, p[:1].expand(width - len(p))]) for p in positions])

    def similarity(self, features: Tensor) -> Tensor:
        """(N, classes): cosine to the nearest prototype of each class that has one."""
        cosine = functional.normalize(features, dim=1) @ self.vectors.T
        return cosine[:, self.columns].amax(dim=2) if self.columns.shape[1] > 1 else cosine

    def scores(self, features: Tensor, num_classes: int, temperature: float) -> Tensor:
        """(N, C) probabilities by nearest prototype; a class without prototypes has none."""
        scores = features.new_zeros(len(features), num_classes)
        scores[:, self.classes] = torch.softmax(self.similarity(features) / temperature, dim=1)
        return scores

    def spread(self, answers: int) -> Tensor:
        """(classes, answers): from the classes that have prototypes to all of them, as a product."""
        return functional.one_hot(self.classes, answers).float()

    def answers(self, features: Tensor, labels: int, temperature: float) -> Tensor:
        """(N, L, 2): cosine / temperature of the answers no and yes to each label (`label_prototypes`)."""
        return paired(self.similarity(features) / temperature, self.spread(2 * labels))


# Of an answer without a prototype. Its probability is exactly zero; minus infinity would make gradients of it NaN.
_NEVER = -1e9


def paired(near: Tensor, spread: Tensor) -> Tensor:
    """(N, answers with prototypes) as (N, L, 2)."""
    spread = spread.to(near.dtype)
    return (near @ spread + _NEVER * (1.0 - spread.sum(0))).reshape(-1, spread.shape[1] // 2, 2)


def cluster_counts(counts: Tensor, clusters: int, min_per_cluster: int) -> Tensor:
    """K_c = max(1, min(K, n_c // m)), and 0 for a class the site does not have."""
    wanted = torch.clamp(counts // min_per_cluster, min=1, max=clusters)
    return torch.where(counts > 0, wanted, 0)


@torch.no_grad()
def make_prototypes(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    config: TrainConfig,
    *,
    previous: Prototypes | None = None,
    generator: torch.Generator | None = None,
) -> Prototypes:
    """Cluster the features of every class into its sub-clusters (paper eq. 1 and 2, in turns).

    Starts from `previous` when it fits, else from seeds that are far apart. The result depends on nothing but the
    arguments; only `assign = "random_subset"` draws, from `generator`.

    :param features: (N, d) of all training images of the site, under one model.
    :param labels: (N,); a class without an image gets no prototype.
    :param previous: of the round before. The extractor has moved little since, so one turn is enough from there.
    """
    # On the unit sphere: the loss compares directions (cosines), and so must the clusters that it compares with.
    unit = functional.normalize(features.float(), dim=1)
    per_class = cluster_counts(torch.bincount(labels, minlength=num_classes), config.clusters, config.min_per_cluster)
    if config.clusters_by == "explained":
        per_class = explained_counts(unit, labels, per_class, config)
    owners = torch.repeat_interleave(torch.arange(num_classes, device=labels.device), per_class)
    # Another number of images, and with it of prototypes, is another clustering: it begins anew.
    warm = previous is not None and torch.equal(previous.owners, owners)
    current = previous.vectors if warm and previous is not None else _far_apart(unit, labels, per_class)
    current = _alternate(unit, labels, current, per_class, config, generator, warm=warm)
    if warm and previous is not None and config.prototype_momentum > 0.0:
        kept = config.prototype_momentum
        current = functional.normalize(kept * previous.vectors + (1.0 - kept) * current, dim=1)
    return Prototypes(current, owners)


def label_prototypes(
    features: Tensor,
    labels: Tensor,
    config: TrainConfig,
    *,
    previous: Prototypes | None = None,
    generator: torch.Generator | None = None,
) -> Prototypes:
    """Prototypes of images that may have several labels (N, L): for each label of the images without it and with it.

    Owners are answers: 2l for the images without label l, 2l + 1 for those with it.
    """
    made = []
    for label, column in enumerate(labels.unbind(1)):
        before = None
        if previous is not None:
            own = previous.owners // 2 == label
            before = Prototypes(previous.vectors[own], previous.owners[own] - 2 * label)
        made.append(make_prototypes(features, column, 2, config, previous=before, generator=generator))
    owners = [part.owners + 2 * label for label, part in enumerate(made)]
    return Prototypes(torch.cat([part.vectors for part in made]), torch.cat(owners))


def _alternate(
    unit: Tensor,
    labels: Tensor,
    current: Tensor,
    per_class: Tensor,
    config: TrainConfig,
    generator: torch.Generator | None,
    *,
    warm: bool,
) -> Tensor:
    for _ in range(config.alternations if warm else config.alternations_first):
        weights = _assignment(unit, labels, current, per_class, config, generator)
        current = _centres(unit, labels, weights, current, per_class)
    return current


def explained_counts(unit: Tensor, labels: Tensor, most: Tensor, config: TrainConfig) -> Tensor:
    """K_c by what a further sub-cluster explains: as many as make held-back features of the class clearly nearer.

    One feature in `_HELD_BACK` is held back, by a draw that is always the same. One more prototype is accepted while it
    takes at least `_WORTH` of the remaining distance 1 - cosine of those; at most `most`.
    """
    chosen = most.clone()
    for owner in to_host(torch.nonzero(most > 1).flatten()).tolist():
        own = unit[labels == owner]
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(owner)).to(unit.device)
        held, shown = own[order[: len(own) // _HELD_BACK]], own[order[len(own) // _HELD_BACK :]]
        left = None
        for count in range(1, int(number(most[owner])) + 1):
            counts, zeros = torch.tensor([count]).to(labels.device), labels.new_zeros(len(shown))
            seeds = _far_apart(shown, zeros, counts)
            centres = _alternate(shown, zeros, seeds, counts, config, None, warm=False)
            distance = 1.0 - number((held @ centres.T).amax(1).mean())
            if left is not None and distance > (1.0 - _WORTH) * left:
                chosen[owner] = count - 1
                break
            left = distance
    return chosen


def _width(per_class: Tensor) -> int:
    """The most sub-clusters of a class."""
    return int(number(per_class.max()))


def _own_columns(labels: Tensor, per_class: Tensor) -> Tensor:
    """(N, K): rows of the prototype matrix that belong to each feature's class; columns past K_c repeat the last."""
    first = torch.cumsum(per_class, 0) - per_class
    last = (per_class - 1).clamp(min=0)[:, None]
    offsets = torch.arange(_width(per_class), device=labels.device)[None, :].minimum(last)
    return (first[:, None] + offsets)[labels]


def _assignment(
    unit: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    per_class: Tensor,
    config: TrainConfig,
    generator: torch.Generator | None,
) -> Tensor:
    """(N, K) weights of each feature over the sub-clusters of its own class (paper eq. 1).

    `sinkhorn_argmax` is the default: balanced shares decide, and then each feature counts in one sub-cluster alone, so
    that the centres stay apart. The others are its controls: `sinkhorn_soft` without the decision, `nearest` without
    the balance, `random_subset` without any clustering.
    """
    width = _width(per_class)
    if config.assign == "random_subset":
        drawn = torch.rand(len(unit), generator=generator).to(unit.device) * per_class[labels]
        return functional.one_hot(drawn.long().minimum(per_class[labels] - 1), width).float()
    similarity = (unit @ prototypes.T).gather(1, _own_columns(labels, per_class))
    if config.assign == "nearest":
        beyond = torch.arange(width, device=labels.device)[None, :] >= per_class[labels][:, None]
        return functional.one_hot(similarity.masked_fill(beyond, -torch.inf).argmax(1), width).float()
    plan = balanced_plan(similarity, labels, per_class, smoothing=config.sinkhorn_smoothing)
    if config.assign == "sinkhorn_soft":
        return plan.weights
    return functional.one_hot(plan.weights.argmax(1), width).float()


def _centres(unit: Tensor, labels: Tensor, weights: Tensor, old: Tensor, per_class: Tensor) -> Tensor:
    """Normalised weighted sums (paper eq. 2), added up in double; an empty sub-cluster keeps its old centre."""
    columns = _own_columns(labels, per_class)
    rows, spread = torch.arange(len(unit), device=unit.device), unit.new_zeros(len(unit), len(old))
    # Column by column and not by scatter_add_, which adds in no fixed order on cards.
    for k in range(columns.shape[1]):
        spread[rows, columns[:, k]] += weights[:, k]
    total = torch.zeros(old.shape, dtype=wide_on(unit.device), device=unit.device)
    for start in range(0, len(unit), _CHUNK):
        part = slice(start, start + _CHUNK)
        total += (spread[part].T @ unit[part]).to(total.dtype)
    centres = functional.normalize(total, dim=1).float()
    empty = (spread.sum(0) <= 0.0) | (total.norm(dim=1) <= 1e-12)
    return torch.where(empty[:, None], old, centres)


def _far_apart(unit: Tensor, labels: Tensor, per_class: Tensor) -> Tensor:
    """Seeds for all classes at once: the feature nearest to the class mean, then each time the farthest from all."""
    num_classes = len(per_class)
    mine = labels[None, :] == torch.arange(num_classes, device=labels.device)[:, None]  # (C, N)
    means = mine.float() @ unit
    closeness = (unit @ means.T).gather(1, labels[:, None]).flatten()
    chosen = [torch.where(mine, closeness, -torch.inf).argmax(1)]
    nearest = unit.new_full((len(unit),), -torch.inf)
    for _ in range(_width(per_class) - 1):
        newest = (unit @ unit[chosen[-1]].T).gather(1, labels[:, None]).flatten()
        nearest = torch.maximum(nearest, newest)
        chosen.append(torch.where(mine, nearest, torch.inf).argmin(1))
    picks = torch.stack(chosen, 1)  # (C, K)
    return torch.cat([unit[picks[c, :count]] for c, count in enumerate(to_host(per_class).tolist()) if count > 0])
