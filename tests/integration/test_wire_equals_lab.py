"""Five rounds by the shipped commands in processes of their own, and the same rounds in the lab: the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npr.data.generated import ISIC_CLASSES
from npr.data.sources import open_dataset
from npr.federation import Federation
from npr.lab.cli import model as model_command
from npr.lab.secure import SecureAggregator
from npr.recipe import recipe_of
from npr.seeds import secret_seed
from npr.wire_layout import WireModel, spec_of
from scripts.local_federation.federation import FederationFolders, Party, command, stop_all
from scripts.local_federation.sums import Published, manifest_at, read_published
from security.identity.keystore import load_secret
from security.identity.membership import movement_rule
from security.secagg.fixed_point import step_size
from security.secagg.layout import Layout
from security.secagg.state import canonical, state_hash

ROUNDS = 5
SIZE = 32
SOURCE = "generated:scale=0.004,sites=3"
PLAN = f"""
run = "equal"
[model]
initial = "initial.safetensors"
[training]
rounds = {ROUNDS}
steps = 8
[aggregation]
report_metrics = false
[timing]
train = 60
message = 10
upload = 20
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lay_out(
    folder: Path,
    *,
    rounds: int = ROUNDS,
    method: tuple[str, ...] = ("--method", "fednpr-per", "--set", "personal_after=2"),
    plan: str = PLAN,
    policy: str = "",
) -> FederationFolders:
    folder.mkdir()
    initial = folder / "initial.safetensors"
    command(
        model_command, "--architecture", "test_efficientnet", "--weights", "none", "--image-size", SIZE,
        "--classes", ",".join(ISIC_CLASSES), *method, "--rounds", rounds, "--set", "batch_size=16",
        "--seed", 3, "-o", initial,
    )  # fmt: skip
    names = [site.name for site in open_dataset(SOURCE, fold="fold", image_size=8).sites]
    ids = {name.replace("_", "-"): name for name in names}
    folders = FederationFolders(
        folder=folder,
        plan=plan,
        sources=dict.fromkeys(ids, SOURCE),
        data_names=ids,
        initial=initial,
        coordinator_settings={"grace": 30.0},
        site_settings={
            "site": "threads = 1\nready_slot = 0.2",
            "coordinator": "least_wait = 0.2\nmost_wait = 1",
            "data": 'site = "{data}"\nfold = "fold"',
            "policy": policy,
        },
    )
    folders.prepare()
    return folders


def over_the_wire(folders: FederationFolders, rounds: int = ROUNDS) -> list[Published]:
    """By the commands as they are shipped."""
    output = folders.folder / "output"
    config = folders.coordinator / "coordinator.toml"
    coordinator = Party("coordinator", ["coordinator", "--config", config], output / "coordinator", folders.coordinator)
    sites = [
        Party(name, ["site_agent", "--config", folders.site(name) / "site.toml"], output / name, folders.site(name))
        for name in folders.sources
    ]
    coordinator.start()
    for site in sites:
        site.start()
    try:
        coordinator.wait_for(f"the sum of round {rounds} is checked", seconds=240)
    finally:
        codes = stop_all(sites, coordinator)
    assert codes == [0] * len(codes)
    return read_published(folders.coordinator)


def in_the_lab(folders: FederationFolders, layout: Layout | None, rounds: int = ROUNDS) -> list[np.ndarray]:
    """The shared state after each round; `layout` None is plain FedAvg."""
    manifest = manifest_at(folders.coordinator / "identity")
    recipe = recipe_of(manifest)
    dataset = open_dataset(SOURCE, fold="fold", image_size=SIZE, validation=0.1)
    spec = spec_of(manifest.model.architecture, len(manifest.model.classes), recipe)
    federation = Federation(dataset=dataset, spec=spec, config=recipe.config, seed=recipe.seed)
    for site in federation.sites:
        name = next(known for known, data in folders.data_names.items() if data == site.name)
        site.seed = secret_seed(recipe.seed, load_secret(folders.site(name) / "identity" / "keys" / "data.key"))
    if layout is not None:
        rule = movement_rule(manifest.aggregation)
        federation.aggregator = SecureAggregator(federation, rounds=rounds, layout=layout, movement=rule)
    wire = WireModel(manifest.aggregation.layout, federation.model)
    states = []
    for _ in range(rounds):
        federation.run_round()
        states.append(canonical(wire.state(federation.model)))
    return states


def test_the_model_over_the_wire_is_the_labs_bit_for_bit(tmp_path: Path) -> None:
    folders = lay_out(tmp_path / "federation")
    results = over_the_wire(folders)
    assert [result.round for result in results] == [1, 2, 3, 4, 5]
    assert all(len(result.survivors) == 3 and result.checked for result in results)
    layout = manifest_at(folders.coordinator / "identity").aggregation.layout
    secure = in_the_lab(folders, layout)
    assert [state_hash(state).hex() for state in secure] == [result.after.hex() for result in results]
    _check_bound(layout, secure[0], in_the_lab(folders, None)[0], results[0])


def _check_bound(layout: Layout, secure: np.ndarray, plain: np.ndarray, result: Published) -> None:
    """One round from one model: half a step of fixed point for each site, and float32's own rounding."""
    assert result.total is not None
    weight = int(result.total[layout.slot("weight")][0])
    assert not np.array_equal(secure, plain)
    for run in layout.runs:
        rounding = len(result.survivors) * 0.5 * step_size(layout, run, weight)
        gap = np.abs(secure[run.place].astype(np.float64) - plain[run.place])
        assert (gap <= rounding + 2 * np.spacing(np.abs(plain[run.place]))).all()
