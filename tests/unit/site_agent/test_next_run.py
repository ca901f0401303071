"""A run that is offered: what needs a person, pieces of its model in order, and an operator's word for one manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coordinator.run import ModelFile
from lazaret.errors import ConfigError, PolicyViolation, RemoteProtocolError, VerificationFailed
from security.crypto.ring import FRAME_BYTES
from security.identity.manifest import GroupTable, Manifest
from security.secagg.relay import ModelFrame, ModelRequest
from site_agent.config import SiteConfig
from site_agent.next_run import Decision, NextRun, Offer, about, check_permitted, weaker
from tests.support.consortium_world import PLAN as PLAN_OF_WORLD
from tests.support.consortium_world import PRIVACY, SHARED_NOISE, World
from tests.support.site_world import SiteWorld, policy_table

SITE = "graz"
VOTES = "[audit]\nstrict = true\nvote_drop = 0.05\n"
WITHIN = policy_table(accept_runs='"within_policy"')


class LargeWorld(SiteWorld):
    """The model has three frames."""

    def write_model(self) -> None:
        save_file({"conv.weight": np.linspace(-1, 1, FRAME_BYTES // 2 + 100, dtype=np.float32)}, self.model_path)


PLAN = """
run = "run-1"
[model]
initial = "initial.safetensors"
architecture = "tiny"
code_digest = "{digest}"
classes = ["bcc", "melanoma"]
[training]
method = "fedavg"
rounds = 5
steps = 50
config_hashes = ["{digest}"]
[training.settings]
learning_rate = 0.001
""".format(digest="ab" * 32)


@pytest.fixture
def world(tmp_path: Path) -> SiteWorld:
    return LargeWorld(tmp_path, policy=WITHIN, plan=PLAN)


def second(world: SiteWorld, change: Callable[[str], str] = lambda plan: plan) -> tuple[Manifest, bytes, Path]:
    """Run 2, with another model that only the coordinator has."""
    model = world.base.authority.folder / "second.safetensors"
    save_file({"conv.weight": np.linspace(-2, 2, FRAME_BYTES // 2 + 100, dtype=np.float32)}, model)
    text = world.base.authority.plan_path.read_text().replace("run-1", "run-2").replace("initial.saf", "second.saf")
    world.base.write_plan(change(text))
    return world.base.publish(), world.base.published(), model


def offered(world: SiteWorld) -> tuple[NextRun, list[ModelFrame], Path]:
    agent = world.start(SITE)
    manifest, data, model = second(world)
    agent.next_run.offered(data, manifest, agent.manifest)
    frames = list(ModelFile(model, bytes.fromhex(manifest.model.initial_file)).frames(0))
    assert len(frames) == 3
    return agent.next_run, frames, agent.state_dir.folder / "initial"  # type: ignore[return-value]


def test_a_model_comes_in_pieces_and_goes_on_where_a_stream_broke(world: SiteWorld) -> None:
    run, frames, folder = offered(world)
    assert run.step() == ModelRequest(manifest_version=2, next_frame=0) and run.step() is None
    assert not run.piece(frames[0])
    run.closed()
    assert run.step() == ModelRequest(manifest_version=2, next_frame=1)
    assert not run.piece(frames[1]) and run.piece(frames[2])
    assert isinstance(run.step(), Offer)
    (kept,) = folder.iterdir()
    assert kept.stem == hashlib.sha256(kept.read_bytes()).hexdigest()
    assert Decision.read(folder.parent) == Decision(manifest=run.offer.digest, by="policy", fetched=True)  # type: ignore[union-attr]


def test_a_piece_out_of_turn_is_refused(world: SiteWorld) -> None:
    run, frames, folder = offered(world)
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        run.piece(frames[0])
    run.step()
    for wrong in (frames[1], ModelFrame(digest=bytes(32), length=9, index=0, data=bytes(9))):
        with pytest.raises(RemoteProtocolError):
            run.piece(wrong)
    with pytest.raises(RemoteProtocolError, match="out of order"):
        run.piece(ModelFrame(digest=frames[0].digest, length=frames[0].length, index=0, data=b"short"))
    assert not list(folder.glob("*"))


def test_a_byte_that_was_swapped_in_an_earlier_stream_costs_the_whole_model(world: SiteWorld) -> None:
    run, frames, folder = offered(world)
    run.step()
    first = frames[0]
    wrong = ModelFrame(digest=first.digest, length=first.length, index=0, data=b"\x00" + first.data[1:])
    run.piece(wrong)
    run.piece(frames[1])
    with pytest.raises(VerificationFailed, match="not the one in the manifest"):
        run.piece(frames[2])
    assert not list(folder.iterdir())
    assert run.step() == ModelRequest(manifest_version=2, next_frame=0)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (lambda plan: plan, lambda plan: plan, None),
        (lambda plan: plan + PRIVACY, lambda plan: plan.replace(PRIVACY, ""), "without differential privacy"),
        (lambda plan: plan + PRIVACY, lambda plan: plan, None),
        (lambda plan: plan + PRIVACY, lambda plan: plan.replace("epsilon = 8", "epsilon = 9"), "epsilon is 9, that of"),
        (lambda plan: plan + PRIVACY, lambda plan: plan.replace("delta = 0.0", "delta = 0.00"), None),
        (lambda plan: plan + PRIVACY, lambda plan: plan.replace("delta = 0.00", "delta = 0.0"), "delta is 0.0001"),
        (lambda plan: plan, lambda plan: plan.replace('"bcc"', '"nevus"'), "other classes: nevus, melanoma"),
        (lambda plan: plan, lambda plan: plan.replace('code_digest = "ab', 'code_digest = "cd'), "other code"),
        (
            lambda plan: plan.replace("steps = 50", 'steps = 50\nisolation = "required"'),
            lambda plan: plan.replace('\nisolation = "required"', ""),
            "isolated",
        ),
        (lambda plan: plan, lambda plan: plan + '[audit]\nmode = "sampled"\n', "only sampled"),
        (lambda plan: plan + VOTES, lambda plan: plan.replace(VOTES, ""), "do not vote"),
        (lambda plan: plan, lambda plan: plan + VOTES, "up to 6 updates on one that stands"),
    ],
    ids=[
        "the same",
        "privacy",
        "private",
        "epsilon",
        "smaller delta",
        "delta",
        "classes",
        "code",
        "isolation",
        "audit",
        "votes end",
        "votes begin",
    ],
)
def test_a_run_that_protects_less_needs_a_person(
    tmp_path: Path, before: Callable[[str], str], after: Callable[[str], str], reason: str | None
) -> None:
    world = LargeWorld(tmp_path, policy=WITHIN, plan=before(PLAN))
    manifest, _, _ = second(world, after)
    found = weaker(world.manifest, manifest)
    assert found is None if reason is None else reason in str(found)


def test_a_run_that_leaves_the_noise_to_all_sites_needs_a_person(tmp_path: Path) -> None:
    """With the same epsilon: it holds only if the others add their part."""
    world = World.make(tmp_path)
    world.write_plan(PLAN_OF_WORLD + PRIVACY)
    current = world.publish()
    world.write_plan(SHARED_NOISE.replace("run-1", "run-2") + PRIVACY)
    shared = world.publish()
    assert str(weaker(current, shared)).startswith("if all other sites collude, its epsilon is ")
    assert "collude" not in str(weaker(shared, replace_run(shared)))


def replace_run(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"run": "run-3", "version": manifest.version + 1})


GROUPS = GroupTable(count=3, combine="median", secrets={}, shown=None)


@pytest.mark.parametrize(
    ("room", "less", "more", "reason"),
    [
        ("aggregation", {"groups": None}, {"groups": GROUPS}, "sums of 3 groups"),
        ("training", {"weights": "uniform"}, {"weights": "bucketed"}, "its weights are bucketed"),
        ("training", {"weights": "bucketed"}, {"weights": "samples"}, "its weights are samples"),
        ("training", {"local_statistics": True}, {"local_statistics": False}, "BatchNorm"),
        ("aggregation", {"single_history": True}, {"single_history": False}, "two histories"),
        ("aggregation", {"allow_two_sites": False}, {"allow_two_sites": True}, "two sites"),
    ],
    ids=["groups", "buckets", "samples", "statistics", "histories", "two sites"],
)
def test_a_run_whose_sums_show_more_needs_a_person(
    world: SiteWorld, room: str, less: dict[str, object], more: dict[str, object], reason: str
) -> None:
    now, then = (
        world.manifest.model_copy(update={room: getattr(world.manifest, room).model_copy(update=change)})
        for change in (less, more)
    )
    assert weaker(then, now) is None and weaker(now, now) is None
    assert reason in str(weaker(now, then))


def test_a_word_is_for_one_manifest_only(tmp_path: Path) -> None:
    world = LargeWorld(tmp_path, plan=PLAN)
    agent = world.start(SITE)
    manifest, data, _ = second(world)
    agent.next_run.offered(data, manifest, agent.manifest)
    state = SiteConfig.read(world.configs[SITE]).state
    assert agent.next_run.step() is None
    Decision(manifest="00" * 32, by="operator").write(state)
    assert agent.next_run.step() is None
    (state / "accepted").write_text("{")
    assert agent.next_run.step() is None
    Decision(manifest=hashlib.sha256(data).hexdigest(), by="operator").write(state)
    assert isinstance(agent.next_run.step(), ModelRequest)


def test_a_run_with_a_plugin_waits_for_its_file_and_its_approval(tmp_path: Path) -> None:
    source = b"# a method\n"
    digest = hashlib.sha256(source).hexdigest()
    world = LargeWorld(tmp_path, policy=policy_table(accept_runs='"within_policy"', plugins=f'["{digest}"]'), plan=PLAN)
    manifest, _, _ = second(world, lambda plan: world.base.write_plugin(plan, source))
    assert any(digest in line for line in about(manifest))
    config = SiteConfig.read(world.configs[SITE])
    with pytest.raises(ConfigError, match=f"{digest}, here is none"):
        check_permitted(config, manifest)
    config.plugins.mkdir()
    (config.plugins / "own_method.py").write_bytes(source)
    check_permitted(config, manifest)
    (config.plugins / "own_method.py").write_bytes(b"# another\n")
    with pytest.raises(ConfigError, match=f"the manifest pins {digest}"):
        check_permitted(config, manifest)
    unapproved = config.model_copy(update={"policy": config.policy.model_copy(update={"plugins": ()})})
    with pytest.raises(PolicyViolation, match=f"{digest}; approved here: none"):
        check_permitted(unapproved, manifest)
