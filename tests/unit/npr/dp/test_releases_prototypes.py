"""Private prototypes: useful when there is signal, finite always, and blind to what they may not see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npr.dp.private_site import npr_per_record
from npr.dp.releases import (
    PrivatePrototypes,
    cells_for,
    first_prototypes,
    prototype_sums,
    public_projection,
    refreshed,
    similarity,
    unit_features,
)
from security.dp.accountant import LATTICE_ONE, prototypes_event
from security.dp.ledger import Reservation
from security.dp.noise import NoiseSource, Units

PUBLIC = "run-7"


def paid(releases: int, sigma: float = 5.0) -> Reservation:
    return Reservation(seq=1, events=[prototypes_event(sigma)] * releases, noise=NoiseSource())


def two_modes(per_mode: int = 400, width: int = 32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bunched features, two modes in each of two classes. Returns features, labels and the modes."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=width) * 2
    modes = shared + rng.normal(size=(2, 2, width))
    features = np.concatenate([rng.normal(modes[c, m], 0.3, size=(per_mode, width)) for c in (0, 1) for m in (0, 1)])
    return features, np.repeat([0, 1], 2 * per_mode), modes


def test_planted_modes_are_found_through_the_noise() -> None:
    features, labels, modes = two_modes()
    units, projection = Units(range(len(labels))), public_projection(32, 32, PUBLIC)
    unit = unit_features(features, projection)
    reservation = paid(8)
    state = first_prototypes(
        unit, labels, units, cells=(2, 2), projection=projection, public_seed=PUBLIC, reservation=reservation
    )
    for _ in range(7):
        state = refreshed(unit, labels, units, state, reservation)
    wanted = modes / np.linalg.norm(modes, axis=2, keepdims=True)
    closeness = np.einsum("cme,cke->cmk", wanted, state.vectors)
    assert closeness.max(axis=2).min() > 0.97
    assert (closeness.argmax(axis=2)[:, 0] != closeness.argmax(axis=2)[:, 1]).all()
    np.testing.assert_allclose(np.linalg.norm(state.vectors, axis=2), 1.0)
    assert np.abs(state.potentials).max() <= 0.2


def test_potentials_move_records_out_of_a_crowded_cell() -> None:
    features, labels, _ = two_modes()
    units, projection = Units(range(len(labels))), public_projection(32, 32, PUBLIC)
    unit = unit_features(features, projection)
    # One prototype at the mean, one away from it: nearly everything falls to the first.
    centre = unit.mean(axis=0) / np.linalg.norm(unit.mean(axis=0))
    away = np.roll(centre, 1)
    vectors = np.broadcast_to(np.stack([centre, 0.9 * centre + 0.436 * away]), (2, 2, 32)).copy()
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    state = PrivatePrototypes(vectors=vectors, potentials=np.zeros((2, 2)), cells=(2, 2), projection=projection)

    def mass(potentials: np.ndarray) -> np.ndarray:
        held = PrivatePrototypes(vectors=vectors, potentials=potentials, cells=(2, 2), projection=projection)
        sums = prototype_sums(unit, labels, units, held) / LATTICE_ONE
        return np.linalg.norm(sums, axis=2)

    moved = refreshed(unit, labels, units, state, paid(1)).potentials
    assert (moved[:, 0] > moved[:, 1]).all()
    assert (mass(10 * moved)[:, 0] < mass(np.zeros((2, 2)))[:, 0]).all()


def test_all_cells_of_all_classes_are_released_also_without_a_record() -> None:
    projection = public_projection(8, 8, PUBLIC)
    nobody = np.empty((0, 8))
    reservation = paid(2)
    state = first_prototypes(
        nobody,
        np.empty(0, dtype=np.int64),
        Units([]),
        cells=(3, 1, 2),
        projection=projection,
        public_seed=PUBLIC,
        reservation=reservation,
    )
    after = refreshed(nobody, np.empty(0, dtype=np.int64), Units([]), state, reservation)
    assert after.vectors.shape == (3, 3, 8)
    np.testing.assert_allclose(np.linalg.norm(after.vectors, axis=2), 1.0)
    moved = (after.vectors != state.vectors).any(axis=2)
    assert (moved == after.open_cells()).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e308, 0.0])
def test_a_feature_that_cannot_be_normalised_becomes_zero(poison: float) -> None:
    features = np.ones((3, 6))
    features[1] = poison
    unit = unit_features(features, public_projection(6, 4, PUBLIC))
    assert np.isfinite(unit).all()
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1)[[0, 2]], 1.0)
    assert np.linalg.norm(unit[1]) in (0.0, pytest.approx(1.0))
    if poison in (0.0, np.inf, -np.inf) or np.isnan(poison):
        assert not unit[1].any()


def test_the_projection_is_public_and_orthonormal() -> None:
    one = public_projection(40, 8, PUBLIC)
    np.testing.assert_allclose(one @ one.T, np.eye(8), atol=1e-12)
    assert (one == public_projection(40, 8, PUBLIC)).all()
    assert not np.allclose(one, public_projection(40, 8, "run-8"))


def test_cells_follow_the_noisy_counts() -> None:
    assert cells_for((-20.0, 50.0, 170.0, 5000.0), sigma=10.0, dimensions=64, most=4) == (1, 1, 2, 4)


def state_of(cells: tuple[int, ...], width: int = 8) -> PrivatePrototypes:
    vectors = np.random.default_rng(1).normal(size=(len(cells), max(cells), width))
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    return PrivatePrototypes(
        vectors=vectors, potentials=np.zeros(vectors.shape[:2]), cells=cells, projection=np.eye(width)
    )


def test_closed_cells_attract_nobody() -> None:
    state = state_of((1, 3))
    features = torch.from_numpy(state.vectors[0, 1:2]).float()
    assert float(similarity(features, state)[0, 0]) < 0.99
    assert float(similarity(torch.from_numpy(state.vectors[1, 2:3]).float(), state)[0, 1]) == pytest.approx(1.0)


def test_the_loss_is_one_value_per_record_and_each_depends_on_its_own_record() -> None:
    state, active = state_of((2, 2, 1)), np.array([True, True, False])
    features = torch.randn(4, 8, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 1])
    losses = npr_per_record(features, labels, state, active, temperature=0.1)
    jacobian = torch.stack([torch.autograd.grad(loss, features, retain_graph=True)[0] for loss in losses])
    for n in range(4):
        assert not jacobian[n][[m for m in range(4) if m != n]].any()
    assert losses[2].item() == 0.0
    assert not jacobian[2].any(), "a record of an inactive class is silent"
    assert jacobian.isfinite().all()
    logits = similarity(features, state)[:, :2] / 0.1
    expected = torch.nn.functional.cross_entropy(logits[[0, 1, 3]], labels[[0, 1, 3]], reduction="none")
    torch.testing.assert_close(losses[[0, 1, 3]], expected)
