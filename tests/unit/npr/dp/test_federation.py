"""DP at every site of a lab federation: it runs, it books, it goes on after a restart, it is not repeatable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lazaret.errors import BudgetExhausted, ConfigError
from npr.dp import sgd
from npr.dp.federation import PrivateFederation, PrivateSchedule
from npr.dp.private_site import PrivateTraining
from npr.federation import Federation
from npr.wire_layout import WireModel
from protos.loopback import LoopbackFederation
from security.dp.accountant import RATE_ONE, rate_at_least
from security.dp.planner import Schedule, Trains
from security.secagg.context import SumVerdict
from security.secagg.fixed_point import place
from security.secagg.state import canonical

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


@pytest.mark.parametrize("trainable", ["last_blocks", "adapters"])
def test_a_part_of_the_network_learns_and_the_rest_stays_public(
    private: Callable[..., PrivateFederation], trainable: Trains
) -> None:
    schedule = replace(SCHEDULE, prototypes_sigma=None)
    federation = private(
        PrivateSchedule.for_epsilon(8.0, delta=1e-5, schedule=schedule, trainable=trainable), method="fedavg"
    )
    start = {name: tensor.clone() for name, tensor in federation.model.state_dict().items()}
    federation.run_round()
    moved = {name for name, tensor in federation.model.state_dict().items() if not torch.equal(start[name], tensor)}
    assert moved and not moved & federation.model.constants
    assert any(name.startswith("extractor.") for name in moved) and federation.model.constants


PLAIN = {"method": "fedavg", "momentum": 0.0, "weight_decay": 0.0, "milestones": (), "learning_rate": 0.5}


def test_shared_noise_is_booked_inside_the_sum_and_alone(private: Callable[..., PrivateFederation]) -> None:
    schedule = replace(SCHEDULE, rate=RATE_ONE, steps=1, prototypes_sigma=None)
    plan = PrivateSchedule(
        schedule=schedule, cap=8.0, delta=1e-5, trainable="head", projection=6, views=2, noise="shared"
    )
    federation = private(plan, **PLAIN)
    assert federation.shared is not None and federation.shared.honest == 2, "three sites, one of them may collude"
    start = federation.model.head.weight.detach().clone()
    federation.run_round()
    assert not torch.equal(start, federation.model.head.weight)
    inside, alone = federation.spent(), federation.alone()
    assert all(0 < inside[name].rdp < min(8.0, alone[name]) for name in alone)
    federation.run_round()
    with pytest.raises(BudgetExhausted):
        federation.run_round()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_with_shared_noise_is_that_of_the_wire_to_the_last_bit(
    private: Callable[..., PrivateFederation], monkeypatch: pytest.MonkeyPatch, momentum: float
) -> None:
    schedule = replace(SCHEDULE, rate=RATE_ONE, steps=1, prototypes_sigma=None)
    plan = PrivateSchedule(schedule=schedule, cap=8.0, delta=1e-5, trainable="head", projection=6, noise="shared")
    federation = private(plan, **PLAIN | {"momentum": momentum})
    layout = federation._layout
    assert layout is not None
    sent: list[np.ndarray] = []
    compute = PrivateTraining.shared_round

    def overheard(self: PrivateTraining, number: int) -> np.ndarray:
        sent.append(compute(self, number))
        return sent[-1]

    monkeypatch.setattr(PrivateTraining, "shared_round", overheard)
    wire = WireModel(layout, federation.model)
    names = [site.name for site in federation.sites]
    protocol = LoopbackFederation(layout, names, canonical(wire.state(federation.model)), dp_active=True)
    for _ in range(2):
        sent.clear()
        federation.run_round()
        weights = [federation._trainings[name].weight for name in names]
        words = {
            name: place(layout, wire.units(federation.model, -units), weight=weight).words
            for name, units, weight in zip(names, sent, weights, strict=True)
        }
        outcome = protocol.run_round(words)
        assert outcome.state is not None and outcome.verdict is SumVerdict.GOOD
        assert np.array_equal(outcome.state, wire.state(federation.model)), "the very bits, after masks and shares"


@pytest.mark.parametrize("changed", [{"milestones": (3,)}, {"optimizer": "adam"}, {"weight_decay": 0.01}])
def test_what_a_manifest_with_shared_noise_may_not_have_the_lab_refuses_too(
    private: Callable[..., PrivateFederation], changed: dict[str, object]
) -> None:
    schedule = replace(SCHEDULE, rate=RATE_ONE, steps=1, prototypes_sigma=None)
    plan = PrivateSchedule(schedule=schedule, cap=8.0, delta=1e-5, trainable="head", projection=6, noise="shared")
    with pytest.raises(ConfigError, match="one step of SGD"):
        private(plan, **PLAIN | changed)


def test_momentum_of_shared_steps_goes_on_after_a_restart(
    private: Callable[..., PrivateFederation], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without noise and patients a round moves the model by nine tenths of what the round before did."""
    schedule = replace(SCHEDULE, rounds=3, rate=RATE_ONE, steps=1, prototypes_sigma=None)
    plan = PrivateSchedule(schedule=schedule, cap=8.0, delta=1e-5, trainable="head", projection=6, noise="shared")
    federation = private(plan, **PLAIN | {"momentum": 0.9})
    start = federation.model.head.weight.detach().clone()
    federation.run_round()
    before = federation.model.head.weight.detach().clone()
    federation.checkpoint(tmp_path / "saved")
    again = private(plan, **PLAIN | {"momentum": 0.9})
    again.restore(tmp_path / "saved")
    monkeypatch.setattr(sgd, "noised", lambda total, *_given, **_more: np.zeros_like(total))
    for each in (federation, again):
        each.run_round()
        moved = each.model.head.weight.detach() - before
        assert torch.allclose(moved, 0.9 * (before - start), atol=1e-4 * float((before - start).abs().max()))
