"""Learning on the wire is the lab's learning, bit for bit, over restarts and absences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lazaret.errors import ConfigError, DataError, VerificationFailed
from npr.config import TrainConfig
from npr.data.dataset import FederatedDataset, SiteData
from npr.data.generated import ISIC_CLASSES
from npr.data.sources import open_dataset
from npr.federation import Federation
from npr.lab.secure import SecureAggregator
from npr.methods import registry
from npr.model import ModelSpec
from npr.recipe import Recipe, check_code, check_config_hash, recipe_of
from npr.seeds import secret_seed
from npr.wire_layout import WireModel, build_initial, ever_shared, export, groups_to_load, personal_tensors, spec_of
from security.identity.manifest import Manifest, decimal_text
from security.identity.pinned_files import InitialModel, pinned_model
from security.secagg.layout import Vector
from security.secagg.state import canonical, next_state
from site_agent.config import CoordinatorTable, DataTable, SiteConfig, SiteTable
from site_agent.contribution import LocalResult, encode
from site_agent.trainer.data import fingerprint, open_data
from site_agent.trainer.isolation import made
from site_agent.trainer.personal_state import PersonalState, SiteRecord
from site_agent.trainer.predictor import ModelPlace
from site_agent.trainer.training import Trainer, make_trainer
from tests.support.consortium_world import World
from tests.support.dicom_images import GREY, drawn, saved

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


Published = tuple[Manifest, Path]


def publish(folder: Path, recipe: Recipe) -> Published:
    world = World.make(folder)
    path = world.authority.folder / "initial.safetensors"
    export(path, SPEC, recipe, rounds=ROUNDS, classes=ISIC_CLASSES)
    world.write_plan(
        f'run = "run-1"\n[model]\ninitial = "{path.name}"\n[training]\nrounds = {ROUNDS}\nsteps = 60\n'
        "[aggregation]\nweight_cap = 256\n"
    )
    return world.publish(), path


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(tmp_path_factory.mktemp("consortium"), RECIPE)


def trainer(
    published: Published, data: SiteData, folder: Path, *, best: float | None = None, key: bytes = bytes(32)
) -> Trainer:
    manifest, path = published
    initial, _ = pinned_model(path, manifest)
    state = PersonalState(folder)
    made(state.memory, state.models)
    return Trainer(manifest, initial, data, state, data_key=key, best=best)


def test_grey_dicom_images_fit_a_federation_of_colour_images(published: Published, tmp_path: Path) -> None:
    """In training and in what reads the model afterwards; the hospital need not say how many channels there are."""
    manifest, path = published
    lines = ["image,label,patient"]
    for number in range(20):
        saved(drawn(GREY + number), tmp_path / f"{number}.dcm")
        lines.append(f"{number}.dcm,{ISIC_CLASSES[number % 2]},P-{number}")
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    config = SiteConfig(
        site=SiteTable(initial_model=str(path)),
        coordinator=CoordinatorTable(address="hub.example:7443"),
        data=DataTable(source=f"dicom:{tmp_path / 'table.csv'}"),
        path=tmp_path / "site.toml",
    )
    initial, start = pinned_model(path, manifest)
    made(config.state / "memory", config.state / "models")
    trains, _ = make_trainer(config, manifest, initial, PersonalState(config.state), site="graz", data_key=bytes(32))
    record = SiteRecord(site="graz", manifest=manifest, data_key=bytes(32), round=0, state=None)
    reads = ModelPlace(config=config, record=record, initial=initial, start=start).trainer
    assert trains.data.train.images.shape[1:] == reads.data.train.images.shape[1:] == (16, 16, 3)


def test_a_model_names_as_many_classes_as_it_has_outputs(tmp_path: Path) -> None:
    for names in (ISIC_CLASSES[:-1], (*ISIC_CLASSES, "other")):
        with pytest.raises(ConfigError, match=f"{len(names)} class names for 8 outputs"):
            export(tmp_path / "initial.safetensors", SPEC, RECIPE, rounds=ROUNDS, classes=names)


def test_a_site_refuses_a_method_without_a_form_for_several_labels(
    published: Published, dataset: FederatedDataset, tmp_path: Path
) -> None:
    """Though the consortium has signed for it; and data of one label under settings that say several."""
    manifest, path = published
    for method, what in (("fedlc", "method = 'fedlc': its margins"), ("fedavg", "the images have one label")):
        recipe = replace(RECIPE, config=TrainConfig(method=method, labels="many"))
        settings = {name: decimal_text(v) if isinstance(v, float) else v for name, v in recipe.settings().items()}
        told = {"method": method, "settings": settings, "config_hashes": (recipe.config.config_hash,)}
        signed = manifest.model_copy(update={"training": manifest.training.model_copy(update=told)})
        with pytest.raises(ConfigError, match=what):
            trainer((signed, path), dataset.sites[0], tmp_path)


def run_beside_the_lab(
    published: Published, recipe: Recipe, dataset: FederatedDataset, folder: Path
) -> tuple[Federation, dict[str, Trainer], Vector, list[LocalResult]]:
    """Three sites, three rounds, one site restarted after each round; the lab's models are the same after every one."""
    manifest, path = published
    layout = manifest.aggregation.layout
    lab = Federation(dataset=dataset, spec=SPEC, config=recipe.config, seed=recipe.seed)
    lab.aggregator = SecureAggregator(lab, rounds=ROUNDS, layout=layout)
    for member in lab.sites:
        member.seed = secret_seed(recipe.seed, bytes(32))
    _, state = pinned_model(path, manifest)
    sites = {data.name: trainer(published, data, folder / data.name) for data in dataset.sites}
    results: list[LocalResult] = []
    for number in range(1, ROUNDS + 1):
        lab.run_round()
        words, results = [], []
        for site in sites.values():
            results.append(result := site.train(number, state))
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
        sites[first.name] = trainer(published, first, folder / first.name)
    return lab, sites, state, results


def test_rounds_on_the_wire_equal_the_labs_bit_for_bit(
    published: Published, dataset: FederatedDataset, tmp_path: Path
) -> None:
    """The head is personal after the first round."""
    lab, sites, state, _ = run_beside_the_lab(published, RECIPE, dataset, tmp_path)
    for site, data in zip(lab.sites, dataset.sites, strict=True):
        mine = sites[data.name]
        mine.evaluate(ROUNDS, state)  # a restarted trainer recalls its memory
        assert torch.equal(mine.site.model.head.weight, site.model.head.weight)


@pytest.mark.parametrize(
    ("method", "options", "own"),
    [
        ("fedbabu", {}, {"personal.head.weight", "personal.head.bias"}),
        ("fedrep", {}, {"personal.head.weight", "personal.head.bias"}),
        ("fedrod", {}, {"personal.personal_head.weight", "personal.personal_head.bias"}),
        ("fednpr", {"finetune_epochs": 2}, {"prototypes"}),
    ],
)
def test_what_a_method_does_at_the_end_it_does_at_a_site_too(
    method: str, options: dict[str, int], own: set[str], dataset: FederatedDataset, tmp_path: Path
) -> None:
    """FedBABU trains its head then, FedRep fits it to the last body, FedNPR may be fine-tuned: the model that a
    hospital uses is the lab's."""
    config = RECIPE.config.changed(method=method, method_options=options, personal_after=0)
    recipe = replace(RECIPE, config=config)
    published = publish(tmp_path / "consortium", recipe)
    lab, sites, state, results = run_beside_the_lab(published, recipe, dataset, tmp_path)
    assert all({kind for kind, _, _ in result.artefacts} == own for result in results), "the log names what stays"
    standing = list(sites.values())[1]
    before = standing.site.model.head.weight.clone()
    if "head" not in standing.method.shares(ROUNDS):
        assert torch.equal(standing.model_after(ROUNDS - 1, state).head.weight, before), "not before the last round"
    lab.finish()
    for site, mine in zip(lab.sites, sites.values(), strict=True):
        for model in (mine.model_after(ROUNDS, state), mine.model_after(ROUNDS, state)):
            for name, tensor in site.model.state_dict().items():
                if not name.endswith("num_batches_tracked"):  # a count that nothing reads
                    assert torch.equal(model.state_dict()[name], tensor), f"{site.name} {name}"
    assert torch.equal(standing.site.model.head.weight, before), "the site's own memory was left alone"
    if method != "fedrod":
        assert not torch.equal(lab.sites[1].model.head.weight, before)


def test_nobody_without_the_data_key_can_repeat_a_round(
    published: Published, dataset: FederatedDataset, tmp_path: Path
) -> None:
    """The draws of training are secret to the site; with the public seed alone, a guess at its images could be checked
    against what was sent. With its key they are the same again, as after a crash."""
    _, state = pinned_model(published[1], published[0])
    first, again, other = (
        trainer(published, dataset.sites[1], tmp_path / name, key=key).train(1, state).update
        for name, key in (("first", b"k" * 32), ("again", b"k" * 32), ("other", b"o" * 32))
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    lab = Federation(dataset=dataset, spec=SPEC, config=RECIPE.config, seed=RECIPE.seed)
    assert all(member.seed != secret_seed(RECIPE.seed, b"k" * 32) for member in lab.sites)


def test_what_is_not_shared_in_a_round_is_exactly_zero(
    published: Published, dataset: FederatedDataset, tmp_path: Path
) -> None:
    manifest, path = published
    site = trainer(published, dataset.sites[1], tmp_path)
    layout = manifest.aggregation.layout
    _, state = pinned_model(path, manifest)
    head = layout.slot("head.weight")
    assert np.any(site.train(1, state).update[head])
    second = site.train(2, state).update
    assert not np.any(second[head]) and np.any(second)


def test_a_site_that_was_away_takes_the_last_shared_head_once(published: Published) -> None:
    method = registry.build(RECIPE.config.changed(personal_after=2))
    assert "head" in groups_to_load(method, 1, 9)
    assert "head" in groups_to_load(method, 2, 3)
    assert "head" not in groups_to_load(method, 3, 4)
    assert "head" in groups_to_load(method, 0, 1)


def test_evaluation_keeps_the_best_and_survives_a_restart(
    published: Published, dataset: FederatedDataset, tmp_path: Path
) -> None:
    manifest, path = published
    _, state = pinned_model(path, manifest)
    site = trainer(published, dataset.sites[0], tmp_path)
    site.train(1, state)
    figures = site.evaluate(1, state)
    assert figures["best"] and 0 <= figures["test"]["bacc"] <= 1
    best = figures["validation"]["bacc"]
    again = trainer(published, dataset.sites[0], tmp_path, best=best)
    assert "best" not in again.evaluate(1, state), "no better than the one it was told of"
    kept = load_file(tmp_path / "models" / "best.safetensors")
    again.site.model.load_state_dict(kept)
    assert again._judge(1, again.site.model)["test"] == figures["test"]
    assert set(kept) == set(site.site.model.state_dict())


def test_the_initial_file_is_pinned_personal_parts_included(published: Published, tmp_path: Path) -> None:
    manifest, path = published
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    other = tmp_path / "initial.safetensors"
    other.write_bytes(content)
    with pytest.raises(VerificationFailed, match="not the initial model"):
        pinned_model(other, manifest)


def test_settings_come_back_with_their_hash(published: Published) -> None:
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


def test_local_training_has_nothing_to_send(published: Published) -> None:
    method = registry.build(TrainConfig(method="fednpr-per"))
    model = method.build_model(SPEC)
    assert personal_tensors(method, model, 5) == ("head.weight", "head.bias")
    assert personal_tensors(registry.build(TrainConfig(method="fedavg")), model, 5) == ()


def test_a_package_with_other_code_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning code is not the one"):
        check_code("00" * 32)


def test_a_file_for_another_architecture_does_not_fit(published: Published) -> None:
    _, path = published
    initial = InitialModel.read(path)
    method = registry.build(RECIPE.config)
    with pytest.raises(ConfigError, match="no tensor"):
        build_initial(method, replace(spec_of("test_efficientnet", 8, RECIPE), num_classes=5), initial.tensors)


def test_data_is_found_by_name_and_named_under_a_key(dataset: FederatedDataset) -> None:
    table = DataTable(source=SOURCE, site=dataset.sites[1].name, fold="fold", validation=0)
    found, ours = open_data(table, site="graz", image_size=16, classes=ISIC_CLASSES)
    assert ours.name == dataset.sites[1].name
    assert fingerprint(found, ours, bytes(32)) != fingerprint(found, ours, bytes([1] * 32))
    with pytest.raises(ConfigError, match="no site 'graz'"):
        open_data(table.model_copy(update={"site": None}), site="graz", image_size=16, classes=ISIC_CLASSES)
    with pytest.raises(DataError, match="8 classes where the federation has 5"):
        open_data(table, site="graz", image_size=16, classes=ISIC_CLASSES[:5])
