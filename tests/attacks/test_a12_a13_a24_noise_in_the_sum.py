"""A12, A13 and A24, the ledger's half: what an exact sum gives away, and what is left of it under a ledger.

Secure aggregation hides a term inside a sum. With two sites, with one site toggled over many rounds, or in a row that
only one site feeds, the sum *is* the term. The sums here are what the coordinator gets to see, made by the production
step; masks would cancel in them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from lazaret.errors import BudgetExhausted
from npr.dp.sgd import DpSgd
from security.dp.accountant import RATE_ONE, dp_sgd_event
from security.dp.ledger import Ledger, Terms, Unit
from security.dp.ledger_store import MemoryStore
from security.dp.noise import NoiseSource, Units

CLIP, SIGMA, PATIENTS, WIDTH = 1.0, 4.0, 20, 60
EVENT = dp_sgd_event(multiplier=SIGMA / CLIP, clip=CLIP, rate=RATE_ONE, steps=1)
TERMS = Terms(population="skin", unit=Unit.PATIENT, delta=1e-5, cap=5.0, order=4.0)


class Silent(NoiseSource):
    """DP off, all else equal."""

    def gaussian(self, out: np.ndarray) -> np.ndarray:
        out[:] = 0.0
        return out


class Hospital:
    """One step on a fixed model per round: what it would contribute, divided by nothing."""

    def __init__(self, seed: int, classes: tuple[int, ...], *, private: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._images = torch.randn(PATIENTS, WIDTH, generator=generator)
        self._labels = torch.tensor([classes[n % len(classes)] for n in range(PATIENTS)])
        self._noise: type[NoiseSource] = NoiseSource if private else Silent
        self.ledger = Ledger.create(MemoryStore(), TERMS, version="v1")

    def update(self, present: tuple[int, ...] | None = None) -> np.ndarray:
        """The gradient of one round at the standing model. Each call is booked, and may be refused."""
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 4)
        reservation = self.ledger.reserve(run="r", round_number=1, events=[EVENT], noise=self._noise())
        mask = torch.zeros(4)
        if present is not None:
            mask[[c for c in range(4) if c not in present]] = -torch.inf
        trainer = DpSgd(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            reservation=reservation,
            units=Units(range(PATIENTS)),
            divisor=1.0,
        )
        trainer.step(
            lambda i: functional.cross_entropy(model(self._images[i]) + mask, self._labels[i], reduction="none")
        )
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double().numpy()


def hospitals(count: int, *, private: bool) -> list[Hospital]:
    return [Hospital(seed, (0, 1, 2), private=private) for seed in range(count)]


def two_site_error(*, private: bool) -> float:
    """One of two sites subtracts its own term. Root mean square error of what it then holds of the other."""
    mine, other = hospitals(2, private=private)
    truth = hospitals(2, private=False)[1].update()
    own = mine.update()
    total = own + other.update()
    return float(np.sqrt(((total - own - truth) ** 2).mean()))


def test_a12_the_other_of_two_sites_gets_a_noisy_update() -> None:
    assert two_site_error(private=True) > 0.6 * SIGMA


def test_a12_two_sites_twin() -> None:
    assert two_site_error(private=False) < 1e-6


def toggled_rounds(sites: list[Hospital], rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Each round leaves out one site, in turn; the model stands still. Returns who was in, and the sums."""
    who, sums = [], []
    for number in range(rounds):
        present = np.ones(len(sites))
        present[number % len(sites)] = 0
        try:
            terms = [site.update() for site, here in zip(sites, present, strict=True) if here]
        except BudgetExhausted:
            break
        who.append(present)
        sums.append(np.sum(terms, axis=0))
    return np.array(who), np.array(sums)


def recovered(who: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Least squares for every site's term."""
    return np.linalg.lstsq(who, sums, rcond=None)[0]


def test_a13_thirty_rounds_at_a_standing_model() -> None:
    sites = hospitals(4, private=True)
    who, sums = toggled_rounds(sites, 30)
    truth = np.stack([site.update() for site in hospitals(4, private=False)])
    rounds = len(who)
    assert 4 <= rounds < 30, "the ledger ends this before the noise is averaged away"
    error = np.sqrt(((recovered(who, sums) - truth) ** 2).mean())
    # Every round took fresh, booked noise: no estimate is better than the mean of as many noisy copies.
    assert error > 0.8 * SIGMA / np.sqrt(rounds)
    assert all(site.ledger.state.epsilon <= TERMS.cap for site in sites)


def test_a13_thirty_rounds_twin() -> None:
    sites = hospitals(4, private=False)
    who, sums = toggled_rounds(sites, 5)
    truth = np.stack([site.update() for site in hospitals(4, private=False)])
    np.testing.assert_allclose(recovered(who, sums), truth, atol=1e-6)


def rare_row_error(*, private: bool) -> float:
    """Class 3 exists at one site only; the others' rows for it are zero, so the sum's row is that site's own."""
    rare = Hospital(9, (0, 3), private=private)
    others = hospitals(3, private=False)
    total = rare.update(present=(0, 3)) + sum(site.update(present=(0, 1, 2)) for site in others)
    truth = Hospital(9, (0, 3), private=False).update(present=(0, 3))
    row = slice(3 * WIDTH, 4 * WIDTH)
    return float(np.sqrt(((total[row] - truth[row]) ** 2).mean()))


def test_a24_the_row_of_a_class_at_one_site_is_covered_by_its_noise() -> None:
    assert rare_row_error(private=True) > 0.5 * SIGMA


def test_a24_rare_class_row_twin() -> None:
    assert rare_row_error(private=False) < 1e-6
