"""Every registered method for a tiny round: what it shares, what stays home, and that its own term does something.

For each method there is a twin in which the term that makes it that method is switched off. The twin must come out
differently, and bitwise as the method that theory says is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lazaret.errors import ConfigError, LocalProtocolError
from npr.config import TrainConfig
from npr.federation import Federation
from npr.methods import registry
from npr.methods.base import Method
from npr.methods.registry import register
from npr.methods.regulariser import Regulariser
from npr.params import ParameterManifest
from npr.training import extract

Toy = Callable[..., Federation]
Same = Callable[[Federation, Federation], bool]

BODY = {"extractor", "norm", "statistics"}
WHOLE = BODY | {"head"}
FAST_CREFF = {"per_class": 5, "matching_steps": 5, "head_epochs": 5}
# Relative to the largest probability. Terms act with 1e-4 and more.
MORE_THAN_NOISE = 1e-5


@dataclass(frozen=True)
class Case:
    """What a method shares; settings that switch its own term off; and the method that is then left."""

    shares: set[str]
    on: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] = field(default_factory=dict)
    left: str | None = None
    left_with: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "local": Case(set()),
    "frozen": Case(set()),
    "fedavg": Case(WHOLE),
    "central": Case(WHOLE),
    "fedprox": Case(WHOLE, {"options": {"mu": 1.0}}, {"options": {"mu": 0.0}}, "fedavg"),
    "moon": Case(WHOLE | {"projection"}, {"options": {"mu": 1.0}}, {"options": {"mu": 0.0}}),
    "creff": Case(WHOLE, {"options": FAST_CREFF}, {"options": FAST_CREFF | {"matching_steps": 0}}, "fedavg"),
    "fedrs": Case(WHOLE, {}, {"options": {"alpha": 1.0}}),
    "fedlc": Case(WHOLE, {}, {"options": {"tau": 0.0}}),
    "balancefl": Case(WHOLE, {}, {"options": {"distillation": 0.0, "noise": 0.0, "entropy": 0.0}}),
    "fedrep": Case(BODY, {}, {"options": {"head_epochs": 0}}, "fedbabu"),
    "fedrod": Case(WHOLE, {"options": {"personal_loss": "bsm"}}, {"options": {"personal_loss": "ce"}}, "fedavg"),
    "fedbabu": Case(BODY),
    "fedper": Case(BODY, {}, {"personal_after": 9}, "fedavg"),
    "fednpr": Case(WHOLE, {}, {"lambda_npr": 0.0}, "fedavg"),
    "fedavg+npr": Case(WHOLE, {}, {"lambda_npr": 0.0}, "fedavg"),
    "fednpr-per": Case(BODY, {}, {"lambda_npr": 0.0}, "fedper"),
    "fedprox+npr": Case(WHOLE, {}, {"lambda_npr": 0.0}, "fedprox"),
    "fedbabu+npr": Case(BODY, {}, {"lambda_npr": 0.0}, "fedbabu"),
    "fedrep+npr": Case(BODY, {}, {"lambda_npr": 0.0}, "fedrep"),
    "fedrod+npr": Case(WHOLE, {}, {"lambda_npr": 0.0}, "fedrod"),
    "moon+npr": Case(WHOLE | {"projection"}, {}, {"lambda_npr": 0.0}, "moon"),
}
# Under plain cross-entropy absent classes have no floor either, and FedAvg is what is left of FedRS.
PLAIN = {"supervision": "ce"}
PLAIN_FEDRS = Case(WHOLE, PLAIN, PLAIN | {"options": {"alpha": 1.0}}, "fedavg", PLAIN)
WITH_A_TWIN = [
    *(pytest.param(name, case, id=name) for name, case in CASES.items() if case.off),
    pytest.param("fedrs", PLAIN_FEDRS, id="fedrs-ce"),
]


def run(federation: Federation, rounds: int = 2) -> Federation:
    for _ in range(rounds):
        federation.run_round()
    return federation


_RAN: dict[str, Federation] = {}


def ran(toy: Toy, name: str, settings: dict[str, Any]) -> Federation:
    """Two rounds, trained once for all tests that only look at the outcome."""
    key = json.dumps([name, settings], sort_keys=True)
    if key not in _RAN:
        _RAN[key] = run(toy(name, **settings))
    return _RAN[key]


def predictions(federation: Federation) -> list[np.ndarray]:
    return [part.scores for kind in federation.method.reports for part in federation.evaluate(kind)]


def test_the_table_covers_the_registry() -> None:
    assert set(registry.names()) == set(CASES)
    assert len([entry for entry in registry.rows() if not entry.npr]) + 2 == 16
    assert [entry.name for entry in registry.rows() if entry.alias_of] == ["fedavg+npr"]


@pytest.mark.parametrize("name", CASES)
def test_shares_exactly_its_groups(toy: Toy, name: str) -> None:
    case = CASES[name]
    federation = toy(name, **case.on)
    report = federation.run_round()
    assert federation.method.shares(1) == case.shares
    site = federation.sites[0]
    assert report.vector_size == sum(
        entry.size for entry in ParameterManifest.of(site.model).entries if entry.group in case.shares
    )
    if not case.shares:
        return
    # Whatever is not shared can be anything and the vector that leaves does not notice; nothing else is attached.
    sent = federation.method.contribution(site, 1)
    hidden = ParameterManifest.of(site.model, ParameterManifest.of(site.model).groups - case.shares)
    hidden.load(site.model, np.full(hidden.size, 7.0, dtype=np.float32))
    site.prototypes = None
    again = federation.method.contribution(site, 1)
    assert np.array_equal(sent.vector, again.vector) and sent.weight == len(site.train)
    assert set(sent.extras) == ({"class_gradients", "owners"} if name == "creff" else set())
    assert federation.method.wire == (name not in ("creff", "central"))


@pytest.mark.parametrize(("name", "case"), WITH_A_TWIN)
def test_its_own_term_acts(toy: Toy, same: Same, name: str, case: Case) -> None:
    on, off = ran(toy, name, case.on), ran(toy, name, case.off)
    pairs = zip(predictions(on), predictions(off), strict=True)
    change = max(float(np.max(np.abs(a - b) / np.maximum(a, b).max())) for a, b in pairs)
    assert change > MORE_THAN_NOISE, "switching the term off changed nothing"
    if case.left is not None:
        assert same(off, ran(toy, case.left, case.left_with))


def test_local_shares_nothing_and_alone_is_fedavg(toy: Toy, same: Same) -> None:
    alone = ((6, 5, 4, 3),)
    assert not same(ran(toy, "local", {}), ran(toy, "fedavg", {}))
    solo, average = run(toy("local", counts=alone)), run(toy("fedavg", counts=alone))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            solo.sites[0].model.state_dict().values(), average.sites[0].model.state_dict().values(), strict=True
        )
    )


def test_fedbabu_without_its_frozen_head_is_fedavg(toy: Toy, same: Same, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, average = run(toy("fedbabu"), 1), run(toy("fedavg"), 1)
    assert not same(frozen, average)
    free = toy("fedbabu")
    monkeypatch.setattr(type(free.method), "work", Method.work)
    monkeypatch.setattr(type(free.method), "shared", frozenset(WHOLE))
    assert same(run(free, 1), average)


def test_warm_start_shares_the_head_first(toy: Toy, same: Same) -> None:
    federation = toy("fednpr-per", personal_after=2)
    assert [federation.method.shares(r) >= {"head"} for r in (1, 2, 3)] == [True, True, False]
    sizes = [federation.run_round().vector_size for _ in range(3)]
    assert sizes[0] == sizes[1] == sizes[2] + 4 * 256 + 4
    shared = run(toy("fednpr"), 2)
    warm = run(toy("fednpr-per", personal_after=2), 2)
    assert same(shared, warm)
    # The first personal head starts from the aggregate of the last shared round, and then goes its own way.
    last = warm.model.head.weight.detach().clone()
    run(warm, 1)
    heads = [site.model.head.weight for site in warm.sites]
    assert torch.equal(warm.model.head.weight, last)
    assert not torch.equal(heads[0], heads[2])


def test_head_from_prototypes(toy: Toy) -> None:
    federation = toy("fedper", personal_start="prototypes", clusters=1)
    site = federation.sites[1]
    initial = site.model.head.weight.detach().clone()
    federation.method.begin_round(site, 1)
    assert torch.equal(site.model.head.weight[2:], initial[2:])
    features, _ = extract(site.model, site.reading(site.train))
    prototypes = Regulariser.predicting(site, site.model)
    length = features.norm(dim=1, keepdim=True)
    expected = prototypes.similarity(features) / site.config.temperature * length / length.mean()
    assert torch.allclose(site.model.head(features)[:, :2], expected, rtol=1e-3)
    # Only the first personal round makes a head; later ones keep what was learnt.
    site.model.head.load_state_dict({"weight": initial, "bias": torch.zeros(4)})
    federation.method.begin_round(site, 2)
    assert torch.equal(site.model.head.weight, initial)


def test_prediction_by_head_prototype_or_both(toy: Toy) -> None:
    scores = {
        predict: run(toy("fednpr-per", predict=predict, predict_mix=0.25), 1).evaluate("local")[1].scores
        for predict in ("head", "prototype", "both", "auto")
    }
    assert (scores["prototype"][:, 2:] == 0).all() and (scores["head"][:, 2:] > 0).all()
    assert np.allclose(scores["both"], 0.75 * scores["head"] + 0.25 * scores["prototype"], atol=1e-6)
    assert np.array_equal(scores["auto"], scores["both"])
    present = run(toy("fednpr-per", predict_present_only=True), 1).evaluate("local")[1].scores
    assert (present[:, 2:] == 0).all() and np.allclose(present.sum(1), 1.0, atol=1e-6)


def test_the_head_predicts_unless_a_method_was_registered_with_prototypes(toy: Toy) -> None:
    shares = {name: toy(name).method.prototype_share for name in registry.names()}
    assert {name for name, share in shares.items() if share} == {"fednpr-per"}
    assert shares["fednpr-per"] == TrainConfig().predict_mix


def test_prototypes_alone(toy: Toy) -> None:
    with pytest.raises(ConfigError, match="untrained"):
        toy("fedavg", supervision="none")
    with pytest.raises(ConfigError, match="untrained"):
        toy("fednpr", supervision="none")
    federation = toy("fednpr", supervision="none", predict="prototype", lambda_npr=1.0)
    initial = federation.model.head.weight.detach().clone()
    federation.run_round()
    assert torch.equal(federation.model.head.weight, initial)
    assert np.allclose(federation.evaluate("local")[0].scores.sum(1), 1.0, atol=1e-5)


def test_epoch_prototypes_come_from_the_epoch_before(toy: Toy, same: Same) -> None:
    exact, epoch = toy("fednpr"), toy("fednpr", prototype_source="epoch")
    run(exact, 1)
    run(epoch, 1)
    assert same(exact, epoch)  # the first round has no epoch before it
    site = epoch.sites[0]
    held = site.prototypes
    assert held is not None and not torch.equal(held.vectors, exact.sites[0].prototypes.vectors)
    epoch.method.begin_round(site, 2)
    assert site.prototypes is held
    assert not same(run(exact, 1), run(epoch, 1))


def test_local_bn_keeps_norm_layers_home(toy: Toy) -> None:
    federation = toy("fedavg", local_bn=True)
    assert federation.method.shares(1) == {"extractor", "head"}
    before = ParameterManifest.of(federation.model, {"norm", "statistics"})
    initial = before.flatten(federation.model)
    run(federation)
    assert np.array_equal(before.flatten(federation.model), initial)
    assert federation.method.reports == ("personal", "local")
    vectors = [before.flatten(site.model) for site in federation.sites]
    assert not np.array_equal(vectors[0], vectors[1])


def test_registry_refuses() -> None:
    with pytest.raises(LocalProtocolError, match="registered already"):
        register("fedavg", "again")(Method)
    with pytest.raises(ConfigError, match="unknown method 'fednrp'") as caught:
        registry.get("fednrp")
    assert "fednpr" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="muu") as caught:
        registry.build(TrainConfig(method="fedprox", method_options={"muu": 1.0}))
    assert "mu" in (caught.value.hint or "")
    with pytest.raises(ConfigError):
        registry.build(TrainConfig(method="fedavg", method_options={"mu": 1.0}))
