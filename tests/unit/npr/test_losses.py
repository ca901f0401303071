"""Balanced softmax and the NPR loss: values, bounds, gradients, and what they leave alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from npr.config import TrainConfig, paper_literal
from npr.federation import Federation
from npr.losses import ClassPrior, balanced_softmax, npr_loss, regularised
from npr.prototypes import Prototypes
from npr.training import extract

CONFIG = TrainConfig()
Toy = Callable[..., Federation]
Same = Callable[[Federation, Federation], bool]


def setup(classes: int = 4, clusters: int = 3, width: int = 6, n: int = 10, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    vectors = normalize(torch.randn(classes * clusters, width, generator=generator, dtype=dtype), dim=1)
    prototypes = Prototypes(vectors, torch.repeat_interleave(torch.arange(classes), clusters))
    features = torch.randn(n, width, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.arange(n) % classes
    return prototypes, features, labels, ClassPrior(torch.bincount(labels, minlength=classes))


def test_sanity_10_gradient_reaches_features_only_and_is_tangential(toy: Toy) -> None:
    prototypes, features, labels, prior = setup()
    loss = npr_loss(features, labels, prototypes, CONFIG, prior)
    (gradient,) = torch.autograd.grad(loss, features)
    assert gradient.abs().max() > 1e-3
    assert (gradient * features).sum(1).abs().max() < 1e-12
    assert not prototypes.vectors.requires_grad
    assert torch.autograd.gradcheck(lambda h: npr_loss(h, labels, prototypes, CONFIG, prior), (features,))

    federation = toy("fednpr")
    site = federation.sites[0]
    federation.method.begin_round(site, 1)
    batch = next(iter(site.epoch(1)))
    h = site.model.features(batch.images)
    assert site.prototypes is not None
    npr_loss(h, batch.labels, site.prototypes, CONFIG, site.prior).backward()
    assert all(parameter.grad is None for parameter in site.model.head.parameters())
    assert any(parameter.grad is not None for parameter in site.model.extractor.parameters())


def test_sanity_11_value_and_bounds() -> None:
    flat = CONFIG.changed(temperature=1.0)
    prototypes, features, labels, prior = setup()
    features = features.detach()
    value = float(npr_loss(features, labels, prototypes, flat, prior))
    assert math.log(1 + 3 * math.exp(-2)) <= value <= math.log(1 + 3 * math.exp(2))

    alike = Prototypes(prototypes.vectors[:1].expand(4, -1), torch.arange(4))
    assert float(npr_loss(features, labels, alike, flat, prior)) == pytest.approx(math.log(4), abs=1e-12)

    alone = Prototypes(prototypes.vectors[:3], torch.full((3,), 2))
    zeros = torch.full((10,), 2)
    assert float(npr_loss(features, zeros, alone, flat, ClassPrior(torch.tensor([0, 0, 10, 0])))) == 0.0


def test_sanity_12_lambda_zero_is_the_base_and_lambda_multiplies(toy: Toy, same: Same) -> None:
    for base, regular in (("fedavg", "fednpr"), ("fedper", "fednpr-per")):
        plain, off, on = toy(base), toy(regular, lambda_npr=0.0), toy(regular, lambda_npr=1.0)
        for federation in (plain, off, on):
            federation.run_round()
            federation.run_round()
        assert same(plain, off)
        assert not same(plain, on)

    prototypes, features, labels, prior = setup()

    def gradient(config: TrainConfig) -> torch.Tensor:
        npr = npr_loss(features, labels, prototypes, config, prior)
        return torch.autograd.grad(regularised(torch.zeros(()), npr, config), features)[0]

    once, twice = CONFIG.changed(lambda_npr=0.3), CONFIG.changed(lambda_npr=0.6)
    assert torch.allclose(gradient(twice), 2 * gradient(once), rtol=1e-12)
    # The released code adds lambda: then it has no gradient at all, and NPR always weighs 1.
    added = gradient(once.changed(lambda_added=True))
    assert torch.equal(added, gradient(twice.changed(lambda_added=True)))
    assert torch.allclose(added, gradient(CONFIG.changed(lambda_npr=1.0)), rtol=1e-12)


def test_sanity_13_one_extractor_pass_per_step(toy: Toy) -> None:
    federation = toy("fednpr")
    site = federation.sites[0]
    before = {name: tensor.clone() for name, tensor in site.model.state_dict().items()}
    site.model.train()
    extract(site.model, site.reading(site.train))
    assert site.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in site.model.state_dict().items())

    report = federation.method.local_round(site, 1)
    counters = [t for name, t in site.model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert counters and all(int(counter) == report.steps for counter in counters)
    assert report.steps == math.ceil(len(site.train) / 8) and report.samples == len(site.train)


@pytest.mark.parametrize(("classes", "floor"), [(8, 0.2929), (5, 0.2839)])
def test_sanity_14_layer_norm_has_a_floor(classes: int, floor: float) -> None:
    config = CONFIG.changed(logit_norm="layernorm", temperature=1.0)
    prototypes = Prototypes(torch.eye(classes), torch.arange(classes))
    labels = torch.arange(classes)
    perfect = npr_loss(torch.eye(classes) * 7, labels, prototypes, config, ClassPrior(torch.ones(classes)))
    assert floor - 1e-4 <= float(perfect) < floor + 2e-3
    random = torch.randn(50, classes, generator=torch.Generator().manual_seed(0))
    assert float(npr_loss(random, torch.arange(50) % classes, prototypes, config, ClassPrior(labels))) > floor


def test_sanity_15_balanced_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 4, generator=generator, requires_grad=True)
    labels = torch.arange(12) % 4

    def both(loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    uniform = ClassPrior(torch.tensor([3, 3, 3, 3])).log()
    for got, expected in zip(
        both(balanced_softmax(logits, labels, uniform)), both(cross_entropy(logits, labels)), strict=True
    ):
        assert torch.allclose(got, expected, atol=1e-6)

    skewed = ClassPrior(torch.tensor([50, 3, 20, 1])).log()
    value, gradient = both(balanced_softmax(logits, labels, skewed))
    shifted, shifted_gradient = both(balanced_softmax(logits, labels, skewed + 5.0))
    assert torch.allclose(value, shifted, atol=1e-5) and torch.allclose(gradient, shifted_gradient, atol=1e-6)
    assert not torch.allclose(value, both(cross_entropy(logits, labels))[0], atol=1e-2)

    present = torch.tensor([0, 1, 3])[torch.arange(12) % 3]
    masked = ClassPrior(torch.tensor([50, 3, 0, 1]))
    loss, gradient = both(balanced_softmax(logits, present, masked.log()))
    assert torch.isfinite(loss) and (gradient[:, 2] == 0.0).all() and (gradient[:, 0] != 0.0).all()
    # With the floor of the released code the gradient is tiny but there, and Adam rescales whatever is there.
    assert (both(balanced_softmax(logits, present, masked.log(1e-9)))[1][:, 2] != 0.0).all()


def test_sanity_15b_prediction_ignores_the_prior(toy: Toy) -> None:
    federation = toy("fedavg")
    site, data = federation.sites[1], federation.dataset.sites[1]
    features, _ = extract(federation.model, site.reading(data.test))
    with torch.no_grad():
        raw = torch.softmax(federation.model.logits(features), dim=1)
    scores = torch.from_numpy(federation.evaluate("global")[1].scores)
    assert torch.allclose(scores, raw, atol=1e-6)
    assert (scores[:, 2:] > 0).all()


@pytest.mark.parametrize("method", ["fedavg", "fednpr", "fedper", "fedprox"])
def test_sanity_16_absent_rows_stay_bitwise(toy: Toy, method: str) -> None:
    def moved(**train: float) -> torch.Tensor:
        options = {"mu": 0.0} if method == "fedprox" else None
        federation = toy(method, weight_decay=5e-4, options=options, **train)
        site = federation.sites[1]
        before = site.model.head.weight.detach().clone()
        federation.method.local_round(site, 1)
        federation.method.local_round(site, 2)
        return (site.model.head.weight != before).any(1)

    assert moved().tolist() == [True, True, False, False]
    assert moved(head_decay=5e-4).all()
    assert moved(prior_floor=1e-9).all()


def test_balance_options_change_the_loss() -> None:
    prototypes, features, _, _ = setup(dtype=torch.float32)
    features = features.detach()
    labels = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 2, 3])
    prior = ClassPrior(torch.bincount(labels))
    values = {
        balance: float(npr_loss(features, labels, prototypes, CONFIG.changed(npr_balance=balance), prior))
        for balance in ("none", "prior", "class_mean")
    }
    assert len(set(values.values())) == 3
    single = [float(npr_loss(features[labels == c], labels[labels == c], prototypes, CONFIG, prior)) for c in range(4)]
    assert values["class_mean"] == pytest.approx(sum(single) / 4, rel=1e-5)


def test_paper_literal_sets_every_switch() -> None:
    literal = paper_literal(TrainConfig(method="fednpr-per", lambda_npr=0.05, clusters=2))
    assert literal.lambda_npr == 0.05 and literal.clusters == 2
    assert literal.lambda_added and literal.prior_floor == 1e-9 and literal.logit_norm == "layernorm"
    assert literal.assign == "random_subset" and literal.head_decay == 5e-4 and literal.min_per_cluster == 1
    assert literal.optimizer_state == "persist" and literal.config_hash != TrainConfig().config_hash
