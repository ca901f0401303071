"""The adapter between a lab site and the private round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lazaret.errors import BudgetExhausted, LocalProtocolError, PolicyViolation
from npr.config import TrainConfig
from npr.data.dataset import Samples
from npr.dp.private_site import PrivateTraining
from npr.methods import registry
from npr.methods.site import Site
from npr.model import SplitModel
from security.dp.accountant import rate_at_least
from security.dp.ledger import Ledger, Unit
from security.dp.ledger_store import MemoryStore
from security.dp.planner import Schedule, terms_for

PLAN = Schedule(
    rounds=3, steps=4, rate=rate_at_least(0.3), multiplier=1.0, clip=1.0, prototypes_sigma=5.0, prototypes_every=2
)


def samples(patients: int = 60) -> Samples:
    rng = np.random.default_rng(0)
    owners = [f"p{n // 2}" for n in range(2 * patients)]
    return Samples(
        images=rng.integers(0, 255, (len(owners), 8, 8, 3), dtype=np.uint8),
        labels=np.array([n // 2 % 3 for n in range(len(owners))]),
        ids=tuple(f"i{n}" for n in range(len(owners))),
        units=tuple(owners),
        unit_kind="patient",
        num_classes=3,
    )


def small_model() -> SplitModel:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    return SplitModel(body, nn.Linear(24, 3))


def training(
    cap: float = 30.0, *, unit: Unit = Unit.PATIENT, plan: Schedule = PLAN, **config: object
) -> PrivateTraining:
    usual = {"method": "fednpr-per", "assign": "nearest", "predict": "head", "optimizer": "sgd"}
    settings = TrainConfig.parse(usual | config)
    site = Site(
        name="a", train=samples(), model=small_model(), config=settings, seed=1, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    terms = terms_for(plan, population="p", unit=unit, cap=cap, delta=1e-5)
    return PrivateTraining(
        registry.build(settings),
        site,
        schedule=plan,
        books=Ledger.create(MemoryStore(), terms, version="v1"),
        run="r",
        dimensions=8,
    )


def test_rounds_until_the_cap_and_a_contribution_without_the_head() -> None:
    private = training()
    before = private._site.model.head.weight.detach().clone()
    for number in (1, 2, 3):
        report = private.local_round(number)
        assert (report.steps, report.samples, report.hits) == (4, 0, 0)
    assert not torch.equal(before, private._site.model.head.weight)
    sent = private.contribution(1)
    assert sent.weight == private.rounds.counts.weight() != len(private._site.train)
    assert len(sent.vector) == sum(p.numel() for p in private._site.model.extractor.parameters())
    assert all(booking.committed for booking in private._books.state.bookings)


def test_the_cap_stops_the_site_before_its_model_moves() -> None:
    private = training(cap=4.0)
    with pytest.raises(LocalProtocolError):
        private.contribution(1)
    before = [parameter.clone() for parameter in private._site.model.parameters()]
    with pytest.raises(BudgetExhausted):
        private.local_round(1)
    assert all(torch.equal(a, b) for a, b in zip(before, private._site.model.parameters(), strict=True))
    assert private.rounds.counts is None


def test_what_was_released_survives_a_restart_without_paying_again() -> None:
    first, second = training(), training()
    first.local_round(1)
    second.rounds.remember(first.rounds.memory())
    assert second.rounds.counts == first.rounds.counts
    np.testing.assert_array_equal(second.rounds.prototypes.vectors, first.rounds.prototypes.vectors)
    assert second.rounds.prototypes.cells == first.rounds.prototypes.cells
    assert second.local_round(2).steps == 4
    assert training().rounds.memory() == {}


def test_disagreements_are_refused_before_anything_is_read() -> None:
    with pytest.raises(PolicyViolation, match="grouped by patient"):
        training(unit=Unit.IMAGE)
    with pytest.raises(PolicyViolation, match="assign"):
        training(assign="sinkhorn_argmax")
    with pytest.raises(PolicyViolation, match="do not agree"):
        training(method="fedavg")
