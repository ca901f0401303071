"""Noise that hospitals share, over the wire: real agents, ledgers, logs and training; the coordinator is the lab's hub.

The sum is exact, its noise is the booked one with and without dropouts, both figures are what they are said to be, and
what has no room for it is refused before anything is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from lazaret.errors import ConfigError, ManifestRejected, PolicyViolation, ToolkitError
from npr.config import TrainConfig
from npr.data.generated import ISIC_CLASSES
from npr.dp import sgd as shared_steps
from npr.model import ModelSpec
from npr.recipe import Recipe
from npr.wire_layout import export
from security.audit.agreement import _rules_of
from security.audit.cli import main as privacy_audit
from security.audit.conformance import mechanism_trains, noise_is_agreed
from security.dp.accountant import Mechanism
from security.dp.noise import SharedNoise
from security.dp.planner import PrivateSettings
from security.identity import acceptance
from security.identity.manifest import Manifest
from security.secagg import messages
from site_agent.policy import SitePolicy
from site_agent.privacy import PrivatePlan, budget_status, status_line
from tests.support.private_world import HOSPITALS, PrivateWorld
from tests.support.site_world import SLOT_SECONDS
from tests.vectors.reference import audit_rules

pytestmark = pytest.mark.timeout(300)
GRAZ, *OTHERS = HOSPITALS
ROUNDS, RATE = 3, 0.5
SETTINGS = PrivateSettings(
    steps=1, rate=1.0, prototypes_sigma=None, trainable="head", engine="opacus", noise="shared"
)
CONFIG = TrainConfig(
    method="fedavg",
    optimizer="sgd",
    learning_rate=RATE,
    weight_decay=0.0,
    milestones=(),
    predict="head",
    assign="nearest",
)
RECIPE = Recipe(config=CONFIG, seed=3, image_size=32, privacy=SETTINGS)
PLAN = f"""
run = "run-1"
[model]
initial = "initial.safetensors"
[training]
rounds = {ROUNDS}
steps = 1
[aggregation]
ring_bits = 32
weight_cap = 1024
movement_window = 0
[timing]
train = 100
[privacy]
epsilon = 20
delta = 0.00001
clip = 1
noise_floor = 2
unit = "patient"
"""
UPLOADS = messages.UploadHeader | messages.UploadFrame
Noised = tuple[np.ndarray, np.ndarray]


class SharedWorld(PrivateWorld):
    """Four hospitals whose sums have two honest noises at least: one may collude, and one more may be missing."""

    def __init__(self, folder: Path, *, plan: str = PLAN, recipe: Recipe = RECIPE) -> None:
        self.recipe = recipe
        super().__init__(folder, plan=plan)
        self.create_ledgers()

    def write_model(self) -> None:
        spec = ModelSpec(
            architecture="tf_efficientnet_lite0",
            num_classes=8,
            image_size=32,
            seed=3,
            norm=self.recipe.norm,
            trainable="head",
        )
        export(self.model_path, spec, self.recipe, rounds=ROUNDS, classes=ISIC_CLASSES)

    @property
    def noise(self) -> SharedNoise:
        plan = PrivatePlan.of(self.config(GRAZ), self.manifest)
        assert plan is not None and plan.schedule.shared is not None
        return plan.schedule.shared

    def train_all(self) -> None:
        """Up to READY."""
        self.hub.order(tuple(self.agents))
        for site in tuple(self.agents):
            self.work(site)
        self.tick(SLOT_SECONDS * 1000)

    def held(self, site: str) -> np.ndarray:
        """The whole numbers that this site will mask."""
        pending = self.agents[site].session._pending
        assert pending is not None
        layout = self.manifest.aggregation.layout
        return pending.words.view(layout.signed_dtype)[: layout.state_words].astype(np.int64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Noised]:
    """For each site and round: the sum of clipped gradients, which nobody sees in a deployment, and what was sent."""
    found: list[Noised] = []
    real = shared_steps.noised

    def noised(total: np.ndarray, *given: Any, **more: Any) -> np.ndarray:
        sent = real(total, *given, **more)
        found.append((total.copy(), sent))
        return sent

    monkeypatch.setattr(shared_steps, "noised", noised)
    return found


def test_the_sum_is_exact_and_its_noise_is_the_booked_one_also_with_dropouts(
    tmp_path: Path, drawn: list[Noised]
) -> None:
    world = SharedWorld(tmp_path)
    world.start_all()
    shared, layout = world.noise, world.manifest.aggregation.layout
    sigma = shared.sigma(2.0)
    assert shared.honest == 2 and sigma == math.ceil(2 * shared.units / math.sqrt(2))
    spread = []
    for dropout in (None, "vienna"):
        before, sites = world.hub.model.copy(), tuple(world.agents)
        world.train_all()
        units = {site: world.held(site) for site in sites}
        patients = {site: world.trainers[site].samples for site in sites}
        world.hub.hook = lambda site, message: site != dropout or not isinstance(message, UPLOADS)  # noqa: B023
        world.hub.aggregate(sites)
        kept = [site for site in sites if site != dropout]
        total = sum(units[site] for site in kept)
        assert np.abs(total).max() < layout.half_ring, "within range, so nothing wraps"
        block = layout.state_blocks[0]
        unit = 2.0**block.clip_exponent * layout.weight_cap / layout.quantum
        assert unit * shared.units == pytest.approx(RATE, rel=1e-3), "a clipped gradient moves by the learning rate"
        step = unit * total / sum(patients[site] for site in kept)
        assert world.hub.model - before == pytest.approx(step, rel=1e-4, abs=1e-6), "the exact sum, over the patients"
        gradient = sum(part for part, _ in drawn[-len(sites) :][: len(kept)])  # vienna comes last
        noise = total + _in_layout_order(world, gradient)
        spread.append(noise.var() / (len(kept) * sigma**2))
    assert spread == pytest.approx([1.0, 1.0], rel=0.06)
    each = np.concatenate([sent - part for part, sent in drawn])
    assert each.var() / sigma**2 == pytest.approx(1.0, rel=0.02)


def _in_layout_order(world: SharedWorld, gradient: np.ndarray) -> np.ndarray:
    trainer = world.trainers[GRAZ]
    return trainer.wire.units(trainer.site.model, gradient)


def test_both_figures_are_booked_and_agree_with_an_independent_computation(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.start_all()
    for _ in range(2):
        world.run_round()
    shared = world.noise
    kinds = [event.kind for event in world.book(GRAZ).history]
    assert kinds == [Mechanism.CLASS_COUNTS, Mechanism.SHARED_SGD, Mechanism.SHARED_SGD]
    told = budget_status(world.config(GRAZ), world.manifest)
    assert told is not None
    sigma = shared.sigma(2.0)
    for figure, multiplier in (("rdp", math.sqrt(2) * sigma / shared.units), ("alone", sigma / shared.units)):
        assert told[figure] == pytest.approx(_epsilon([5.0, multiplier, multiplier], 1e-5), rel=0.01), figure
    assert told["rdp"] < told["epsilon"] < told["alone"], "the filter's share of delta is smaller"
    line = status_line(told)
    assert "inside the sum" in line and "2 honest survivors" in line and f"{told['alone']:.2f} alone" in line
    audited = CliRunner().invoke(
        privacy_audit, ["epsilon", str(world.agents[GRAZ].state_dir.log), "--recompute", "--json"]
    )
    assert audited.exit_code == 0, audited.output
    statement = json.loads(audited.stdout)["epsilon"]
    assert statement["best_rdp"] == pytest.approx(told["rdp"], rel=0.01)
    assert statement["alone"] == pytest.approx(told["alone"], rel=0.01)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"sigma": "100.0"}, "NoiseBelowFloor"),
        ({"honest": 3}, "ScheduleMismatch"),
        ({"dimensions": 5}, "ScheduleMismatch"),
        ({"sensitivity": "65536.0"}, "ClipExceeded"),
        ({"kind": "dp-sgd"}, "PrivacyMissing"),
    ],
)
def test_an_auditor_and_the_second_verifier_know_what_was_to_be_booked(
    agreed: tuple[Manifest, dict[str, Any]], change: dict[str, Any], code: str | None
) -> None:
    manifest, booked = agreed
    item = booked | change
    body = {"unit": "patient", "delta": "1e-05", "mechanisms": (item,)}
    rules_ = _rules_of(manifest)
    record = SimpleNamespace(body=body, run="run-1", round=1)
    found = [breach[0] for rule in (noise_is_agreed, mechanism_trains) for breach in rule(record, rules_)]
    assert code in found if code else not found
    told = list(audit_rules._private(body, json.loads(manifest.to_bytes()), True))
    assert all(told) == (code is None)


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, dict[str, Any]]:
    """A manifest, and what a site books of its round under it."""
    world = SharedWorld(tmp_path_factory.mktemp("agreed"))
    plan = PrivatePlan.of(world.config(GRAZ), world.manifest)
    assert plan is not None
    return world.manifest, plan.schedule.round_events(2)[0].to_json()


def test_a_hospital_may_refuse_a_run_for_its_figure_alone(agreed: tuple[Manifest, dict[str, Any]]) -> None:
    manifest, booked = agreed
    noise = float(booked["sigma"]) / float(booked["sensitivity"])
    alone = _epsilon([5.0] + [noise] * ROUNDS, 1e-5)
    SitePolicy(most_epsilon=20, most_epsilon_alone=1.01 * alone).check_federation(manifest)
    with pytest.raises(PolicyViolation, match="if all other sites collude"):
        SitePolicy(most_epsilon=20, most_epsilon_alone=0.99 * alone).check_federation(manifest)


def _epsilon(multipliers: list[float], delta: float) -> float:
    """Renyi divergence of Gaussians, alpha / (2 m^2), and the conversion of Canonne, Kamath and Steinke, by a grid."""
    return min(
        sum(order / (2 * m * m) for m in multipliers)
        + math.log1p(-1 / order)
        - math.log(delta * order) / (order - 1)
        for order in (1 + step / 100 for step in range(1, 10_000))
    )


def test_a_restart_repeats_the_same_whole_numbers_and_books_nothing(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.start_all()
    world.train_all()
    before, booked = world.held(GRAZ), world.book(GRAZ)
    world.kill(GRAZ)
    world.start(GRAZ)
    world.hub.connect(GRAZ)
    assert (world.held(GRAZ) == before).all() and world.book(GRAZ) == booked
    world.hub.aggregate(HOSPITALS)
    assert world.hub.check is not None or world.hub.round == 1
    assert world.vectors_of(GRAZ) == 1 and world.book(GRAZ) == booked


def test_a_site_that_ends_before_its_numbers_are_on_disk_books_again(tmp_path: Path) -> None:
    world = SharedWorld(tmp_path)
    world.start_all()
    world.doom(GRAZ)
    order = world.hub.order((GRAZ,))
    world.work(GRAZ)
    assert [booking.committed for booking in world.book(GRAZ).bookings] == [False]
    world.start(GRAZ)
    world.hub.connect(GRAZ)
    world.hub.send(GRAZ, order)
    world.work(GRAZ)
    assert [booking.committed for booking in world.book(GRAZ).bookings] == [False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.replace("ring_bits = 32", "ring_bits = 24"), "truncated to zero"),
        (lambda plan: plan.replace("noise_floor = 2", "noise_floor = 2000"), "too small"),
        (lambda plan: plan.replace("ring_bits = 32", "ring_bits = 64"), "24 or 32 bits"),
        (lambda plan: plan.replace("steps = 1\n", 'steps = 1\nweights = "uniform"\n'), "noisy number of patients"),
    ],
)
def test_what_has_no_room_for_it_is_refused_when_it_is_published(
    tmp_path: Path, change: Callable[[str], str], words: str
) -> None:
    with pytest.raises(ToolkitError, match=words):
        SharedWorld(tmp_path, plan=change(PLAN))


def test_momentum_is_public_and_outlives_a_restart(tmp_path: Path, drawn: list[Noised]) -> None:
    """What a site adds to its noisy numbers follows from two public models and its weight; one that did not train in
    the round before adds nothing."""
    world = SharedWorld(tmp_path, recipe=replace(RECIPE, config=CONFIG.changed(momentum=0.9)))
    world.start_all()
    shared, sites = world.noise, tuple(world.agents)
    assert shared.momentum == 0.9 and shared.saturation(10) < replace(shared, momentum=0.0).saturation(10)
    start = world.hub.model.copy()
    world.train_all()
    assert not any(_momentum(world, site, sent).any() for site, (_, sent) in zip(sites, drawn, strict=True))
    world.hub.aggregate(sites)
    moved = world.hub.model - start
    world.kill(GRAZ)
    world.start(GRAZ)
    world.hub.connect(GRAZ)
    drawn.clear()
    world.train_all()
    for site, (_, sent) in zip(tuple(world.agents), drawn, strict=True):
        part = 0.9 * moved.astype(np.float64) * world.trainers[site].samples / shared.unit
        assert np.abs(part).max() > 100
        assert np.abs(_momentum(world, site, sent) - part).max() <= 1, site


def _momentum(world: SharedWorld, site: str, sent: np.ndarray) -> np.ndarray:
    """What a site will mask, less its noisy sum."""
    return world.held(site) + _in_layout_order(world, sent)


def test_an_optimiser_with_a_memory_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one step of SGD"):
        SharedWorld(tmp_path, recipe=replace(RECIPE, config=CONFIG.changed(optimizer="adam")))
    with pytest.raises(ConfigError, match="one step a round"):
        replace(SETTINGS, steps=2)


def test_a_newer_manifest_may_not_lower_the_honest_survivors_of_a_run(tmp_path: Path) -> None:
    """Rounds were booked with the number that the run began with."""
    world = SharedWorld(tmp_path, plan=PLAN.replace("weight_cap", "least_survivors = 4\nweight_cap"))
    manifest = world.manifest
    assert world.noise.honest == 3
    fewer = manifest.model_copy(
        update={"aggregation": manifest.aggregation.model_copy(update={"least_survivors": 3})}
    )
    acceptance.check_run(manifest, manifest)
    acceptance.check_run(fewer, manifest)
    with pytest.raises(ManifestRejected, match="privacy"):
        acceptance.check_run(manifest, fewer)
