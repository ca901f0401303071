"""The agent and a worker process train as one; a silent, dead or different worker fails the round and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, cast

import numpy as np
import pytest
import torch

from lazaret.errors import ConfigError, PolicyViolation, WorkerLost
from npr.data.dataset import FederatedDataset, SiteData
from npr.data.generated import ISIC_CLASSES
from npr.data.sources import open_dataset
from npr.device import PROCESSOR
from npr.methods.base import Method
from npr.methods.site import Site
from npr.training import LocalReport
from npr.wire_layout import export
from scripts.local_federation.federation import free_port
from security.identity.manifest import Manifest
from security.identity.pinned_files import pinned_model
from site_agent.config import SiteConfig
from site_agent.trainer.isolation import made
from site_agent.trainer.personal_state import PersonalState
from site_agent.trainer.ranks import RankPlace
from site_agent.trainer.training import Trainer
from site_agent.trainer.workers import WorkerGroup, _build, terms_of
from tests.support.consortium_world import World
from tests.unit.site_agent.trainer.test_training import RECIPE, SPEC

SOURCE = "generated:scale=0.003,sites=3"
SITE_TOML = f"""
[site]
initial_model = "initial.safetensors"
threads = 1
[coordinator]
address = "localhost:1"
[data]
source = "{SOURCE}"
fold = "fold"
validation = 0
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dataset() -> FederatedDataset:
    return open_dataset(SOURCE, fold="fold", image_size=16, validation=0.0)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Path]:
    world = World.make(tmp_path_factory.mktemp("consortium"))
    path = world.authority.folder / "initial.safetensors"
    export(path, SPEC, RECIPE, rounds=3, classes=ISIC_CLASSES)
    world.write_plan(
        f'run = "run-1"\n[model]\ninitial = "{path.name}"\n[training]\nrounds = 3\nsteps = 60\n'
        "[aggregation]\nweight_cap = 256\n"
    )
    return world.publish(), path


def worker(place: RankPlace, folder: Path) -> subprocess.Popen[str]:
    (folder / "site.toml").write_text(SITE_TOML)
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": place.host, "MASTER_PORT": str(place.port)}
    command = [sys.executable, "-m", "site_agent", "--config", str(folder / "site.toml"), "worker"]
    return subprocess.Popen(command, env={**os.environ, **told}, stderr=subprocess.PIPE, text=True)


class Interrupted:
    """A group's round in which something happens to the worker after everybody has agreed to begin."""

    def __init__(self, group: WorkerGroup, happen: object) -> None:
        self.group, self.happen = group, happen

    def __call__(self, method: Method, site: Site, number: int) -> LocalReport:
        original = method.local_round

        def local_round(site: Site, number: int) -> LocalReport:
            self.happen()  # type: ignore[operator]
            return original(site, number)

        method.local_round = local_round  # type: ignore[method-assign]
        try:
            return self.group.local_round(method, site, number)
        finally:
            del method.local_round  # type: ignore[method-assign]


def test_a_worker_takes_part_falls_silent_differs_dies_and_comes_back(
    published: tuple[Manifest, Path], dataset: FederatedDataset, tmp_path: Path
) -> None:
    manifest, path = published
    data = dataset.sites[0]
    place = RankPlace(rank=0, size=2, host="127.0.0.1", port=free_port())
    group = WorkerGroup(place, terms_of(manifest, dataset, data), seconds=60)
    helper = worker(place, tmp_path)
    try:
        alone, together = (_trainer(manifest, path, data, tmp_path / name) for name in ("alone", "together"))
        together._work = group.local_round
        _, state = pinned_model(path, manifest)
        first, shared = alone.train(1, state), together.train(1, state)
        _same(first.update, shared.update)
        assert (shared.steps, shared.samples) == (first.steps, first.samples)
        assert alone.site.prototypes is not None and together.site.prototypes is not None
        torch.testing.assert_close(together.site.prototypes.vectors, alone.site.prototypes.vectors, atol=1e-4, rtol=0)

        group._seconds = 3
        together._work = Interrupted(group, lambda: helper.send_signal(signal.SIGSTOP))
        before = {name: tensor.clone() for name, tensor in together.site.memory().items()}
        with pytest.raises(WorkerLost, match="another process of this training does not answer"):
            together.train(2, state)
        after = together.site.memory()
        # The model itself begins a round with the chain's state; prototypes and optimiser are the site's own.
        own = [name for name in before if not name.startswith("model/")]
        assert own and before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in own)

        group._seconds = 60
        helper.send_signal(signal.SIGCONT)
        # It leaves the round of before first, at the latest when its own patience has ended.
        assert any("another process of this training does not answer" in line for line in cast(IO[str], helper.stderr))
        group._terms["data"] = "of another hospital"
        together._work = group.local_round
        with pytest.raises(WorkerLost, match="1 of 2 processes cannot take part"):
            together.train(2, state)

        group._terms = terms_of(manifest, dataset, data)
        together._work = Interrupted(group, helper.kill)
        with pytest.raises(WorkerLost, match="another process of this training does not answer"):
            together.train(2, state)
        _, told = helper.communicate(timeout=30)
        assert "these are not the agent's images" in told

        helper = worker(place, tmp_path)
        together._work = group.local_round
        _same(alone.train(2, state).update, together.train(2, state).update)
        group.dismiss()
        _, told = helper.communicate(timeout=30)
        assert helper.returncode == 0 and "no more work" in told
    finally:
        helper.kill()
        helper.wait()


def _trainer(manifest: Manifest, path: Path, data: SiteData, folder: Path) -> Trainer:
    state = PersonalState(folder)
    made(state.memory, state.models)
    return Trainer(manifest, pinned_model(path, manifest)[0], data, state, data_key=bytes(32))


def _same(one: np.ndarray, two: np.ndarray) -> None:
    """Within what Adam makes of the last bits of a sum, see tests/unit/npr/test_distributed.py."""
    assert np.linalg.norm(one - two) < 5e-3 * np.linalg.norm(one)


def test_a_place_is_read_from_the_environment() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    assert RankPlace.read({}) is None and RankPlace.read({"WORLD_SIZE": "1", "RANK": "0"}) is None
    place = RankPlace.read(told | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert place == RankPlace(rank=1, size=2, host="::1", port=29500, torchrun=True) and place.loopback
    assert not RankPlace(rank=0, size=2, host="10.0.0.1", port=1).loopback
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        RankPlace.read({name: value for name, value in told.items() if name != "MASTER_PORT"})
    with pytest.raises(ConfigError, match="not below WORLD_SIZE"):
        RankPlace.read(told | {"RANK": "2"})


def test_privacy_is_refused_in_several_processes(dataset: FederatedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    private = cast(Manifest, SimpleNamespace(privacy="promised"))
    config = cast(SiteConfig, None)
    assert WorkerGroup.of(config, private, dataset, dataset.sites[0]) is None
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="differential privacy needs one process"):
        WorkerGroup.of(config, private, dataset, dataset.sites[0])


def test_a_worker_is_never_the_first_process(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from site_agent.cli import cli

    (tmp_path / "site.toml").write_text(SITE_TOML)
    done = CliRunner().invoke(cli, ["--config", str(tmp_path / "site.toml"), "worker"], env={"WORLD_SIZE": "1"})
    assert isinstance(done.exception, ConfigError) and "that is the agent" in str(done.exception)


def test_under_torchrun_every_process_but_the_first_works_for_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command everywhere: a higher rank never opens keys, state or log."""
    from click.testing import CliRunner

    from site_agent import cli, model_commands

    called: list[RankPlace] = []
    monkeypatch.setattr(model_commands, "help_agent", lambda config, place: called.append(place))
    (tmp_path / "site.toml").write_text(SITE_TOML)
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = CliRunner().invoke(cli.cli, ["--config", str(tmp_path / "site.toml")], env=told)
    assert done.exception is None and [place.rank for place in called] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["site.toml"]


def test_a_worker_asks_its_own_policy_about_a_plugin(
    published: tuple[Manifest, Path], dataset: FederatedDataset, tmp_path: Path
) -> None:
    (tmp_path / "site.toml").write_text(SITE_TOML)
    order = terms_of(published[0], dataset, dataset.sites[0]) | {"seed": 1}
    assert order["plugin"] is None
    order["plugin"] = {"name": "own_method.py", "sha256": "ab" * 32}
    with pytest.raises(PolicyViolation, match=f"{'ab' * 32}; approved here: none"):
        _build(SiteConfig.read(tmp_path / "site.toml"), order, PROCESSOR)
