"""The audit says "consistent" for our pipeline and not for one without its noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from npr.data.catalogue import Catalogue, sides_of
from npr.dp.audit import (
    allowed_advantage,
    enforced,
    epsilon_from_errors,
    epsilon_lower_bound,
    loss_attack,
    right_is_chance,
    run_canary_audit,
    run_membership_check,
    run_table_audit,
)
from security.dp.noise import NoiseSource


class Silent(NoiseSource):
    """A pipeline whose noise was forgotten."""

    def gaussian(self, out: np.ndarray) -> np.ndarray:
        out[:] = 0.0
        return out


def test_a_thousand_canaries_stay_below_the_ledgers_epsilon() -> None:
    audit = run_canary_audit()
    assert audit.canaries == 1000
    assert enforced(audit.claimed) <= 3.0
    assert audit.consistent
    # An attack that finds nothing would also pass; this one is expected to find something.
    assert 0.1 < audit.lower_bound < audit.claimed.pld
    assert audit.seconds < 60


def test_a_thousand_canaries_twin() -> None:
    audit = run_canary_audit(noise=Silent())
    assert audit.lower_bound > audit.claimed.rdp
    assert not audit.consistent


def even(catalogue: Catalogue) -> tuple[str, ...]:
    """The split of before: even over the table, and so a function of all patients."""
    return sides_of(catalogue, 0)


def test_a_patient_who_is_never_trained_on_is_not_told_by_the_split() -> None:
    audit = run_table_audit(trials=100)
    assert (audit.moved, audit.trained) == (0, False)
    assert enforced(audit.claimed) <= 2.0 and audit.consistent
    assert audit.lower_bound < 1.0


def test_a_patient_who_is_never_trained_on_twin() -> None:
    """With an even split that patient moves hundreds of others, and the ledger's epsilon does not hold."""
    audit = run_table_audit(rule=even, trials=100)
    assert not audit.trained and audit.moved > 100
    assert audit.lower_bound > audit.claimed.rdp and not audit.consistent


def test_a_patient_who_is_trained_on_stays_below_the_ledger() -> None:
    audit = run_table_audit(trained=True, trials=100)
    assert (audit.moved, audit.trained) == (0, True) and audit.consistent


def test_errors_of_a_test_bound_epsilon() -> None:
    assert epsilon_from_errors(100, 50, 50, delta=0.0, confidence=0.95) == 0.0
    # No error in 100 trials of each kind: both rates are below 3.6 % (Clopper and Pearson at 97.5 %).
    bound = math.log((1 - 0.0362) / 0.0362)
    assert epsilon_from_errors(100, 0, 0, delta=0.0, confidence=0.95) == pytest.approx(bound, abs=0.01)
    assert epsilon_from_errors(100, 100, 100, delta=0.0, confidence=0.95) == 0.0


def test_members_are_hidden_by_noise_and_found_without() -> None:
    with_noise, without = run_membership_check(), run_membership_check(noise=Silent())
    assert with_noise.advantage < with_noise.allowed_advantage
    assert without.advantage > without.allowed_advantage
    assert without.auc > with_noise.auc


def test_the_bound_is_the_pure_binomial_one_without_delta() -> None:
    assert right_is_chance(1000, 400, 300, 1.0, 0.0) == pytest.approx(binom.sf(299, 400, 1 / (1 + math.exp(-1))))
    assert right_is_chance(1000, 400, 300, 1.0, 1e-5) > right_is_chance(1000, 400, 300, 1.0, 0.0)


def test_chance_guesses_bound_nothing_and_perfect_ones_are_limited_by_their_number() -> None:
    assert epsilon_lower_bound(1000, 400, 200, delta=1e-5, confidence=0.95) == 0.0
    few, many = (epsilon_lower_bound(1000, n, n, delta=0.0, confidence=0.95) for n in (50, 800))
    assert 0 < few < many
    assert many == pytest.approx(math.log(0.05 ** (1 / 800) / (1 - 0.05 ** (1 / 800))), rel=1e-3)


def test_the_loss_attack_on_known_losses() -> None:
    low, high = np.array([0.0, 0.1], dtype=np.float32), np.array([1.0, 2.0], dtype=np.float32)
    assert loss_attack(low, high) == (1.0, 1.0)
    assert loss_attack(low, low) == (0.5, 0.0)
    assert allowed_advantage(0.0, 0.0) == 0.0
    assert 0.9 < allowed_advantage(3.0, 1e-5) < 1.0
