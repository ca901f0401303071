"""The comparison methods: each equals what theory says when its own term is switched off, and does its work when on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.nn.functional import cosine_similarity, cross_entropy

from lazaret.errors import ConfigError
from npr.federation import Federation
from npr.methods.balancefl import balanced_sampler, distillation, feature_noise
from npr.methods.creff import class_gradients, matching_loss
from npr.methods.fedlc import FedLC
from npr.methods.moon import Moon, contrast
from npr.model import linear
from npr.training import descend

Toy = Callable[..., Federation]
Same = Callable[[Federation, Federation], bool]


def rounds(federation: Federation, count: int = 2) -> Federation:
    for _ in range(count):
        federation.run_round()
    return federation


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model: torch.nn.Module, before: dict[str, torch.Tensor], prefix: str = "") -> bool:
    return any(
        not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if name.startswith(prefix)
    )


def test_sanity_17_fedprox(toy: Toy, same: Same) -> None:
    average = rounds(toy("fedavg"))
    assert same(average, rounds(toy("fedprox", options={"mu": 0.0})))
    assert not same(average, rounds(toy("fedprox", options={"mu": 1.0})))

    federation = toy("fedprox", options={"mu": 5.0})
    site = federation.sites[0]
    federation.method.begin_round(site, 1)
    batch = next(iter(site.epoch(1)))
    penalty = federation.method.penalty(site, batch, torch.zeros(1), torch.zeros(1))
    penalty.backward()
    assert float(penalty.detach()) == 0.0 and all(float(p.grad.abs().max()) == 0.0 for p in site.model.parameters())

    def drift(mu: float) -> float:
        federation = toy("fedprox", optimizer="sgd", learning_rate=0.01, weight_decay=0.0, options={"mu": mu})
        start = [parameter.detach().clone() for parameter in federation.model.parameters()]
        site = federation.sites[0]
        federation.method.local_round(site, 1)
        pairs = zip(site.model.parameters(), start, strict=True)
        return float(sum(((a.detach() - b) ** 2).sum() for a, b in pairs)) ** 0.5

    drifts = [drift(mu) for mu in (0.0, 5.0, 20.0)]
    assert drifts[0] > drifts[1] > drifts[2] > 0.0


class _Projected(Moon):
    """FedAvg on MOON's architecture."""

    def penalty(self, *arguments: object) -> float:
        return 0.0


def test_sanity_18_moon(toy: Toy, same: Same) -> None:
    plain = toy("moon")
    plain.method = _Projected(plain.config, name="projected")
    assert same(rounds(plain), rounds(toy("moon", options={"mu": 0.0})))
    assert same(rounds(toy("moon"), 1), rounds(toy("moon", options={"mu": 0.0}), 1))  # no previous model yet
    assert not same(plain, rounds(toy("moon")))

    current = torch.randn(6, 5, requires_grad=True, generator=torch.Generator().manual_seed(0))
    other = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    term = contrast(current, other, other, 0.5)
    (gradient,) = torch.autograd.grad(term, current)
    assert float(term.detach()) == pytest.approx(math.log(2)) and float(gradient.abs().max()) < 1e-7
    assert float(contrast(other, other, -other, 0.5)) < float(contrast(other, -other, other, 0.5))

    federation = rounds(toy("moon"))
    site, method = federation.sites[0], federation.method
    method.begin_round(site, 3)
    frozen = [site.within_round["received"], site.within_round["previous"]]
    before = [snapshot(model) for model in frozen]
    descend(site.epoch(3), site.optimizer(3), lambda batch: method.step(site, batch))
    for model, saved in zip(frozen, before, strict=True):
        assert not changed(model, saved) and all(parameter.grad is None for parameter in model.parameters())


def test_sanity_19_fedrs_and_fedlc(toy: Toy, same: Same) -> None:
    full = ((6, 12, 4, 5), (3, 4, 5, 6))
    average = rounds(toy("fedavg", supervision="ce"), 1)
    assert same(average, rounds(toy("fedrs", supervision="ce", options={"alpha": 1.0}), 1))
    assert not same(average, rounds(toy("fedrs", supervision="ce"), 1))
    average = rounds(toy("fedavg", counts=full), 1)
    for alpha in (0.0, 0.5):
        assert same(average, rounds(toy("fedrs", counts=full, options={"alpha": alpha}), 1))

    def loss(tau: float, counts: tuple[int, ...], logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        federation = toy("fedlc", counts=(counts,), options={"tau": tau})
        assert isinstance(federation.method, FedLC)
        return federation.method.supervised(federation.sites[0], logits, logits, labels)

    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)) * 8
    labels = torch.arange(20) % 4
    plain = cross_entropy(logits, labels)
    assert torch.allclose(loss(0.0, (9, 3, 5, 2), logits, labels), plain)
    assert torch.allclose(loss(2.0, (4, 4, 4, 4), logits, labels), plain)
    assert not torch.allclose(loss(1.0, (40, 3, 5, 2), logits, labels), plain)
    confident = torch.eye(4)[labels] * 50
    for counts in ((40, 3, 5, 2), (2, 2, 2, 30)):
        assert float(loss(1.0, counts, confident, labels)) >= 0.0
    # Rare classes must win by more: lowering the count of the true class raises its loss.
    zero = torch.zeros(1, 4)
    first = torch.tensor([0])
    assert float(loss(1.0, (2, 9, 9, 9), zero, first)) > float(loss(1.0, (90, 9, 9, 9), zero, first))


def test_sanity_20_balancefl() -> None:
    labels = np.repeat([0, 1, 3], [300, 40, 7])
    drawn = labels[np.concatenate([balanced_sampler(labels, np.random.default_rng(i)) for i in range(20)])]
    counts = np.bincount(drawn, minlength=4)
    assert counts[2] == 0 and chisquare(counts[[0, 1, 3]]).pvalue > 1e-3

    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    absent = torch.tensor([True, False, True, True, False])
    teacher = torch.softmax(logits[:, absent] / 2.0, dim=1)
    entropy = -(teacher * teacher.log()).sum(1).mean()
    assert torch.allclose(distillation(logits, logits, absent, 2.0), entropy)
    assert distillation(logits.roll(1, 0), logits, absent, 2.0) > entropy
    for few in ([False] * 5, [True] + [False] * 4):
        assert float(distillation(logits, logits.roll(1, 0), torch.tensor(few), 2.0)) == 0.0

    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(3, 3, generator=generator)
    features = torch.randn(400, 3, generator=generator) @ mixing
    classes = torch.arange(400) % 2
    features = features + classes[:, None] * 50.0
    noise = feature_noise(features, classes, 60_000, generator)
    expected = sum(torch.cov(features[classes == c].T, correction=0) for c in range(2)) / 2
    scale = float(expected.abs().max())
    assert torch.allclose(torch.cov(noise.T), expected, atol=0.03 * scale)
    assert float(noise.mean(0).abs().max()) < 0.02 * scale


def test_sanity_20b_every_part_of_balancefl_acts(toy: Toy, same: Same) -> None:
    only_b = ((12, 4, 0, 0),)
    whole = rounds(toy("balancefl", counts=only_b), 1)
    for off in ({"distillation": 0.0}, {"noise": 0.0}, {"entropy": 0.0}, {"balanced_sampling": False}):
        assert not same(whole, rounds(toy("balancefl", counts=only_b, options=off), 1)), off


def test_sanity_21_fedrep(toy: Toy) -> None:
    federation = toy("fedrep")
    site, method = federation.sites[0], federation.method
    before = snapshot(site.model)
    method.fit_head(site, 1, 3)
    assert not changed(site.model, before, "extractor.") and changed(site.model, before, "head.")

    after_head = snapshot(site.model)
    fitted = copy.deepcopy(site.model.head.state_dict())
    original, method.fit_head = method.fit_head, lambda *_: None
    method.local_round(site, 1)
    method.fit_head = original
    assert changed(site.model, after_head, "extractor.")
    assert all(torch.equal(fitted[name], tensor) for name, tensor in site.model.head.state_dict().items())
    assert not any(entry.name.startswith("head") for entry in method.manifest(site.model, 1).entries)


def test_sanity_21b_fedbabu(toy: Toy) -> None:
    federation = toy("fedbabu", head_decay=5e-4)
    initial = snapshot(federation.model)
    rounds(federation, 3)
    for site in federation.sites:
        assert not changed(site.model, initial, "head.") and changed(site.model, initial, "extractor.")
    before = [prediction.scores for prediction in federation.evaluate("personal")]
    aggregate = snapshot(federation.model)
    federation.finish()
    assert all(changed(site.model, initial, "head.") for site in federation.sites)
    assert not changed(federation.model, aggregate)
    after = [prediction.scores for prediction in federation.evaluate("personal")]
    assert not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def parameters(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fednpr", "fednpr-per"])
def test_a_site_fine_tunes_the_last_model_for_itself(toy: Toy, name: str) -> None:
    federation, plain = toy(name, options={"finetune_epochs": 2}), toy(name)
    assert federation.method.reports == ("personal", *(kind for kind in plain.method.reports if kind != "personal"))
    for each in (federation, plain):
        rounds(each, 2)
    aggregate = snapshot(federation.model)
    assert not changed(plain.model, aggregate), "the rounds are those without it"
    before = [site.prototypes for site in federation.sites]
    for each in (federation, plain):
        each.finish()
    assert not changed(federation.model, aggregate), "what is shared stays"
    for mine, kept, other in zip(federation.sites, before, plain.sites, strict=True):
        assert not torch.equal(parameters(mine.model.extractor), parameters(federation.model.extractor))
        assert changed(mine.model, aggregate, "head.")
        assert torch.equal(parameters(other.model.extractor), parameters(plain.model.extractor)), "nothing to fine-tune"
        if federation.method.regulariser is not None:  # towards prototypes of the aggregate, not of the round before
            assert mine.prototypes is not None and kept is not None
            assert not torch.equal(mine.prototypes.vectors, kept.vectors)


@pytest.mark.parametrize("name", ["fedprox", "moon", "local", "central", "fedrs"])
def test_other_methods_have_no_fine_tuning(toy: Toy, name: str) -> None:
    with pytest.raises(ConfigError, match="finetune_epochs"):
        toy(name, options={"finetune_epochs": 1})


def test_sanity_21c_fedrod(toy: Toy, same: Same) -> None:
    federation = toy("fedrod")
    site, method = federation.sites[0], federation.method
    batch = next(iter(site.epoch(1)))
    features = site.model.features(batch.images)
    method.penalty(site, batch, features, site.model.logits(features)).backward()
    touched = {name for name, parameter in site.model.named_parameters() if parameter.grad is not None}
    assert touched == {"personal_head.weight", "personal_head.bias"}

    federation = toy("fedrod")
    generic, personal = federation.evaluate("global"), federation.evaluate("personal")
    assert all(np.array_equal(a.scores, b.scores) for a, b in zip(generic, personal, strict=True))
    assert same(rounds(federation), rounds(toy("fedavg")))  # body and generic head are FedAvg's
    generic, personal = federation.evaluate("global"), federation.evaluate("personal")
    assert not any(np.array_equal(a.scores, b.scores) for a, b in zip(generic, personal, strict=True))


def test_sanity_22_creff() -> None:
    generator = torch.Generator().manual_seed(0)
    head = linear(5, 3, 0)
    features = torch.randn(40, 5, generator=generator) + torch.eye(5)[torch.arange(40) % 2] * 3
    labels = torch.arange(40) % 2
    gradients = class_gradients(features, labels, head)
    for label in range(2):
        mine = labels == label
        weight, bias = torch.autograd.grad(cross_entropy(head(features[mine]), labels[mine]), list(head.parameters()))
        assert torch.allclose(gradients[label, :, :-1], weight, atol=1e-6)
        assert torch.allclose(gradients[label, :, -1], bias, atol=1e-6)
    assert (gradients[2] == 0).all()

    synthetic = torch.randn(3, 10, 5, generator=generator, requires_grad=True)
    owned = torch.tensor([True, True, False])
    optimizer = torch.optim.SGD([synthetic], lr=0.1)
    start = synthetic.detach().clone()
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = matching_loss(synthetic, head, gradients.detach(), owned)
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(synthetic[2], start[2]) and not torch.equal(synthetic[0], start[0])


def test_sanity_22b_creff_in_a_federation(toy: Toy, same: Same) -> None:
    options = {"per_class": 20, "matching_steps": 60, "head_epochs": 60}
    counts = ((9, 9, 9, 0), (8, 7, 9, 0), (0, 9, 8, 0))
    federation = toy("creff", counts=counts, options=options)
    contributions = []
    for site in federation.sites:
        federation.method.local_round(site, 1)
        contributions.append(federation.method.contribution(site, 1))
    total = sum(c.extras["class_gradients"].astype(np.float64) for c in contributions).reshape(4, -1)
    owners = sum(c.extras["owners"] for c in contributions)
    assert owners.tolist() == [2, 3, 3, 0]
    direct = np.mean([c.extras["class_gradients"].reshape(4, -1)[0] for c in contributions[:2]], axis=0)
    assert np.allclose(total[0] / owners[0], direct, atol=1e-7)

    federation = rounds(toy("creff", counts=counts, options=options))
    assert same(federation, rounds(toy("fedavg", counts=counts)))  # local training never sees the re-trained head
    memory = federation.method.server_memory
    fresh = torch.randn(4, 20, 256, generator=torch.Generator().manual_seed(0))
    assert memory["known"].tolist() == [True, True, True, False] and memory["synthetic"].shape == fresh.shape

    # The class nobody owns keeps the features it was given; the others have moved towards the real gradients.
    still = toy("creff", counts=counts, options=options | {"matching_steps": 0})
    rounds(still)
    moved = (memory["synthetic"] != still.method.server_memory["synthetic"]).flatten(1).any(1)
    assert moved.tolist() == [True, True, True, False]
    assert not np.array_equal(federation.evaluate("global")[0].scores, still.evaluate("global")[0].scores)


def test_sanity_22c_retrained_head_separates_real_class_means(toy: Toy) -> None:
    federation = toy("creff", options={"per_class": 30, "matching_steps": 200, "head_epochs": 100})
    method = federation.method
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(4, 256, generator=generator)
    labels = torch.arange(200) % 4
    features = means[labels] + 0.3 * torch.randn(200, 256, generator=generator)
    head = federation.model.retrained_head
    for _ in range(3):
        extras = {
            "class_gradients": class_gradients(features, labels, head).flatten().double().numpy(),
            "owners": np.ones(4),
        }
        manifest = method.manifest(federation.model, 1)
        method.server_step(federation.model, manifest, manifest.flatten(federation.model), extras)
    assert (head(means).argmax(1) == torch.arange(4)).float().mean() > 0.5
    assert cosine_similarity(method.server_memory["synthetic"].mean(1), means, dim=1).mean() > 0.1
