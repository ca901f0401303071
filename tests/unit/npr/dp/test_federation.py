"""DP at every site of a lab federation: it runs, it books, it goes on after a restart, it is not repeatable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lazaret.errors import BudgetExhausted, ConfigError
from npr.dp.federation import PrivateFederation, PrivateSchedule
from npr.federation import Federation
from security.dp.accountant import RATE_ONE, rate_at_least
from security.dp.planner import Schedule

SCHEDULE = Schedule(
    rounds=2, steps=2, rate=rate_at_least(0.5), multiplier=1.0, clip=1.0, prototypes_sigma=8.0, prototypes_every=1
)
PLAN = PrivateSchedule.for_epsilon(8.0, delta=1e-5, schedule=SCHEDULE, dimensions=8)


@pytest.fixture
def private(toy: Callable[..., Federation]) -> Callable[..., PrivateFederation]:
    def build(plan: PrivateSchedule = PLAN, **train: object) -> PrivateFederation:
        plain = toy(**{"method": "fednpr-per", "assign": "nearest", "predict": "head", "optimizer": "sgd"} | train)
        return PrivateFederation(dataset=plain.dataset, spec=plain.spec, config=plain.config, plan=plan, seed=1)

    return build


def test_rounds_are_booked_at_every_site_and_end_at_the_promised_epsilon(
    private: Callable[..., PrivateFederation],
) -> None:
    federation = private()
    start = federation.model.extractor.state_dict()
    start = {name: tensor.clone() for name, tensor in start.items()}
    for _ in range(2):
        report = federation.run_round()
        assert report.loss == 0.0, "no loss of drawn records is shown"
    assert any(not torch.equal(start[name], tensor) for name, tensor in federation.model.extractor.state_dict().items())
    spent = federation.spent()
    assert set(spent) == {"a", "b", "c"}
    assert all(0 < epsilon.pld < min(epsilon.rdp, 8.0) for epsilon in spent.values())
    assert max(epsilon.rdp for epsilon in spent.values()) > 7.5, "the plan uses what it was given"
    assert np.isfinite(federation.evaluate("personal")[0].scores).all()
    with pytest.raises(BudgetExhausted):
        federation.run_round()


def test_a_checkpoint_carries_ledger_and_releases(private: Callable[..., PrivateFederation], tmp_path: Path) -> None:
    first = private()
    first.run_round()
    first.checkpoint(tmp_path / "c.safetensors")
    second = private()
    second.restore(tmp_path / "c.safetensors")
    assert second.spent() == first.spent()
    second.run_round()
    with pytest.raises(BudgetExhausted):
        second.run_round()
    other = PrivateSchedule.for_epsilon(3.0, delta=1e-5, schedule=SCHEDULE, dimensions=8)
    with pytest.raises(ConfigError, match="privacy"):
        private(other).restore(tmp_path / "c.safetensors")


def test_two_runs_of_one_seed_differ(private: Callable[..., PrivateFederation]) -> None:
    results = []
    for _ in range(2):
        federation = private()
        federation.run_round()
        results.append(torch.cat([p.detach().flatten() for p in federation.model.parameters()]))
    assert not torch.allclose(*results)


def test_a_private_head_on_a_public_network_sends_the_head_alone(private: Callable[..., PrivateFederation]) -> None:
    schedule = replace(SCHEDULE, rate=RATE_ONE, steps=1, prototypes_sigma=None)
    plan = PrivateSchedule.for_epsilon(
        8.0, delta=1e-5, schedule=schedule, micro_batch=4096, trainable="head", projection=6, views=3
    )
    federation = private(plan, method="fedavg")
    start = {name: tensor.clone() for name, tensor in federation.model.state_dict().items()}
    report = federation.run_round()
    classes = federation.spec.num_classes
    assert report.vector_size == 6 * classes + classes, "head and bias on six public numbers"
    moved = {name for name, tensor in federation.model.state_dict().items() if not torch.equal(start[name], tensor)}
    assert moved == {"head.weight", "head.bias"}
    assert np.isfinite(federation.evaluate("global")[0].scores).all()


def test_the_last_blocks_learn_and_the_first_stay_public(private: Callable[..., PrivateFederation]) -> None:
    schedule = replace(SCHEDULE, prototypes_sigma=None)
    federation = private(
        PrivateSchedule.for_epsilon(8.0, delta=1e-5, schedule=schedule, trainable="last_blocks"), method="fedavg"
    )
    start = {name: tensor.clone() for name, tensor in federation.model.state_dict().items()}
    federation.run_round()
    moved = {name for name, tensor in federation.model.state_dict().items() if not torch.equal(start[name], tensor)}
    assert moved and not moved & federation.model.constants
    assert any(name.startswith("extractor.") for name in moved) and federation.model.constants


def test_shared_noise_is_booked_inside_the_sum_and_alone(private: Callable[..., PrivateFederation]) -> None:
    schedule = replace(SCHEDULE, rate=RATE_ONE, steps=1, prototypes_sigma=None)
    plan = PrivateSchedule(
        schedule=schedule, cap=8.0, delta=1e-5, trainable="head", projection=6, views=2, noise="shared"
    )
    federation = private(plan, method="fedavg")
    assert federation.shared is not None and federation.shared.honest == 2, "three sites, one of them may collude"
    start = federation.model.head.weight.detach().clone()
    federation.run_round()
    assert not torch.equal(start, federation.model.head.weight)
    inside, alone = federation.spent(), federation.alone()
    assert all(0 < inside[name].rdp < min(8.0, alone[name]) for name in alone)
    federation.run_round()
    with pytest.raises(BudgetExhausted):
        federation.run_round()
