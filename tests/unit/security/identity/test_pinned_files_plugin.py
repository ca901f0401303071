"""The file of a method of one's own: read whole or not at all, and pinned by manifests that keep their bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from lazaret.errors import ConfigError, ManifestRejected, PolicyViolation
from security.identity import rules
from security.identity.manifest import Manifest, PluginFile
from security.identity.pinned_files import MAX_PLUGIN_BYTES, pinned_plugin, plugin_digest, read_plugin
from tests.support.consortium_world import PLAN, PRIVACY, World


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "own_method.py"
    path.write_bytes(b"x" * MAX_PLUGIN_BYTES)
    pinned = PluginFile(name=path.name, sha256=plugin_digest(path.read_bytes()))
    assert pinned_plugin(tmp_path, pinned) == path.read_bytes()


def test_what_cannot_be_a_plugin_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "big.py").write_bytes(b"x" * (MAX_PLUGIN_BYTES + 1))
    os.mkfifo(tmp_path / "pipe.py")  # without a writer, reading would wait for ever
    (tmp_path / "folder.py").mkdir()
    for name in ("big.py", "pipe.py", "folder.py", "none.py"):
        with pytest.raises(ConfigError, match=name):
            read_plugin(tmp_path / name)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


def test_a_manifest_without_a_plugin_has_no_such_key(world: World) -> None:
    world.write_plan(PLAN)
    manifest = world.publish()
    assert manifest.training.plugin is None and b'"plugin"' not in manifest.to_bytes()
    value = manifest.to_dict()
    value["training"]["plugin"] = None
    with pytest.raises(ManifestRejected, match="left out"):
        Manifest.from_dict(value)


def test_the_consortium_pins_the_file_beside_its_plan(world: World) -> None:
    world.write_plan(world.write_plugin(PLAN, b"# one\n"))
    manifest = world.publish()
    assert manifest.training.plugin == PluginFile(name="own_method.py", sha256=plugin_digest(b"# one\n"))
    assert Manifest.from_dict(manifest.to_dict()) == manifest


def test_a_run_keeps_its_plugin(world: World) -> None:
    plan = world.write_plugin(PLAN, b"# one\n")
    world.write_plan(plan)
    world.publish()
    for changed in (PLAN, world.write_plugin(PLAN, b"# two\n")):
        world.write_plan(changed)
        with pytest.raises(ManifestRejected, match="changes the model, the method"):
            world.publish()


def test_the_initial_model_was_exported_with_the_same_file(world: World) -> None:
    path = world.authority.folder / "initial.safetensors"
    tensors = load_file(path)
    plan = world.write_plugin(PLAN, b"# one\n")
    for exported in ({"plugin": plugin_digest(b"# two\n")}, {"method": "fednpr-per"}):
        save_file(tensors, path, metadata=exported)
        world.write_plan(plan)
        with pytest.raises(ConfigError, match=f"{plugin_digest(b'# one' + bytes([10]))}, the initial model"):
            world.publish()
    save_file(tensors, path, metadata={"plugin": plugin_digest(b"# one\n")})
    world.write_plan(PLAN)
    with pytest.raises(ConfigError, match="has SHA-256 none, the initial model"):
        world.publish()
    world.write_plan(plan)
    assert world.publish().training.plugin is not None


def test_a_name_that_is_a_path_or_a_missing_file_is_refused(world: World) -> None:
    world.write_plan(world.write_plugin(PLAN, name="own method.py"))
    with pytest.raises(ConfigError, match="other characters"):
        world.publish()
    world.write_plan(PLAN.replace("[training]\n", '[training]\nplugin = "none.py"\n'))
    with pytest.raises(ConfigError, match="cannot be read"):
        world.publish()
    for name in ("../evil.py", "/evil.py", ".evil.py"):
        with pytest.raises(ValueError):
            PluginFile(name=name, sha256="0" * 64)


def test_not_under_differential_privacy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.write_plan(world.write_plugin(PLAN + PRIVACY))
    with pytest.raises(PolicyViolation, match="no place under differential privacy"):
        world.publish()
    left = tuple(check for check in rules.CONSISTENCY if check != rules.check_plugin)
    monkeypatch.setattr(rules, "CONSISTENCY", left)
    assert world.publish().training.plugin is not None, "twin"
