"""From `federation.toml` and an initial model to a manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lazaret.errors import ConfigError, PolicyViolation, ToolkitError
from security.consortium.drafting import refuse_two_sites
from security.consortium.plan import PLAN as TEMPLATE
from security.consortium.plan import FederationPlan, ScoresPlan
from security.consortium.show import warnings
from security.identity.pinned_files import InitialModel
from security.secagg.clips import Clips
from security.secagg.state import canonical, flatten, state_hash
from tests.support.consortium_world import PLAN, PRIVACY, World, write_initial_model


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


def plan_of(tmp_path: Path, text: str) -> FederationPlan:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return FederationPlan.read(path)


def test_the_template_is_a_plan_and_shows_every_default(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, TEMPLATE)
    uncommented = (
        "\n".join(
            line.removeprefix("# ") if line.startswith("# ") and " = " in line.split("#")[1] else line
            for line in TEMPLATE.splitlines()
        )
        .replace('"<64 hex digits>"', f'"{"00" * 32}"')
        .replace("# [privacy]", "[privacy]")
        .replace("# [scores]", "[scores]")
    )
    told = plan_of(tmp_path, uncommented)
    assert told.timing == plan.timing
    assert told.audit == plan.audit.model_copy(update={"vote_drop": 0.05})
    given = plan.aggregation.model_dump() | {"colluders": 1, "least_survivors": 3, "groups": 3}
    given |= {"clip_exponents": {"blocks.0.*": 3}}
    assert told.aggregation.model_dump() == given
    assert told.privacy is not None
    assert told.scores == ScoresPlan(sites=("graz", "linz")) and plan.scores is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("run = ", "rum = "), "rum: unknown key"),
        (("rounds = 5", 'rounds = "5"'), "rounds"),
        (("rounds = 5", "rounds = 0"), "rounds"),
        (('method = "fednpr-per"', ""), "method"),
        (("[training]", "[training"), "not toml"),
        (("learning_rate = 0.001", "learning_rate = 0"), "learning_rate"),
        (("learning_rate = 0.001", "momentum = 0.9"), "learning_rate"),
        (('code_digest = "', 'code_digest = "x'), "code_digest"),
        (('architecture = "tiny"', ""), "architecture"),
        (("config_hashes = [", "#"), "config hash"),
        (("initial.safetensors", "missing.safetensors"), "initial model not found"),
        (("initial.safetensors", "federation.toml"), "not a safetensors file"),
        (('"head.*"', '"haed.*"'), "no tensor matches"),
        (('["head.*"]', '["*"]'), "no tensor is left"),
    ],
)
def test_a_wrong_plan_gets_one_clear_line(world: World, change: tuple[str, str], match: str) -> None:
    assert change[0] in PLAN
    world.write_plan(PLAN.replace(*change))
    with pytest.raises(ConfigError, match=match) as caught:
        world.publish()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value).strip() or "toml" in match
    assert not world.authority.manifest_path.exists()


def test_several_labels_need_a_model_that_was_exported_for_them(world: World) -> None:
    world.write_plan(PLAN.replace("[training.settings]", '[training.settings]\nlabels = "many"'))
    with pytest.raises(ConfigError, match="was not exported for several labels of an image"):
        world.publish()


def test_a_model_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"rubbish")
    for name, what, hint in [
        ("nowhere", "initial model not found", "sends it out"),
        ("", "cannot be read: is a directory", "may this user read it"),
        ("cut.safetensors", "not a safetensors file", "is it complete"),
    ]:
        with pytest.raises(ConfigError, match=what) as caught:
            InitialModel.read(tmp_path / name)
        assert hint in (caught.value.hint or "") and caught.value.where == str(tmp_path / name)


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plan not found"):
        FederationPlan.read(tmp_path / "nowhere.toml")


def test_clips_follow_from_schedule_and_statistics(world: World) -> None:
    layout = world.publish().aggregation.layout
    blocks = {block.name: block for block in layout.blocks}
    clips = Clips(learning_rate=0.001, steps=50, margin=8)
    # 0.001 x 50 steps = 0.05; eight times that is 0.4, and the power of two above is 2^-1.
    assert blocks["conv.weight"].clip_exponent == -1
    assert blocks["conv.weight"] == clips.weights("conv.weight", (2, 3, 2, 2))
    variance = np.array([1.0, 0.01], np.float32)
    assert blocks["bn.running_mean"] == clips.running_mean("bn.running_mean", variance)
    assert blocks["bn.running_var"] == clips.running_variance("bn.running_var", variance)
    assert "head.weight" not in blocks and not any("num_batches" in name for name in blocks)
    assert blocks["weight"].maximum == 16_384


def test_momentum_counts_for_plain_sgd_only(world: World) -> None:
    def exponent(extra: str) -> int:
        world.write_plan(PLAN.replace("learning_rate = 0.001", f"learning_rate = 0.001\n{extra}"))
        blocks = world.publish().aggregation.layout.blocks
        return next(block.clip_exponent for block in blocks if block.name == "conv.weight")

    assert exponent('optimizer = "sgd"\nmomentum = 0.75') == 1  # four times as far
    assert exponent('optimizer = "adam"\nmomentum = 0.9') == -1
    with pytest.raises(ConfigError, match="momentum"):
        exponent('optimizer = "sgd"\nmomentum = 1.0')


def test_clips_can_be_set_by_hand(world: World) -> None:
    world.write_plan(
        PLAN + '[aggregation]\nclip_exponents = { "conv.*" = 4 }\nreport_metrics = false\nring_bits = 64\n'
    )
    layout = world.publish().aggregation.layout
    assert next(block for block in layout.blocks if block.name == "conv.weight").clip_exponent == 4
    assert layout.ring_bits == 64 and not layout.has("loss")


def test_local_statistics_stay_at_the_site(world: World) -> None:
    world.write_plan(PLAN.replace("steps = 50", "steps = 50\nlocal_statistics = true"))
    names = [block.name for block in world.publish().aggregation.layout.state_blocks]
    assert names == ["bn.weight", "conv.weight"]


def test_the_initial_state_is_what_a_site_computes(world: World) -> None:
    manifest = world.publish()
    layout = manifest.aggregation.layout
    tensors = load_file(world.authority.folder / "initial.safetensors")
    mine = {block.name: tensors[block.name] for block in layout.state_blocks}
    assert state_hash(canonical(flatten(layout, mine))).hex() == manifest.model.initial_state


def test_the_exporter_may_give_facts_and_order(world: World) -> None:
    order = "conv.weight head.weight bn.weight bn.running_mean bn.running_var"
    facts = {"architecture": "tiny-2", "code_digest": "ef" * 32, "config_hashes": "aa" * 32}
    facts["classes"] = '["a", "b", "c", "d"]'
    write_initial_model(world.authority.folder / "initial.safetensors", facts | {"order": order})
    bare = PLAN
    classes = 'classes = ["bcc", "melanoma", "nevus"]\n'
    for line in ('architecture = "tiny"\n', f'code_digest = "{"ab" * 32}"\n', classes):
        bare = bare.replace(line, "")
    world.write_plan(bare.replace(f'config_hashes = ["{"cd" * 32}"]\n', ""))
    manifest = world.publish()
    assert (manifest.model.architecture, manifest.model.classes) == ("tiny-2", ("a", "b", "c", "d"))
    assert manifest.training.config_hashes == ("aa" * 32,)
    world.write_plan(PLAN)
    with pytest.raises(ConfigError, match=r"classes are not those .* \(a, b, c, d\)"):
        world.publish()
    world.write_plan(bare.replace(f'config_hashes = ["{"cd" * 32}"]\n', ""))
    names = [block.name for block in manifest.aggregation.layout.state_blocks]
    assert names == ["conv.weight", "bn.weight", "bn.running_mean", "bn.running_var"]
    write_initial_model(world.authority.folder / "initial.safetensors", {"order": "conv.weight"})
    with pytest.raises(ConfigError, match="order"):
        InitialModel.read(world.authority.folder / "initial.safetensors").shared((), local_statistics=False)


def test_what_the_exporter_calls_personal_stays_whatever_the_plan_says(world: World) -> None:
    write_initial_model(world.authority.folder / "initial.safetensors", {"personal": "head.weight bn.weight"})
    world.write_plan(PLAN.replace('["head.*"]', "[]"))
    names = {block.name for block in world.publish().aggregation.layout.state_blocks}
    assert names == {"conv.weight", "bn.running_mean", "bn.running_var"}


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"w": np.zeros(3, np.float64)}, "float64"),
        ({"w": np.array([1.0, np.nan], np.float32)}, "NaN"),
        ({"bn.running_mean": np.zeros(2, np.float32), "w": np.zeros(1, np.float32)}, "no variance"),
        ({"bn.running_var": np.full(2, -1.0, np.float32), "w": np.zeros(1, np.float32)}, "no variance"),
    ],
)
def test_a_model_that_cannot_be_summed_is_refused(world: World, tensors: dict[str, np.ndarray], match: str) -> None:
    save_file(tensors, world.authority.folder / "initial.safetensors")
    world.write_plan(PLAN.replace('["head.*"]', "[]"))
    with pytest.raises(ToolkitError, match=match):
        world.publish()


def test_two_sites_are_refused_unless_allowed_and_private(tmp_path: Path) -> None:
    world = World.make(tmp_path, sites=("graz", "linz"))
    allowed = "[aggregation]\nallow_two_sites = true\n"
    for text in (PLAN, PLAN + allowed, PLAN + PRIVACY):
        world.write_plan(text)
        with pytest.raises(PolicyViolation, match="two sites") as caught:
            world.publish()
        assert "allow_two_sites" in str(caught.value.hint)
    world.write_plan(PLAN + allowed + PRIVACY)
    manifest = world.publish()
    assert manifest.aggregation.least_survivors == 2
    assert any("learns the other's noisy update" in note for note in warnings(manifest))


def test_one_site_is_no_federation(tmp_path: Path) -> None:
    with pytest.raises(PolicyViolation, match="no federation"):
        refuse_two_sites(plan_of(tmp_path, PLAN), 1)


def test_a_large_roster_is_sampled_and_told_what_that_means(tmp_path: Path) -> None:
    world = World.make(tmp_path, sites=[f"site-{number:02}" for number in range(21)])
    manifest = world.publish()
    assert (manifest.audit.mode, manifest.audit.chunks_per_site) == ("sampled", 1)
    assert any("covered" in note and "dishonest coordinator" in note for note in warnings(manifest))
    assert manifest.aggregation.colluders == 6
    world.write_plan(PLAN + '[audit]\nmode = "covered"\n')
    assert not any("sampled" in note for note in warnings(world.publish()))


def test_loosened_rules_are_said_aloud(world: World) -> None:
    world.write_plan(PLAN + "[aggregation]\nsingle_history = false\n")
    assert any("two histories" in note for note in warnings(world.publish()))
