"""`npr-lab model`: the file that a consortium publishes and every member pins."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from lazaret.errors import ConfigError, DataError, PolicyViolation
from npr.lab.cli import _privacy, cli
from security.consortium.drafting import _check_private
from security.consortium.plan import FederationPlan
from security.consortium.show import warnings
from security.dp.filter import planned_epsilon
from security.dp.planner import PrivateSettings
from security.identity.pinned_files import InitialModel
from tests.support.consortium_world import World

WORDS = ["model", "--architecture", "test_efficientnet", "--classes", "a,b,c,d,e", "--image-size", "32", "--json"]


def export(path: Path, *more: str) -> dict[str, object]:
    done = CliRunner().invoke(cli, [*WORDS, "-o", str(path), *more], catch_exceptions=False)
    assert done.exit_code == 0
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_the_file_holds_everything_that_publish_asks_for(tmp_path: Path) -> None:
    world = World.make(tmp_path / "world")
    path = world.authority.folder / "initial.safetensors"
    told = export(path, "--set", "learning_rate=0.002", "--seed", "3")
    assert told["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert told["personal"] == ["head.weight", "head.bias"]
    world.write_plan('run = "run-1"\n[model]\ninitial = "initial.safetensors"\n[training]\nrounds = 4\nsteps = 9\n')
    manifest = world.publish()
    assert manifest.model.initial_file == told["sha256"] and manifest.model.classes == ("a", "b", "c", "d", "e")
    assert manifest.training.config_hashes == (told["config_hash"],)
    assert manifest.training.settings["learning_rate"] == "0.002" and manifest.training.settings["seed"] == 3
    names = {block.name for block in manifest.aggregation.layout.state_blocks}
    assert names == set(InitialModel.read(path).tensors) - {"head.weight", "head.bias"}


def test_a_head_that_is_shared_at_first_is_in_the_layout(tmp_path: Path) -> None:
    assert export(tmp_path / "a.safetensors", "--set", "personal_after=2")["personal"] == []


def test_a_plan_may_not_contradict_the_export(tmp_path: Path) -> None:
    world = World.make(tmp_path / "world")
    export(world.authority.folder / "initial.safetensors")
    start = 'run = "run-1"\n[model]\ninitial = "initial.safetensors"\n[training]\nrounds = 4\nsteps = 9\n'
    world.write_plan(start + "[training.settings]\nlearning_rate = 0.5\n")
    with pytest.raises(ConfigError, match="was exported for"):
        world.authority.publish(world.key, FederationPlan.read(world.authority.plan_path), now_ms=world.now)
    world.write_plan(start.replace("rounds", 'method = "fedavg"\nrounds'))
    with pytest.raises(ConfigError, match="method is missing, or not the one"):
        world.publish()


def test_several_labels_are_the_exporters_word(tmp_path: Path) -> None:
    """It alone knows which methods can be trained so: a plan cannot add them to a model, nor take them away."""
    world = World.make(tmp_path / "world")
    path = world.authority.folder / "initial.safetensors"
    start = 'run = "run-1"\n[model]\ninitial = "initial.safetensors"\n[training]\nrounds = 4\nsteps = 9\n'
    export(path)
    world.write_plan(start + '[training.settings]\nlabels = "many"\n')
    with pytest.raises(ConfigError, match="labels = many, but the initial model was exported for one"):
        world.publish()
    export(path, "--set", "labels=many")
    world.write_plan(start + '[privacy]\nepsilon = 8\ndelta = 1e-5\nclip = 1\nnoise_floor = 0.8\nunit = "patient"\n')
    with pytest.raises(PolicyViolation, match="several labels of an image cannot be trained under differential"):
        world.publish()
    world.write_plan(start)
    assert world.publish().training.settings["labels"] == "many"
    with pytest.raises(PolicyViolation, match="labels = 'many': the noise of counts and prototypes"):
        export(tmp_path / "private.safetensors", "--set", "labels=many", "--set", "assign=nearest", "--dp", "steps=2")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--set", "learning_rat=0.1"], "learning_rat"),
        (["--set", "learning_rate"], "cannot read"),
        (["--method", "fednpr-pre"], "unknown method"),
        (["--method", "creff"], "more of its server than a mean"),
        (["--set", "labels=several"], "labels = 'several'"),
        (["--set", "labels=many", "--classes", "a,-"], "no label can be called"),
        (["--set", "labels=many", "--method", "fedlc"], "method = 'fedlc': its margins are between classes"),
        (["--set", "labels=many", "--set", "logit_norm=layernorm"], "logit_norm = 'layernorm': of two answers"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, words: list[str], what: str) -> None:
    with pytest.raises((ConfigError, DataError), match=what):
        CliRunner().invoke(
            cli, [*WORDS, "-o", str(tmp_path / "x"), *words], catch_exceptions=False, standalone_mode=False
        )
    assert not (tmp_path / "x").exists()


def test_a_private_model_has_no_batch_norm_and_brings_its_schedule(tmp_path: Path) -> None:
    world = World.make(tmp_path / "world")
    path = world.authority.folder / "initial.safetensors"
    export(path, "--set", "assign=nearest", "--set", "predict=head", "--dp", "rate=0.25", "--dp", "steps=9")
    assert not any("running_mean" in name for name in InitialModel.read(path).tensors)
    start = 'run = "run-1"\n[model]\ninitial = "initial.safetensors"\n[training]\nrounds = 4\nsteps = 9\n'
    promise = '[privacy]\nepsilon = 8\ndelta = 0.00001\nclip = 1\nnoise_floor = 0.5\nunit = "patient"\n'
    world.write_plan(start)
    with pytest.raises(ConfigError, match=r"no \[privacy\]"):
        world.publish()
    world.write_plan(start.replace("steps = 9", "steps = 8") + promise)
    with pytest.raises(ConfigError, match="private rounds have 9"):
        world.publish()
    world.write_plan(start + promise)
    manifest = world.publish()
    settings = PrivateSettings.of(manifest.training.settings)
    assert settings == PrivateSettings(rate=0.25, steps=9, norm="group", engine="fast"), "auto has become what it means"
    (note,) = [note for note in warnings(manifest) if "noise_floor" in note]
    wanted = re.search(r"noise_floor = ([0-9.]+) all rounds fit", note)
    assert wanted is not None
    schedule = settings.schedule(rounds=4, multiplier=float(wanted[1]), clip=1.0)
    assert planned_epsilon(schedule.events(), 1e-5) <= 8


def test_pretrained_weights_have_the_private_settings_that_won() -> None:
    won = _privacy(("counts_sigma=5",), "fedavg", "package")
    assert (won.trainable, won.projection, won.rate, won.steps, won.views) == ("head", 128, 1.0, 1, 4)
    assert won.counts_sigma == 5, "what is given counts"
    assert _privacy(("trainable=all",), "fedavg", "package").rate == PrivateSettings().rate
    for method, weights in (("fednpr-per", "package"), ("fedavg", "none")):
        assert _privacy(("steps=3",), method, weights).trainable == "all"


def test_a_model_that_cannot_be_clipped_exactly_is_not_exported_and_not_published(tmp_path: Path) -> None:
    words = ["model", "--architecture", "test_convnext", "--classes", "a,b", "--image-size", "32", "--method", "fedavg"]
    path = tmp_path / "a.safetensors"
    result = CliRunner().invoke(cli, [*words, "--set", "assign=nearest", "--dp", "rate=0.25", "-o", str(path)])
    assert isinstance(result.exception, PolicyViolation) and "differ from autograd" in result.exception.message
    assert not path.exists()
    plan = FederationPlan.model_validate({"run": "r", "model": {"initial": "x"}, "training": {"rounds": 1, "steps": 1}})
    with pytest.raises(ConfigError, match="which engine"):
        _check_private(plan.model_copy(update={"privacy": object()}), {"dp.steps": 1, "dp.engine": "auto"})


def test_what_would_void_epsilon_is_not_exported(tmp_path: Path) -> None:
    words = [*WORDS, "-o", str(tmp_path / "a.safetensors"), "--dp", "rate=0.25"]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, PolicyViolation) and "assign" in str(done.exception)
    assert not (tmp_path / "a.safetensors").exists()
