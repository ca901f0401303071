"""A whole private round through a real ledger: order of releases, books that balance, and a model that learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lazaret.errors import BudgetExhausted, PolicyViolation
from npr.config import TrainConfig
from npr.dp.engine import SUPPORTED_METHODS, check_upstream, violations
from npr.dp.private_site import PrivateData, PrivateRounds, Regularisation
from security.dp.accountant import rate_at_least
from security.dp.ledger import Ledger, Unit
from security.dp.ledger_store import MemoryStore
from security.dp.noise import NoiseSource, Units
from security.dp.planner import Schedule, terms_for

PLAN = Schedule(
    rounds=3,
    steps=12,
    rate=rate_at_least(0.2),
    multiplier=0.8,
    clip=1.0,
    counts_sigma=5.0,
    prototypes_sigma=5.0,
    prototypes_every=2,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(64, 3)

    def features(self, images: Tensor) -> Tensor:
        return self.body(images)

    def logits(self, features: Tensor) -> Tensor:
        return self.head(features)


def lesions(patients: int = 300) -> tuple[Tensor, np.ndarray, Units]:
    """Three classes by the bright corner; every third patient has two images."""
    generator = torch.Generator().manual_seed(0)
    owners = [p for p in range(patients) for _ in range(2 if p % 3 == 0 else 1)]
    labels = np.array([p % 3 for p in owners])
    images = 0.3 * torch.randn(len(owners), 1, 8, 8, generator=generator)
    for n, label in enumerate(labels):
        images[n, 0, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1.0
    return images, labels, Units(owners)


def rounds_on(images: Tensor, labels: np.ndarray, units: Units, plan: Schedule = PLAN) -> PrivateRounds:
    def read(indices: np.ndarray) -> Tensor:
        return images[indices]

    data = PrivateData(labels=labels, units=units, classes=3, training=read, reading=read)
    return PrivateRounds(data, plan, Regularisation(clusters=2, dimensions=16), micro_batch=32)


def ledger_for(plan: Schedule, cap: float) -> Ledger:
    terms = terms_for(plan, population="p", unit=Unit.PATIENT, cap=cap, delta=1e-5)
    return Ledger.create(MemoryStore(), terms, version="v1")


def test_three_rounds_learn_and_everything_booked_is_used() -> None:
    torch.manual_seed(0)
    images, labels, units = lesions()
    rounds, ledger = rounds_on(images, labels, units), ledger_for(PLAN, 30.0)
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for number in range(1, 4):
        reservation = ledger.reserve(
            run="r", round_number=number, events=PLAN.round_events(number), noise=NoiseSource()
        )
        reports = rounds.train(model, optimizer, reservation)
        assert len(reports) == 12
        assert reservation._unused == [], "what is booked and what is done are the same"
        ledger.commit(reservation)
    accuracy = (model.logits(model.features(images)).argmax(1).numpy() == labels).mean()
    assert accuracy > 0.8
    assert rounds.counts is not None
    assert rounds.counts.size() == pytest.approx(300, abs=60)
    assert rounds.prototypes is not None
    assert ledger.spent().pld <= ledger.state.epsilon <= 30.0


def test_a_round_without_its_reservation_reads_nothing() -> None:
    images, labels, units = lesions(30)
    seen: list[int] = []

    def read(indices: np.ndarray) -> Tensor:
        seen.extend(indices)
        return images[indices]

    data = PrivateData(labels=labels, units=units, classes=3, training=read, reading=read)
    rounds = PrivateRounds(data, PLAN, Regularisation(clusters=2, dimensions=16))
    model = Small()
    reservation = ledger_for(PLAN, 30.0).reserve(
        run="r", round_number=2, events=PLAN.round_events(2), noise=NoiseSource()
    )
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(BudgetExhausted):
        rounds.train(model, torch.optim.SGD(model.parameters(), lr=1.0), reservation)
    assert seen == []
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_without_prototypes_only_counts_and_steps_are_needed() -> None:
    plan = Schedule(
        rounds=1, steps=2, rate=rate_at_least(0.5), multiplier=1.0, clip=1.0, counts_sigma=5.0, prototypes_sigma=None
    )
    images, labels, units = lesions(30)
    data = PrivateData(labels=labels, units=units, classes=3, training=lambda i: images[i], reading=lambda i: images[i])
    model = Small()
    reservation = ledger_for(plan, 30.0).reserve(
        run="r", round_number=1, events=plan.round_events(1), noise=NoiseSource()
    )
    reports = PrivateRounds(data, plan, None).train(model, torch.optim.SGD(model.parameters(), lr=0.1), reservation)
    assert len(reports) == 2


ALLOWED = {"assign": "nearest", "predict": "head", "method": "fednpr-per"}


def test_settings_that_obey_the_upstream_rule_pass() -> None:
    for method in SUPPORTED_METHODS:
        check_upstream(TrainConfig(**{**ALLOWED, "method": method}))


@pytest.mark.parametrize(
    "change",
    [
        {"assign": "sinkhorn_argmax"},
        {"assign": "sinkhorn_soft"},
        {"assign": "random_subset"},
        {"method": "fedrep"},
        {"method": "balancefl"},
        {"prototype_source": "epoch"},
        {"personal_start": "prototypes"},
        {"predict_present_only": True},
        {"predict": "prototype"},
        {"predict": "both"},
        {"predict": "auto"},
        {"local_bn": True},
        {"npr_balance": "prior"},
        {"prior_floor": 1e-9},
        {"supervision": "ce"},
        {"logit_norm": "layernorm"},
        {"lambda_added": True},
        {"prototype_momentum": 0.5},
        {"clusters_by": "explained"},
        {"lambda_rounds": 2},
        {"method": "fedprox"},
        {"method_options": {"finetune_epochs": 1}},
    ],
)
def test_settings_that_void_epsilon_are_refused(change: dict[str, object]) -> None:
    config = TrainConfig(**{**ALLOWED, **change})
    assert len(violations(config)) == 1
    with pytest.raises(PolicyViolation) as caught:
        check_upstream(config)
    named = next(iter(change.get("method_options", change)))  # type: ignore[call-overload]
    assert named in str(caught.value)
