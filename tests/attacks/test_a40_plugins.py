"""A40: a method of one's own is code that reads images. Somebody swaps a byte of its file, swaps the file between check
and load, or has it approved by one of the two who must agree: consortium and hospital.

What stops it are `pinned_plugin` and `SitePolicy.check_plugin`, asked by `load_plugin` of the bytes that then run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazaret.errors import ConfigError, PolicyViolation, ToolkitError
from npr import plugin as running
from npr.methods import registry
from security.identity import pinned_files
from security.identity.manifest import Manifest, PluginFile
from security.identity.pinned_files import read_plugin
from site_agent.config import SiteConfig
from site_agent.policy import SitePolicy
from site_agent.trainer import plugin
from site_agent.trainer.plugin import load_plugin
from tests.support.consortium_world import PLAN, World

METHOD = "own-mean"
HONEST = f"""
from npr.methods.base import Method
from npr.methods.registry import register

@register("{METHOD}", "honest")
class OwnMean(Method):
    pass
""".encode()
EVIL = HONEST.replace(b'"honest"', b'"Honest"')  # one byte
SITE_TOML = """
[site]
initial_model = "initial.safetensors"
[coordinator]
address = "localhost:1"
[data]
source = "generated"
[policy]
plugins = [{approved}]
"""


def sha256(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an attack registers is gone after it."""
    registry.names()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(running, "_loaded", {})


@pytest.fixture(scope="module")
def pinning(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A manifest that names the honest file."""
    world = World.make(tmp_path_factory.mktemp("pinning"))
    world.write_plan(world.write_plugin(PLAN.replace('"fednpr-per"', f'"{METHOD}"'), HONEST))
    return world.publish()


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A manifest with the method's name and no file."""
    world = World.make(tmp_path_factory.mktemp("silent"))
    world.write_plan(PLAN.replace('"fednpr-per"', f'"{METHOD}"'))
    return world.publish()


class Hospital:
    """Its folder, with a file in it and a line in its policy."""

    def __init__(self, folder: Path, *, file: bytes | None, approved: bytes | None) -> None:
        (folder / "plugins").mkdir()
        self.file = folder / "plugins" / "own_method.py"
        if file is not None:
            self.file.write_bytes(file)
        listed = "" if approved is None else f'"{sha256(approved)}"'
        (folder / "site.toml").write_text(SITE_TOML.format(approved=listed))
        self.config = SiteConfig.read(folder / "site.toml")

    def begin(self, manifest: Manifest) -> str:
        """What the trainer does before it opens an image; the summary of the method that would train."""
        load_plugin(self.config, manifest.training.method, manifest.training.plugin)
        return registry.get(METHOD).summary


def refused(hospital: Hospital, manifest: Manifest, *shown: str) -> None:
    """In one line, with both digests, and nothing has run."""
    with pytest.raises(ToolkitError) as caught:
        hospital.begin(manifest)
    assert isinstance(caught.value, ConfigError | PolicyViolation)
    assert all(word in str(caught.value) for word in shown) and "\n" not in str(caught.value)
    assert METHOD not in registry.names()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`pinned_plugin` without its comparison."""
    monkeypatch.setattr(plugin, "pinned_plugin", lambda folder, pinned: read_plugin(folder / pinned.name))
    return None


def test_the_approved_file_runs(pinning: Manifest, tmp_path: Path) -> None:
    assert pinning.training.plugin == PluginFile(name="own_method.py", sha256=sha256(HONEST))
    assert Hospital(tmp_path, file=HONEST, approved=HONEST).begin(pinning) == "honest"


# A byte of the file is swapped.


def test_a_swapped_byte_is_refused(pinning: Manifest, tmp_path: Path) -> None:
    refused(Hospital(tmp_path, file=EVIL, approved=HONEST), pinning, sha256(HONEST), sha256(EVIL))


def test_without_the_comparison_the_swapped_byte_runs_twin(
    pinning: Manifest, tmp_path: Path, unchecked: None
) -> None:
    assert Hospital(tmp_path, file=EVIL, approved=HONEST).begin(pinning) == "Honest"


def test_a_missing_file_is_refused(pinning: Manifest, tmp_path: Path) -> None:
    refused(Hospital(tmp_path, file=None, approved=HONEST), pinning, sha256(HONEST), "none")


# The file is swapped after it was hashed, and before it runs.


def swap_after_hashing(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = pinned_files.plugin_digest

    def digest(source: bytes) -> str:
        found = hashed(source)
        hospital.file.write_bytes(EVIL)
        return found

    monkeypatch.setattr(pinned_files, "plugin_digest", digest)


def test_what_was_hashed_is_what_runs(pinning: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hospital = Hospital(tmp_path, file=HONEST, approved=HONEST)
    swap_after_hashing(hospital, monkeypatch)
    assert hospital.begin(pinning) == "honest" and hospital.file.read_bytes() == EVIL


def test_a_loader_that_reads_the_file_again_runs_the_swapped_one_twin(
    pinning: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hospital = Hospital(tmp_path, file=HONEST, approved=HONEST)
    swap_after_hashing(hospital, monkeypatch)
    run = running.run_plugin
    monkeypatch.setattr(plugin, "run_plugin", lambda source, name: run(hospital.file.read_bytes(), name))
    assert hospital.begin(pinning) == "Honest"


# Only one of the two agrees.


def test_a_file_that_only_the_consortium_approves_is_refused(pinning: Manifest, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, file=HONEST, approved=EVIL)
    refused(hospital, pinning, sha256(HONEST), sha256(EVIL))
    with pytest.raises(PolicyViolation, match=sha256(HONEST)):
        hospital.config.policy.check_federation(pinning)  # the agent asks this first, at its start and of every order
    with pytest.raises(PolicyViolation, match="approved here: none"):
        SitePolicy().check_federation(pinning)


def test_without_the_hospitals_word_the_consortiums_code_runs_twin(
    pinning: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SitePolicy, "check_plugin", lambda *_: None)
    assert Hospital(tmp_path, file=HONEST, approved=EVIL).begin(pinning) == "honest"


def test_a_file_that_only_the_hospital_approves_is_refused(silent: Manifest, pinning: Manifest, tmp_path: Path) -> None:
    """The manifest names another file, or none."""
    assert silent.training.plugin is None and "plugin" not in silent.to_dict()["training"]
    hospital = Hospital(tmp_path, file=EVIL, approved=EVIL)
    refused(hospital, silent, "none", sha256(EVIL))
    refused(hospital, pinning, sha256(HONEST), sha256(EVIL))


def test_without_the_manifests_word_the_hospitals_code_runs_twin(
    pinning: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    """One hospital would train something else than the others, and nobody would see it."""
    monkeypatch.setattr(SitePolicy, "check_plugin", lambda *_: None)
    assert Hospital(tmp_path, file=EVIL, approved=EVIL).begin(pinning) == "Honest"
