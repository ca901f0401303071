"""Private counts: every class gets a number, everything else follows from those numbers."""

from __future__ import annotations

import numpy as np
import pytest

from lazaret.errors import BudgetExhausted
from npr.dp.releases import PrivateCounts, count_sums, hit_sums, release_counts, release_hits
from security.dp.accountant import LATTICE_ONE, counts_event, metrics_event
from security.dp.ledger import Reservation
from security.dp.noise import NoiseSource, Units


def paid(*events: object) -> Reservation:
    return Reservation(seq=1, events=events, noise=NoiseSource())  # type: ignore[arg-type]


def test_a_patient_counts_one_however_many_images() -> None:
    labels = np.array([0, 0, 1, 2, 2, 2])
    units = Units(["a", "a", "a", "b", "b", "c"])
    sums = count_sums(labels, units, 4) / LATTICE_ONE
    np.testing.assert_allclose(sums, [2 / 3, 1 / 3, 2, 0], atol=1e-4)


def test_noise_has_the_booked_size_and_every_class_is_released() -> None:
    labels, units = np.zeros(10, dtype=np.int64), Units(range(10))
    draws = np.array([release_counts(labels, units, 50, paid(counts_event(5.0))).noisy for _ in range(40)])
    assert draws.shape == (40, 50)
    assert abs(draws[:, 1:].std() - 5) < 0.5
    assert abs(draws[:, 0].mean() - 10) < 5
    assert (draws != 0).mean() > 0.99, "an absent class must not be told by an exact zero"


def test_counts_that_were_not_paid_for_are_not_released() -> None:
    with pytest.raises(BudgetExhausted):
        release_counts(np.zeros(1, dtype=np.int64), Units([1]), 2, paid())


def test_what_is_derived() -> None:
    counts = PrivateCounts(noisy=(200.0, 3.0, -8.0, 60.0), sigma=10.0)
    np.testing.assert_allclose(counts.prior(), np.array([200, 10, 10, 60]) / 280)
    assert counts.present(20.0).tolist() == [True, False, False, True]
    assert counts.size() == 255.0
    assert counts.weight() == 255
    assert PrivateCounts(noisy=(-3.0, -4.0), sigma=2.0).weight() == 1
    assert PrivateCounts(noisy=(1.0,), sigma=2.0).floor == 5.0


def test_noisy_hits() -> None:
    labels, predicted = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    sums = hit_sums(labels, predicted, Units([1, 2, 3, 3]), 2) / LATTICE_ONE
    np.testing.assert_allclose(sums, [[2, 1], [1, 1]])
    assert release_hits(labels, predicted, Units([1, 2, 3, 3]), 2, paid(metrics_event(8.0))).shape == (2, 2)
