"""Runs that wait: checked when they are queued, begun in the order of their manifests, and never twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coordinator.config import CoordinatorConfig
from coordinator.run_queue import RunQueue, StopFile
from lazaret.errors import ConfigError, ManifestRejected, ToolkitError, VerificationFailed
from tests.support.consortium_world import PLAN, World

HUB = "hub"


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World.make(tmp_path)
    made.publish()
    made.identity(HUB).install_manifest(made.published(), now_ms=made.now)
    return made


def published(world: World, run: str) -> tuple[Path, Path]:
    """A manifest and the model of its run."""
    model = world.folder / f"{run}.safetensors"
    save_file({"conv.weight": np.full(24, int(run[-1]), np.float32), "head.weight": np.zeros(6, np.float32)}, model)
    (world.authority.folder / model.name).write_bytes(model.read_bytes())
    world.write_plan(PLAN.replace("run-1", run).replace("initial.safetensors", model.name))
    world.publish()
    manifest = world.folder / f"{run}.json"
    manifest.write_bytes(world.published())
    return manifest, model


def test_runs_follow_in_the_order_of_their_manifests(world: World, tmp_path: Path) -> None:
    queue, identity = RunQueue(tmp_path / "state"), world.identity(HUB)
    second, third = published(world, "run-2"), published(world, "run-3")
    assert not queue
    for files in (third, second):
        queue.add(*files, identity, now_ms=world.now)
    assert [one.manifest.run for one in queue.runs()] == ["run-2", "run-3"]
    config = CoordinatorConfig(identity=HUB, state="state", listen="127.0.0.1:1", initial_model="own.safetensors")
    for files in (second, third):
        manifest = queue.begin_next(identity, now_ms=world.now)
        assert manifest is not None
        model = config.model_file(tmp_path, manifest.model.initial_file)
        assert model.read_bytes() == files[1].read_bytes() and model.parent.name == "initial"
        assert len(list(model.parent.iterdir())) == 1
        assert identity.manifest(now_ms=world.now) == manifest
    assert not queue
    assert config.model_file(tmp_path, "00" * 32) == tmp_path / "own.safetensors"


def test_a_run_that_could_not_begin_is_not_queued(world: World, tmp_path: Path) -> None:
    queue, identity = RunQueue(tmp_path / "state"), world.identity(HUB)
    manifest, model = published(world, "run-2")
    changed = bytearray(model.read_bytes())
    changed[-1] ^= 1
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(changed)
    with pytest.raises(VerificationFailed):
        queue.add(manifest, wrong, identity, now_ms=world.now)
    forged = tmp_path / "forged.json"
    forged.write_bytes(manifest.read_bytes().replace(b"run-2", b"run-9"))
    with pytest.raises(ManifestRejected):
        queue.add(forged, model, identity, now_ms=world.now)
    assert not queue
    queue.add(manifest, model, identity, now_ms=world.now)
    with pytest.raises(ConfigError, match="run-2 waits already"):
        queue.add(manifest, model, identity, now_ms=world.now)
    with pytest.raises(ToolkitError, match="no run run-7 waits"):
        queue.remove("run-7")
    queue.remove("run-2")
    assert not queue


def test_a_newer_manifest_replaces_the_one_that_waits_and_an_old_one_is_removed(world: World, tmp_path: Path) -> None:
    queue, identity = RunQueue(tmp_path / "state"), world.identity(HUB)
    queue.add(*published(world, "run-2"), identity, now_ms=world.now)
    queue.add(*published(world, "run-2"), identity, now_ms=world.now)
    assert [one.manifest.version for one in queue.runs()] == [3]
    published(world, "run-3")
    identity.install_manifest(world.published(), now_ms=world.now)  # by hand
    assert queue.begin_next(identity, now_ms=world.now) is None and not queue
    in_force = identity.manifest(now_ms=world.now)
    assert in_force is not None and (in_force.run, in_force.version) == ("run-3", 4)


def test_the_word_that_ends_a_run_ends_no_other(tmp_path: Path) -> None:
    word = StopFile(tmp_path)
    assert word.reason("run-1") is None
    word.set("run-1", "enough")
    assert word.reason("run-1") == "enough" and word.reason("run-2") is None
    (tmp_path / "stop.json").write_text("[]")
    assert word.reason("run-1") is None
