"""What crosses sites is one weighted mean; everything else depends on the site, the round and the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from lazaret.errors import ConfigError, LocalProtocolError
from npr.config import TrainConfig
from npr.federation import Federation
from npr.methods.site import Site
from npr.model import ModelSpec, normalisation
from npr.params import Contribution, ParameterManifest, PlainAggregator
from security.secagg.clips import Clips
from security.secagg.fixed_point import decode, encode, step_size
from security.secagg.layout import Layout

Toy = Callable[..., Federation]
Same = Callable[[Federation, Federation], bool]


def test_sanity_23_identical_sites_and_a_single_site() -> None:
    vector = np.random.default_rng(0).normal(size=50).astype(np.float32)
    total, weight = PlainAggregator().sum([Contribution(vector=vector, weight=w) for w in (3, 5, 9)])
    assert weight == 17 and np.array_equal((total / weight).astype(np.float32), vector)
    total, weight = PlainAggregator().sum([Contribution(vector=vector, weight=7)])
    assert np.array_equal((total / weight).astype(np.float32), vector)


def test_sanity_23b_one_site_is_local_learning(toy: Toy, same: Same) -> None:
    alone = ((6, 5, 4, 3),)
    federation = toy("fedavg", counts=alone)
    federation.run_round()
    manifest = federation.method.manifest(federation.model, 1)
    assert np.array_equal(manifest.flatten(federation.model), manifest.flatten(federation.sites[0].model))


def test_sanity_23c_weighted_by_images_with_batch_norm(toy: Toy) -> None:
    federation = toy("fedavg", counts=((3, 2, 2, 1), (9, 5, 5, 5)))
    report = federation.run_round()
    assert report.weight == 8 + 24
    one, other = (site.model.state_dict() for site in federation.sites)
    for name, tensor in federation.model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert int(tensor) == 0
            continue
        expected = 0.25 * one[name].double() + 0.75 * other[name].double()
        assert torch.allclose(tensor.double(), expected, rtol=1e-6, atol=1e-9), name
    assert any("running_var" in name for name in one)


def test_sanity_23d_order_of_sites_does_not_matter(toy: Toy) -> None:
    federation, turned = toy("fednpr"), toy("fednpr")
    turned.sites = turned.sites[::-1]
    federation.run_round()
    turned.run_round()
    for a, b in zip(federation.model.state_dict().values(), turned.model.state_dict().values(), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("method", "part"), [("fednpr-per", "head"), ("fedrod", "personal_head")])
def test_sanity_23e_personal_parts_touch_nobody_else(toy: Toy, method: str, part: str) -> None:
    federation, disturbed = toy(method), toy(method)
    federation.run_round()
    disturbed.run_round()
    with torch.no_grad():
        # Such a change must reach nobody, even if the disturbed site itself then learns something else.
        getattr(disturbed.sites[0].model, part).weight[0] += 3.0
    watched = [federation.sites[0], disturbed.sites[0]]
    for one in (federation, disturbed):
        one.sites = one.sites[1:]
        one.run_round()
        one.run_round()
    for a, b in zip(federation.sites, disturbed.sites, strict=True):
        assert all(
            torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
        )
    sent = [one.method.contribution(site, 1).vector for one, site in zip((federation, disturbed), watched, strict=True)]
    assert np.array_equal(sent[0], sent[1])


def test_sanity_23f_fixed_point_sum_is_the_plain_mean(toy: Toy) -> None:
    """The integers that secure aggregation adds up give FedAvg's mean, to within a step of the fixed point."""
    federation = toy("fednpr")
    manifest = federation.method.manifest(federation.model, 1)
    start = manifest.flatten(federation.model)
    initial = federation.model.state_dict()
    clips = Clips(learning_rate=1e-3, steps=8)
    blocks = []
    for entry in manifest.entries:
        if entry.group == "statistics":
            variance = initial[entry.name.replace("running_mean", "running_var")].numpy()
            make = clips.running_mean if entry.kind == "mean" else clips.running_variance
            blocks.append(make(entry.name, variance))
        else:
            blocks.append(clips.weights(entry.name, entry.shape))
    layout = Layout.of(blocks, roster_size=len(federation.sites), weight_cap=64)

    federation.run_round()
    contributions = [federation.method.contribution(site, 1) for site in federation.sites]
    total = np.zeros(layout.words, dtype=layout.dtype)
    for contribution in contributions:
        total += encode(layout, contribution.vector - start, weight=contribution.weight).words
    decoded = decode(layout, total)
    assert decoded.weight == sum(contribution.weight for contribution in contributions)
    plain = manifest.flatten(federation.model).astype(np.float64) - start
    for run in layout.runs:
        allowed = np.maximum(2 * len(contributions) * step_size(layout, run, decoded.weight), 1e-6)
        difference = np.abs(decoded.mean[run.place] - plain[run.place])
        assert (difference <= allowed + 1e-6 * np.abs(start[run.place])).all()


def test_sanity_25_schedule() -> None:
    config = TrainConfig()
    rates = {number: config.rate(number) for number in (1, 59, 60, 69, 70, 80)}
    assert rates == pytest.approx({1: 1e-3, 59: 1e-3, 60: 1e-4, 69: 1e-4, 70: 1e-5, 80: 1e-5})


def test_sanity_25b_the_schedule_reaches_the_optimiser(toy: Toy) -> None:
    site = toy("fedavg", milestones=(2,)).sites[0]
    assert [group["lr"] for group in site.optimizer(1).param_groups] == pytest.approx([1e-3, 1e-3])
    assert [group["lr"] for group in site.optimizer(2).param_groups] == pytest.approx([1e-4, 1e-4])


def test_a_round_depends_on_nothing_but_its_inputs(toy: Toy, tiny: ModelSpec) -> None:
    """What makes lab and wire agree: a site built elsewhere, given vector and memory, computes the same bits."""
    federation = toy("fednpr-per", personal_after=1, spec=replace(tiny, drop_rate=0.3))
    federation.run_round()
    federation.run_round()
    lab = federation.sites[1]
    mean, std = normalisation(federation.spec)
    elsewhere = Site(
        name=lab.name,
        train=lab.train,
        model=federation.method.build_model(federation.spec),
        config=federation.config,
        seed=federation.seed,
        mean=mean,
        std=std,
    )
    elsewhere.remember({name: tensor.clone() for name, tensor in lab.memory().items()})
    torch.manual_seed(12345)
    manifest = ParameterManifest.of(federation.model, federation.method.broadcasts(2))
    vector = manifest.flatten(federation.model)
    manifest.load(elsewhere.model, vector)
    state = torch.get_rng_state()
    federation.method.local_round(elsewhere, 3)
    assert torch.equal(torch.get_rng_state(), state)
    federation.run_round()
    assert np.array_equal(
        federation.method.contribution(lab, 3).vector, federation.method.contribution(elsewhere, 3).vector
    )
    assert torch.equal(lab.model.head.weight, elsewhere.model.head.weight)


def test_seed_site_and_round_change_the_draws(toy: Toy, same: Same) -> None:
    def trained(**arguments: int) -> Federation:
        federation = toy("fedavg", **arguments)
        federation.run_round()
        return federation

    assert same(trained(), trained())
    assert not same(trained(), trained(seed=2))


@pytest.mark.parametrize("method", ["fednpr-per", "moon", "fedrep", "creff"])
@pytest.mark.parametrize("state", ["persist", "reset"])
def test_checkpoint_resumes_bitwise(toy: Toy, same: Same, tmp_path: Path, method: str, state: str) -> None:
    options = {"per_class": 3, "matching_steps": 3, "head_epochs": 3} if method == "creff" else None
    straight = toy(method, optimizer_state=state, options=options)
    straight.run_round()
    straight.run_round()
    path = tmp_path / "state.safetensors"
    straight.checkpoint(path)
    resumed = toy(method, optimizer_state=state, options=options)
    resumed.restore(path)
    assert resumed.round == 2 and same(straight, resumed)
    for federation in (straight, resumed):
        federation.run_round()
    assert same(straight, resumed)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


def test_persisted_and_reset_optimisers_differ(toy: Toy, same: Same) -> None:
    pair = [toy("fedavg", optimizer_state=state) for state in ("persist", "reset")]
    for federation in pair:
        federation.run_round()
    assert same(*pair)
    for federation in pair:
        federation.run_round()
    assert not same(*pair)


def test_checkpoint_of_another_run_is_refused(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    toy("fedavg").checkpoint(path)
    with pytest.raises(ConfigError, match="differs in config"):
        toy("fedavg", learning_rate=0.5).restore(path)
    with pytest.raises(ConfigError, match="differs in seed"):
        toy("fedavg", seed=9).restore(path)
    with safe_open(str(path), framework="pt") as file:
        assert "lazaret" in file.metadata()


def test_contributions_are_checked() -> None:
    with pytest.raises(LocalProtocolError, match="not finite"):
        Contribution(vector=np.array([1.0, np.nan], dtype=np.float32), weight=1)
    with pytest.raises(LocalProtocolError, match="weigh 1"):
        Contribution(vector=np.zeros(1, dtype=np.float32), weight=0)


def test_a_finished_federation_stays_finished(toy: Toy) -> None:
    federation = toy("fedrep")
    federation.run_round()
    before = [site.model.head.weight.detach().clone() for site in federation.sites]
    body = ParameterManifest.of(federation.model, {"extractor", "norm", "statistics"})
    federation.finish()
    for site, head in zip(federation.sites, before, strict=True):
        assert np.array_equal(body.flatten(site.model), body.flatten(federation.model))
        assert not torch.equal(site.model.head.weight, head)
    assert len(federation.evaluate("personal")) == 3
    with pytest.raises(ConfigError, match="finished"):
        federation.run_round()
    with pytest.raises(ConfigError, match="finished"):
        federation.evaluate("local")


def test_diverging_training_says_so(toy: Toy) -> None:
    federation = toy("fedavg", optimizer="sgd", learning_rate=1e30)
    with pytest.raises(ConfigError, match="diverged"):
        federation.run_round()


def test_model_must_fit_the_data(toy: Toy, tiny: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="does not fit data"):
        toy("fedavg", spec=replace(tiny, num_classes=5))
