"""Every method on a card that is pretended (tests/support/pretended_card.py).

Nothing is on the wrong device, nothing is read on the host but through `to_host`, and the outcome is that of the
processor bit for bit.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from lazaret.errors import ConfigError
from npr.deployed import Deployed
from npr.device import PROCESSOR, Device, on_host, to_host
from npr.dp.engine import SUPPORTED_METHODS
from npr.dp.federation import PrivateFederation, PrivateSchedule
from npr.federation import Federation
from npr.lab.predictors import PARTS, SitePredictors
from npr.methods import registry
from npr.methods.base import Method
from npr.methods.regulariser import Regulariser
from npr.model import normalisation
from npr.prototypes import Prototypes
from security.dp.accountant import RATE_ONE, rate_at_least
from security.dp.planner import Schedule
from tests.support.pretended_card import CARD, CardTensor, HostRead, MixedDevices, pretended_card, values_of
from tests.unit.npr.conftest import with_several

# One site, two steps; it lacks two classes.
COUNTS = ((5, 4, 0, 0),)
OPTIONS: dict[str, dict[str, Any]] = {
    "creff": {"per_class": 2, "matching_steps": 2, "head_epochs": 1},
    "balancefl": {"noise_vectors": 5},
    "fedbabu": {"finetune_epochs": 1},
    "fedrep": {"final_head_epochs": 1},
}
# These have a term that begins in the second round.
TWO_ROUNDS = ("moon", "moon+npr", "creff")
METHODS = [entry.name for entry in registry.rows() if entry.alias_of is None]
Toy = Callable[..., Federation]


@pytest.fixture
def ground(toy: Toy) -> Callable[..., Federation]:
    """A federation of one small site on a device."""

    def build(method: str, device: Device, many: bool = False, **train: Any) -> Federation:
        options = OPTIONS.get(method.removesuffix("+npr"), {})
        plain = toy(method, counts=COUNTS, options=options, **{"batch_size": 5, "augmentation": "paper"} | train)
        dataset, config = (with_several(plain.dataset), {"labels": "many"}) if many else (plain.dataset, {})
        return Federation(
            dataset=dataset, spec=plain.spec, config=plain.config.changed(**config), seed=1, device=device
        )

    return build


def worked(federation: Federation, rounds: int = 1) -> list[np.ndarray]:
    """Training, prototypes, prediction, what methods do at the end; and what crosses between rounds."""
    for _ in range(rounds):
        federation.run_round()
    scores = [part.scores for kind in federation.method.reports for part in federation.evaluate(kind)]
    federation.sites[0].remember(federation.sites[0].memory())
    federation.finish()
    return scores


def tensors(federation: Federation) -> dict[str, torch.Tensor]:
    models = [federation.model, *(site.model for site in federation.sites)]
    found = {f"{n} {name}": tensor for n, model in enumerate(models) for name, tensor in model.state_dict().items()}
    for number, site in enumerate(federation.sites):
        if site.prototypes is not None:
            found[f"{number} prototypes"] = site.prototypes.vectors
        found |= {
            f"{number} {name} {key}": value
            for name, optimizer in site._optimizers.items()
            for part, state in optimizer.state_dict()["state"].items()
            for key, value in ((f"{part} {key}", value) for key, value in state.items())
            if isinstance(value, torch.Tensor)
        }
    return found


ONE_LABEL = [pytest.param(name, False, id=name) for name in METHODS]
# Those that differ most; the others with the long tests.
SOON = ("fedavg", "fednpr-per")
MANY_LABELS = [
    pytest.param(name, True, id=f"{name}-many", marks=() if name in SOON else pytest.mark.long)
    for name in METHODS
    if not registry.get(name).method.one_label
]


@pytest.mark.parametrize(("method", "many"), ONE_LABEL + MANY_LABELS)
def test_every_method_on_a_card(ground: Callable[..., Federation], method: str, many: bool) -> None:
    rounds = 2 if method in TWO_ROUNDS else 1
    plain = ground(method, PROCESSOR, many)
    expected = worked(plain, rounds)
    with pretended_card() as card:
        federation = ground(method, card, many)
        found = worked(federation, rounds)
    held, same = tensors(federation), tensors(plain)
    assert held.keys() == same.keys()
    assert all(isinstance(tensor, CardTensor) for tensor in held.values()), "everything of a step is there"
    assert all(torch.equal(values_of(held[name]), same[name]) for name in held)
    assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


SETTINGS: list[dict[str, Any]] = [
    {"assign": "sinkhorn_soft", "npr_balance": "class_mean", "prototype_source": "epoch"},
    {"assign": "nearest", "npr_balance": "prior", "logit_norm": "layernorm", "optimizer": "sgd", "momentum": 0.9},
    {"assign": "random_subset", "clusters_by": "explained", "min_per_cluster": 1, "supervision": "ce"},
    {"personal_start": "prototypes", "predict_present_only": True, "prototype_momentum": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings.values())))
def test_every_way_to_make_and_use_prototypes(ground: Callable[..., Federation], settings: dict[str, Any]) -> None:
    plain = ground("fednpr-per", PROCESSOR, **settings)
    expected = worked(plain, 2)
    with pretended_card() as card:
        found = worked(ground("fednpr-per", card, **settings), 2)
    assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


def test_predictors_and_a_deployed_model_on_a_card(ground: Callable[..., Federation]) -> None:
    def predictions(federation: Federation) -> list[np.ndarray]:
        site, method, data = federation.sites[0], federation.method, federation.dataset.sites[0]
        fitted = SitePredictors.fit(site, site.model, PARTS)
        loaded = SitePredictors.of(fitted.tensors(), site)
        by_part = loaded.scores(method, site, site.model, "local", data.test, PARTS)
        mean, std = normalisation(federation.spec)
        prototypes = Regulariser.predicting(site, site.model)
        deployed = Deployed(
            method=method, model=site.model, kind="local", mean=mean, std=std, temperature=1.5,
            present=site.prior.present.float(), prototypes=prototypes,
        )  # fmt: skip
        probabilities, features = deployed.predict(data.test.images)
        return [*by_part.values(), probabilities, features.numpy()]

    expected = predictions(ground("fednpr-per", PROCESSOR))
    with pretended_card() as card:
        found = predictions(ground("fednpr-per", card))
    assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


SCHEDULE = Schedule(
    rounds=1, steps=1, rate=rate_at_least(0.5), multiplier=1.0, clip=1.0, prototypes_sigma=8.0, prototypes_every=1
)


def private(method: str, toy: Toy, device: Device, **plan: Any) -> PrivateFederation:
    usual = {"assign": "nearest", "predict": "head", "optimizer": "sgd", "learning_rate": 0.1}
    plain = toy(method, counts=((3, 4, 3, 2),), **usual)
    npr = registry.get(method).npr
    schedule = replace(SCHEDULE, prototypes_sigma=8.0 if npr else None)
    return PrivateFederation(
        dataset=plain.dataset,
        spec=plain.spec,
        config=plain.config,
        plan=PrivateSchedule(schedule=schedule, cap=1000.0, delta=1e-5, dimensions=8, **plan),
        seed=1,
        device=device,
    )


@pytest.mark.parametrize("method", sorted(SUPPORTED_METHODS))
def test_every_private_method_on_a_card(toy: Toy, method: str) -> None:
    with pretended_card() as card:
        federation = private(method, toy, card, micro_batch=4)
        federation.run_round()
        scores = [part.scores for kind in federation.method.reports for part in federation.evaluate(kind)]
    assert all(np.isfinite(part).all() for part in scores)
    assert all(isinstance(parameter.grad, CardTensor) for parameter in federation.sites[0].model.parameters())


@pytest.mark.parametrize("trainable", ["all", "head"])
def test_under_differential_privacy_too_no_more_than_micro_batch_at_once(toy: Toy, trainable: str) -> None:
    federation, seen = private("fednpr", toy, PROCESSOR, micro_batch=4, trainable=trainable), list[int]()
    for site in federation.sites:
        site.model.extractor.register_forward_pre_hook(lambda _, images: seen.append(len(images[0])))
    federation.run_round()
    assert seen and max(seen) == 4


def test_too_little_memory_under_differential_privacy(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = private("fedavg", toy, PROCESSOR, micro_batch=4)

    def too_large(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(federation.sites[0].model), "features", too_large)
    with pytest.raises(ConfigError, match="a batch of 4 images does not fit") as caught:
        federation.run_round()
    assert caught.value.where == "[privacy] micro_batch" and "micro_batch = 2" in str(caught.value.hint)


def test_a_frozen_extractor_and_views_on_a_card(toy: Toy) -> None:
    with pretended_card() as card:
        private("fedavg", toy, card, trainable="head", views=2).run_round()


def test_noise_that_sites_share_on_a_card(toy: Toy) -> None:
    schedule = Schedule(
        rounds=1, steps=1, rate=RATE_ONE, multiplier=1.0, clip=1.0, prototypes_sigma=None, prototypes_every=1
    )
    plain = toy(
        "fedavg",
        counts=((4, 4, 4, 4),) * 3,
        optimizer="sgd",
        learning_rate=0.1,
        augmentation="none",
        milestones=(),
        weight_decay=0.0,
        assign="nearest",
        predict="head",
    )
    plan = PrivateSchedule(
        schedule=schedule, cap=1000.0, delta=1e-5, trainable="head", projection=6, noise="shared", colluders=0
    )
    with pretended_card() as card:
        federation = PrivateFederation(
            dataset=plain.dataset, spec=plain.spec, config=plain.config, plan=plan, seed=1, device=card
        )
        federation.run_round()
    assert isinstance(federation.sites[0].model.head.weight, CardTensor)


# Twins: one line forgets the device, or reads a value by itself, and the same runs fail.


def forgets_in_prediction(self: Prototypes, features: torch.Tensor, classes: int, temperature: float) -> torch.Tensor:
    scores = torch.zeros(len(features), classes)  # not where the features are
    scores[:, self.classes] = torch.softmax(self.similarity(features) / temperature, dim=1)
    return scores


def test_a_line_that_forgets_the_device_is_found(
    ground: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prototypes, "scores", forgets_in_prediction)
    worked(ground("fednpr-per", PROCESSOR))
    with pretended_card() as card, pytest.raises((MixedDevices, HostRead)):
        worked(ground("fednpr-per", card))


def test_a_loss_that_forgets_the_device_is_found(
    ground: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Method,
        "supervised",
        lambda self, site, features, logits, labels: functional.cross_entropy(
            logits + to_host(site.log_prior).clamp(min=-9.0), labels
        ),
    )
    worked(ground("fedavg", PROCESSOR))
    with pretended_card() as card, pytest.raises(MixedDevices):
        worked(ground("fedavg", card))


def test_a_value_that_is_read_without_to_host_is_found(
    ground: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Method,
        "supervised",
        lambda self, site, features, logits, labels: logits.sum() * float(labels.sum()),
    )
    with pretended_card() as card, pytest.raises(HostRead):
        worked(ground("fedavg", card))


# The pretended card itself.

MIXES: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda card, host: card + host,
    lambda card, host: card @ host.T,
    lambda card, host: torch.cat([card, host]),
    lambda card, host: torch.where(card > 0, card, host),
    lambda card, host: functional.cross_entropy(card, host[:, 0].long()),
    lambda card, host: functional.linear(card, host),
]


@pytest.mark.parametrize("mix", MIXES)
def test_it_refuses_what_fake_tensors_of_torch_refuse(mix: Callable[..., Any]) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        mix(torch.empty(3, 3, device=CARD), torch.empty(3, 3))
    with pretended_card(), pytest.raises(MixedDevices):
        mix(torch.ones(3, 3).to(CARD), torch.ones(3, 3))


def test_it_permits_what_they_permit() -> None:
    with FakeTensorMode():
        assert (torch.empty(3, device=CARD) * torch.ones(())).device == CARD
    with pretended_card():
        made = torch.ones(3).to(CARD) * torch.tensor(2.0)
        assert made.device == CARD
        assert to_host(made).tolist() == [2.0, 2.0, 2.0]
        for read in (lambda: made[0].item(), lambda: float(made[0]), lambda: made.cpu(), lambda: bool(made.any())):
            with pytest.raises(HostRead):
                read()
        for read in (made.numpy, made.tolist):
            with pytest.raises(RuntimeError, match="subclasses"):
                read()
        assert isinstance(next(on_host(torch.nn.Linear(2, 2).to(CARD)).parameters()).data, torch.Tensor)


# The source: the ways from a tensor to the host have one name.

ROOT = Path(__file__).parents[3]
READERS = {"numpy", "tolist", "item", "cpu"}
# Host data from the start: tables, files, plots, and arrays of numpy, which have `tolist` too.
HOST_ONLY = {
    "npr/bootstrap.py", "npr/metrics.py", "npr/dp/audit.py", "npr/dp/releases.py", "npr/lab/bench.py",
    "npr/lab/plots.py", "npr/lab/choices.py", "npr/lab/run.py", "npr/lab/dp_bench.py", "npr/device.py",
}  # fmt: skip


def host_reads(source: str) -> list[str]:
    """Calls that bring a tensor's values to the host and are not applied to what `to_host` returned."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            text = ast.unparse(node.func.value)
            if "to_host(" not in text:
                found.append(f"{text}.{node.func.attr}()")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            given = [*node.args, *(word.value for word in node.keywords)]
            if any("'cpu'" in ast.unparse(word) for word in given):
                found.append(ast.unparse(node))
    return found


def sources() -> list[Path]:
    files = [*(ROOT / "npr").rglob("*.py"), *(ROOT / "site_agent" / "trainer").glob("*.py")]
    return [file for file in files if file.parent.name != "data"]


# What is left is no tensor of a device: arrays of numpy, what came over the network of a group or from a file, and what
# `to_host` returned a line before.
ALLOWED = {
    "npr/distributed.py": ["received.numpy()"],
    "npr/training.py": ["kept.tolist()"],
    "npr/deployed.py": ["ours.numpy()"],
    "npr/lab/cell.py": [
        "((unit - centre) @ axes)[::step].numpy()", "(vectors - centre) @ axes.numpy()",
        "dataset.counts(side).tolist()",
    ],
    "npr/dp/private_site.py": [
        "tensors['counts'].tolist()", "tensors['vectors'].numpy()", "tensors['potentials'].numpy()",
        "tensors['projection'].numpy()", "tensors['cells'].tolist()", "now - before[1].numpy()",
    ],
    "site_agent/trainer/evaluation.py": [
        "confusion_matrix(*answered(labels, scores)).tolist()", "class_aucs(labels, scores).tolist()",
        "confusion_matrix(labels, scores.argmax(axis=1), classes).tolist()", "recalls(labels, scores).tolist()",
    ],
    "site_agent/trainer/data_checks.py": ["context.data.train.class_counts().tolist()", "counts.tolist()"],
    "site_agent/trainer/training.py": [
        "data.train.class_counts().tolist()",
        "confusion_matrix(*answered(samples.labels, scores)).tolist()",
        "tensor.contiguous().numpy()", "tensor.numpy()",
    ],
    "site_agent/trainer/data.py": ["samples.class_counts().tolist()"],
    "site_agent/trainer/trial.py": ["np.unique(rows).tolist()"],
}  # fmt: skip


def test_values_reach_the_host_through_one_function() -> None:
    left = {}
    for file in sources():
        name = file.relative_to(ROOT).as_posix()
        reads = [text for text in host_reads(file.read_text()) if text not in ALLOWED.get(name, [])]
        if reads and name not in HOST_ONLY:
            left[name] = reads
    assert not left, left


def test_the_search_of_the_source_finds_what_it_looks_for() -> None:
    reads = "t.sum().item(), to_host(t).numpy(), t.to('cpu'), t.to(device='cpu'), t.detach().numpy()"
    text = f"def f(t):\n    return {reads}"
    assert sorted(host_reads(text)) == [
        "t.detach().numpy()", "t.sum().item()", "t.to('cpu')", "t.to(device='cpu')"
    ]  # fmt: skip
