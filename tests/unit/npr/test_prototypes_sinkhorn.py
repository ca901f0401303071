"""Balanced assignment and prototypes, against slow references and planted clusters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.nn.functional import normalize

from npr.config import TrainConfig
from npr.prototypes import Prototypes, balanced_plan, cluster_counts, make_prototypes

CONFIG = TrainConfig()


def one_class(similarity: torch.Tensor, epsilon: float = 0.05, tolerance: float = 1e-6, cap: int = 2000):
    labels = torch.zeros(len(similarity), dtype=torch.int64)
    clusters = torch.tensor([similarity.shape[1]])
    return balanced_plan(similarity, labels, clusters, smoothing=epsilon, tolerance=tolerance, max_iterations=cap)


def reference(similarity: np.ndarray, epsilon: float) -> np.ndarray:
    """Sinkhorn-Knopp on the dense kernel in double precision, 5,000 alternations."""
    n, k = similarity.shape
    kernel = np.exp(similarity.astype(np.float64) / epsilon)
    a, b = np.ones(n), np.ones(k)
    for _ in range(5000):
        b = (1 / k) / (kernel.T @ a)
        a = (1 / n) / (kernel @ b)
    return a[:, None] * kernel * b[None, :]


def cosines(n: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(n, k, generator=generator, dtype=torch.float64) - 1


def planted(sizes: tuple[int, ...], seed: int = 0, width: int = 32, spread: float = 0.1):
    """Features around as many directions as there are sizes, and the mode of each."""
    generator = torch.Generator().manual_seed(seed)
    centres = normalize(torch.randn(len(sizes), width, generator=generator) + 1.0, dim=1)
    modes = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    noise = torch.randn(len(modes), width, generator=generator) * spread / width**0.5
    return centres[modes] + noise, modes, centres


@pytest.mark.parametrize(("n", "k"), [(50, 4), (7, 3), (4, 4), (5, 4), (1, 1)])
def test_sanity_01_marginals(n: int, k: int) -> None:
    plan = one_class(cosines(n, k))
    weights = plan.weights / n
    assert torch.allclose(weights.sum(1), torch.full((n,), 1 / n, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(weights.sum(0), torch.full((k,), 1 / k, dtype=torch.float64), atol=1e-5)


def test_sanity_02_equals_dense_solver_and_ignores_shifts() -> None:
    similarity = cosines(50, 5)
    expected = reference(similarity.numpy(), 0.05)
    weights = one_class(similarity, tolerance=1e-12).weights / 50
    assert np.abs(weights.numpy() - expected).max() < 1e-10
    shifted = similarity + cosines(50, 1, seed=1) + cosines(1, 5, seed=2)
    assert torch.allclose(one_class(shifted, tolerance=1e-12).weights / 50, weights, atol=1e-10)


def test_sanity_02b_classes_in_one_call_equal_classes_alone() -> None:
    labels = torch.tensor([0, 2, 2, 0, 2, 0, 0, 2, 2, 2, 3])
    clusters = torch.tensor([2, 0, 3, 1])
    similarity = cosines(len(labels), 3)
    together = balanced_plan(similarity, labels, clusters, smoothing=0.05, tolerance=1e-12, max_iterations=5000)
    for label in (0, 2, 3):
        mine, k = labels == label, int(clusters[label])
        alone = reference(similarity[mine, :k].numpy(), 0.05) * int(mine.sum())
        assert np.abs(together.weights[mine, :k].numpy() - alone).max() < 1e-9
        assert (together.weights[mine, k:] == 0).all()


def test_sanity_03_sign_nearest_not_farthest() -> None:
    features, modes, centres = planted((40, 40, 40))
    similarity = normalize(features, dim=1) @ centres.T
    plan = one_class(similarity, epsilon=0.01)
    assert (plan.weights.argmax(1) == modes).float().mean() > 0.99
    soft = one_class(similarity.double(), epsilon=0.05)
    for row, weights in zip(similarity, soft.weights, strict=True):
        assert spearmanr(row, weights.log()).statistic > 0


def test_sanity_04_iterations_do_something() -> None:
    features, _, centres = planted((60, 20, 10))
    similarity = (normalize(features, dim=1) @ centres.T).double()
    first = one_class(similarity, tolerance=0.0, cap=1)
    later = one_class(similarity, tolerance=0.0, cap=50)
    assert later.column_error < first.column_error / 10
    assert (later.weights - torch.softmax(similarity / 0.05, dim=1)).abs().max() > 0.1


def test_sanity_05_symmetries() -> None:
    generator = torch.Generator().manual_seed(5)
    similarity = cosines(30, 4)
    plan, rows, columns = (
        one_class(similarity).weights,
        torch.randperm(30, generator=generator),
        torch.tensor([2, 0, 3, 1]),
    )
    assert torch.allclose(one_class(similarity[rows]).weights, plan[rows], atol=1e-6)
    assert torch.allclose(one_class(similarity[:, columns]).weights, plan[:, columns], atol=1e-6)

    features, _, _ = planted((20, 20, 20, 20), seed=3)
    labels = torch.arange(80) % 2
    plain = make_prototypes(features, labels, 3, CONFIG)
    renamed = make_prototypes(features, torch.tensor([2, 0])[labels], 3, CONFIG)
    for old, new in ((0, 2), (1, 0)):
        assert torch.allclose(plain.vectors[plain.owners == old], renamed.vectors[renamed.owners == new], atol=1e-6)

    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
    turned = make_prototypes(features @ turn, labels, 3, CONFIG)
    assert torch.allclose(turned.vectors, plain.vectors @ turn, atol=1e-5)
    assert torch.allclose(turned.similarity(features @ turn), plain.similarity(features), atol=1e-5)
    longer = make_prototypes(features * 10, labels, 3, CONFIG)
    assert torch.allclose(longer.vectors, plain.vectors, atol=1e-6)


def test_sanity_06_planted_modes_are_found() -> None:
    features, modes, centres = planted((50, 50, 50, 50))
    labels = torch.zeros(200, dtype=torch.int64)
    found = make_prototypes(features, labels, 1, CONFIG)
    nearest = (normalize(features, dim=1) @ found.vectors.T).argmax(1)
    pairs = set(zip(modes.tolist(), nearest.tolist(), strict=True))
    assert len(pairs) == 4 and len({cluster for _, cluster in pairs}) == 4
    upper = torch.triu_indices(4, 4, 1)
    mutual = (found.vectors @ found.vectors.T)[upper[0], upper[1]]
    planted_mutual = (centres @ centres.T)[upper[0], upper[1]]
    assert torch.allclose(mutual.sort().values, planted_mutual.sort().values, atol=0.05)
    assert mutual.max() < 0.98

    # The control: means of random subsets all sit at the class mean, which is how the released code behaves.
    random = make_prototypes(
        features, labels, 1, CONFIG.changed(assign="random_subset"), generator=torch.Generator().manual_seed(0)
    )
    assert (random.vectors @ random.vectors.T)[upper[0], upper[1]].min() > 0.9


@pytest.mark.parametrize("assign", ["sinkhorn_argmax", "sinkhorn_soft", "nearest", "random_subset"])
@pytest.mark.parametrize("epsilon", [0.01, 0.05, 1.0])
def test_sanity_07_one_cluster_is_the_mean_of_unit_features(assign: str, epsilon: float) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(30, 8, generator=generator) * torch.rand(30, 1, generator=generator) * 9
    config = CONFIG.changed(clusters=1, assign=assign, sinkhorn_smoothing=epsilon)
    found = make_prototypes(features, torch.zeros(30, dtype=torch.int64), 1, config, generator=generator)
    expected = normalize(normalize(features, dim=1).mean(0, keepdim=True), dim=1)
    assert torch.allclose(found.vectors, expected, atol=1e-6)
    assert not torch.allclose(found.vectors, normalize(features.mean(0, keepdim=True), dim=1), atol=1e-3)


@pytest.mark.parametrize("assign", ["sinkhorn_argmax", "sinkhorn_soft", "nearest", "random_subset"])
def test_sanity_08_small_and_absent_classes(assign: str) -> None:
    counts = torch.tensor([0, 1, 3, 9, 40])
    assert cluster_counts(counts, 4, 4).tolist() == [0, 1, 1, 2, 4]
    assert cluster_counts(counts, 4, 1).tolist() == [0, 1, 3, 4, 4]
    labels = torch.repeat_interleave(torch.arange(5), counts)
    features = torch.randn(len(labels), 16, generator=torch.Generator().manual_seed(0))
    for least in (1, 4):
        config = CONFIG.changed(assign=assign, min_per_cluster=least)
        found = make_prototypes(features, labels, 5, config, generator=torch.Generator().manual_seed(1))
        assert torch.equal(torch.bincount(found.owners, minlength=5), cluster_counts(counts, 4, least))
        assert torch.allclose(found.vectors.norm(dim=1), torch.ones(len(found.owners)), atol=1e-6)
        assert torch.allclose(found.vectors[found.owners == 1], normalize(features[:1], dim=1), atol=1e-6)
        scores = found.scores(features, 5, 0.1)
        assert torch.isfinite(scores).all() and (scores[:, 0] == 0).all()
        assert torch.allclose(scores.sum(1), torch.ones(len(scores)))


def test_sanity_09_no_hidden_randomness() -> None:
    features, _, _ = planted((30, 25, 9))
    labels = torch.arange(64) % 3
    for assign in ("sinkhorn_argmax", "sinkhorn_soft", "nearest"):
        config = CONFIG.changed(assign=assign)
        first = make_prototypes(features, labels, 3, config)
        torch.rand(10)
        assert torch.equal(make_prototypes(features, labels, 3, config).vectors, first.vectors)
    config = CONFIG.changed(assign="random_subset")
    draws = [
        make_prototypes(features, labels, 3, config, generator=torch.Generator().manual_seed(seed)).vectors
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_warm_start_follows_the_previous_round() -> None:
    features, _, _ = planted((30, 30, 30, 30))
    labels = torch.zeros(120, dtype=torch.int64)
    first = make_prototypes(features, labels, 1, CONFIG)
    swapped = Prototypes(first.vectors[[3, 2, 1, 0]], first.owners)
    again = make_prototypes(features, labels, 1, CONFIG, previous=swapped)
    assert torch.allclose(again.vectors, swapped.vectors, atol=1e-5)
    kept = make_prototypes(
        features * 0 + features.roll(1, 1), labels, 1, CONFIG.changed(prototype_momentum=1.0), previous=first
    )
    assert torch.allclose(kept.vectors, first.vectors, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.001, 0.01])
def test_small_epsilon_neither_overflows_nor_stops_early(epsilon: float) -> None:
    features, _, centres = planted((90, 8, 2))
    similarity = normalize(features, dim=1) @ centres.T
    plan = one_class(similarity, epsilon=epsilon, tolerance=1e-3, cap=100)
    assert torch.isfinite(plan.weights).all()
    assert plan.column_error < 1e-3 or plan.iterations == 100
