"""Learning on the wire is the lab's learning, bit for bit, over restarts and absences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from npr.config import TrainConfig
from npr.data.dataset import FederatedDataset, SiteData
from npr.data.sources import open_dataset
from npr.federation import Federation
from npr.initial import build_initial, check_code, export, spec_of
from npr.lab.secure import SecureAggregator
from npr.methods import registry
from npr.model import ModelSpec
from npr.wire_layout import Recipe, WireModel, check_config_hash, ever_shared, groups_to_load, personal_tensors
from security.consortium.initial_model import InitialModel, pinned_model
from security.consortium.manifest import Manifest
from security.errors import ConfigError, DataError, VerificationFailed
from security.rng import CountedRandomness
from security.secagg.state import canonical, next_state
from site_agent.config import DataTable
from site_agent.contribution import encode
from site_agent.data import fingerprint, open_data
from site_agent.trainer import Trainer, recipe_of
from site_agent.vault import Vault
from tests.support.consortium_world import World

ROUNDS = 3
SOURCE = "generated:scale=0.005,sites=3"
RECIPE = Recipe(
    config=TrainConfig(method="fednpr-per", personal_after=1, batch_size=16, augmentation="none", learning_rate=0.002),
    seed=4,
    image_size=16,
)
SPEC = ModelSpec(architecture="test_efficientnet", num_classes=8, image_size=16, seed=4)


@pytest.fixture(scope="module", autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def dataset() -> FederatedDataset:
    return open_dataset(SOURCE, fold="fold", image_size=16)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Path]:
    world = World.make(tmp_path_factory.mktemp("consortium"))
    path = world.authority.folder / "initial.safetensors"
    export(path, SPEC, RECIPE, rounds=ROUNDS)
    world.write_plan(
        f'run = "run-1"\n[model]\ninitial = "{path.name}"\n[training]\nrounds = {ROUNDS}\nsteps = 60\n'
        "[aggregation]\nweight_cap = 256\n"
    )
    return world.publish(), path


def trainer(published: tuple[Manifest, Path], data: SiteData, folder: Path) -> Trainer:
    manifest, path = published
    initial, _ = pinned_model(path, manifest)
    vault = Vault(folder, site="graz", sealing_key=bytes(32), randomness=CountedRandomness(b"x"))
    return Trainer(manifest, initial, data, vault, data_key=bytes(32))


def test_rounds_on_the_wire_equal_the_labs_bit_for_bit(
    published: tuple[Manifest, Path], dataset: FederatedDataset, tmp_path: Path
) -> None:
    """Three sites, three rounds, the head personal after the first, and one site restarted after each round."""
    manifest, path = published
    layout = manifest.aggregation.layout
    lab = Federation(dataset=dataset, spec=SPEC, config=RECIPE.config, seed=RECIPE.seed)
    lab.aggregator = SecureAggregator(lab, rounds=ROUNDS, layout=layout)
    _, state = pinned_model(path, manifest)
    sites = {data.name: trainer(published, data, tmp_path / data.name) for data in dataset.sites}
    for number in range(1, ROUNDS + 1):
        lab.run_round()
        words = []
        for site in sites.values():
            result = site.train(number, state)
            site._vault.remember(number, result.memory)
            update, _ = encode(
                layout,
                result,
                round_number=number,
                state_hash=bytes(32),
                config_hash=bytes(32),
                weights="samples",
                share_metrics=True,
            )
            words.append(update.words)
        state = next_state(layout, state, np.sum(words, axis=0, dtype=layout.dtype), survivors=3).state
        assert np.array_equal(state, canonical(WireModel(layout, lab.model).state(lab.model))), f"round {number}"
        first = dataset.sites[0]
        sites[first.name] = trainer(published, first, tmp_path / first.name)
    for site, data in zip(lab.sites, dataset.sites, strict=True):
        mine = sites[data.name]
        mine.judge(ROUNDS, state)  # a restarted trainer recalls its memory
        assert torch.equal(mine.site.model.head.weight, site.model.head.weight)


def test_what_is_not_shared_in_a_round_is_exactly_zero(
    published: tuple[Manifest, Path], dataset: FederatedDataset, tmp_path: Path
) -> None:
    manifest, path = published
    site = trainer(published, dataset.sites[1], tmp_path)
    layout = manifest.aggregation.layout
    _, state = pinned_model(path, manifest)
    head = layout.slot("head.weight")
    assert np.any(site.train(1, state).update[head])
    second = site.train(2, state).update
    assert not np.any(second[head]) and np.any(second)


def test_a_site_that_was_away_takes_the_last_shared_head_once(published: tuple[Manifest, Path]) -> None:
    method = registry.build(RECIPE.config.changed(personal_after=2))
    assert "head" in groups_to_load(method, 1, 9)
    assert "head" in groups_to_load(method, 2, 3)
    assert "head" not in groups_to_load(method, 3, 4)
    assert "head" in groups_to_load(method, 0, 1)


def test_evaluation_keeps_the_best_and_survives_a_restart(
    published: tuple[Manifest, Path], dataset: FederatedDataset, tmp_path: Path
) -> None:
    manifest, path = published
    _, state = pinned_model(path, manifest)
    site = trainer(published, dataset.sites[0], tmp_path)
    site.train(1, state)
    figures = site.evaluate(1, state)
    assert figures["best"] and 0 <= figures["test"]["bacc"] <= 1
    site._vault.note_metrics(figures)
    again = trainer(published, dataset.sites[0], tmp_path)
    assert again._best == figures["validation"]["bacc"]
    kept = load_file(tmp_path / "models" / "best.safetensors")
    again.site.model.load_state_dict(kept)
    assert again._figures(again.site.model)["test"] == figures["test"]
    assert set(kept) == set(site.site.model.state_dict())


def test_the_initial_file_is_pinned_personal_parts_included(published: tuple[Manifest, Path], tmp_path: Path) -> None:
    manifest, path = published
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    other = tmp_path / "initial.safetensors"
    other.write_bytes(content)
    with pytest.raises(VerificationFailed, match="not the initial model"):
        pinned_model(other, manifest)


def test_settings_come_back_with_their_hash(published: tuple[Manifest, Path]) -> None:
    manifest, _ = published
    assert recipe_of(manifest) == RECIPE
    assert all(not isinstance(value, float) for value in manifest.training.settings.values())
    odd = Recipe.of("moon", {"method_options.mu": "0.5", "milestones": "3,5", "prior_floor": "0.000001"})
    assert odd.config.method_options == {"mu": 0.5} and odd.config.milestones == (3, 5)
    assert (
        odd.config.config_hash
        == TrainConfig(method="moon", method_options={"mu": 0.5}, milestones=(3, 5), prior_floor=1e-6).config_hash
    )
    with pytest.raises(ConfigError, match="do not have one of the listed hashes"):
        check_config_hash(odd, manifest.training.config_hashes)


def test_every_method_of_the_wire_survives_the_manifest() -> None:
    for name in registry.names():
        config = TrainConfig(method=name)
        method = registry.build(config)
        if not method.wire:
            with pytest.raises(ConfigError, match="more of its server than a mean"):
                ever_shared(method, 3)
            continue
        settings = Recipe(config=config).settings()
        assert Recipe.of(name, settings).config == config


def test_local_training_has_nothing_to_send(published: tuple[Manifest, Path]) -> None:
    method = registry.build(TrainConfig(method="fednpr-per"))
    model = method.build_model(SPEC)
    assert personal_tensors(method, model, 5) == ("head.weight", "head.bias")
    assert personal_tensors(registry.build(TrainConfig(method="fedavg")), model, 5) == ()


def test_a_package_with_other_code_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning code is not the one"):
        check_code("00" * 32)


def test_a_file_for_another_architecture_does_not_fit(published: tuple[Manifest, Path]) -> None:
    _, path = published
    initial = InitialModel.read(path)
    method = registry.build(RECIPE.config)
    with pytest.raises(ConfigError, match="no tensor"):
        build_initial(method, replace(spec_of("test_efficientnet", 8, RECIPE), num_classes=5), initial.tensors)


def test_data_is_found_by_name_and_named_under_a_key(dataset: FederatedDataset) -> None:
    table = DataTable(source=SOURCE, site=dataset.sites[1].name, fold="fold", validation=0)
    found, ours = open_data(table, site="graz", image_size=16, classes=8)
    assert ours.name == dataset.sites[1].name
    assert fingerprint(found, ours, bytes(32)) != fingerprint(found, ours, bytes([1] * 32))
    with pytest.raises(ConfigError, match="no site 'graz'"):
        open_data(table.model_copy(update={"site": None}), site="graz", image_size=16, classes=8)
    with pytest.raises(DataError, match="8 classes where the federation has 5"):
        open_data(table, site="graz", image_size=16, classes=5)
