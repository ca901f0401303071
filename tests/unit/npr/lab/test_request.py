"""From flags to a plan: presets hold what they say, and every mistake is found before anything runs."""

import pytest

from lazaret.errors import ConfigError
from npr.config import TrainConfig
from npr.lab.plan import Settings
from npr.lab.request import PRESETS, make_plan, preset, train_config
from npr.methods import registry


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_makes_a_plan(name):
    plan = make_plan(preset(name), data="generated")
    methods, seeds, folds = PRESETS[name].methods, PRESETS[name].seeds, PRESETS[name].folds
    assert len(plan.cells) == len(methods) * len(seeds) * len(folds)
    assert Settings.model_validate_json(plan.settings.model_dump_json()) == plan.settings


@pytest.mark.parametrize(
    ("name", "clusters", "weight", "size"), [("paper-isic", 4, 0.1, 224), ("paper-ich", 2, 0.05, 128)]
)
def test_the_papers_presets_are_the_papers_settings(name, clusters, weight, size):
    plan = make_plan(preset(name), data="generated")
    config = train_config(plan.settings, plan.cells[0])
    assert (config.clusters, config.lambda_npr, plan.settings.data.image_size) == (clusters, weight, size)
    assert (config.learning_rate, config.weight_decay, config.batch_size, config.local_epochs) == (1e-3, 5e-4, 64, 1)
    assert plan.settings.rounds == 80 and config.milestones == (60, 70) and config.optimizer == "adam"
    assert plan.settings.model.architecture == "efficientnet_b0" and plan.settings.model.weights == "timm"
    assert {cell.method for cell in plan.cells} == {
        entry.name for entry in registry.rows() if entry.alias_of is None and not entry.name.endswith("+npr")
    } - {"central", "frozen"}
    assert {cell.fold for cell in plan.cells} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("key", ["predict", "predict_mix"])
def test_prediction_is_not_a_setting_of_training(key):
    with pytest.raises(ConfigError, match=f"'{key}' is not a setting of training") as caught:
        make_plan(preset("quick"), train={key: "head"})
    assert "every predictor" in str(caught.value.hint)


@pytest.mark.parametrize("name", registry.names())
def test_what_a_method_was_registered_to_predict_with_stays_out_of_a_comparison(name):
    plan = make_plan(preset("quick"), methods=[name])
    assert registry.build(train_config(plan.settings, plan.cells[0])).prototype_share == 0.0


def test_twin_with_its_own_default_a_method_would_enter_with_another_predictor():
    """What a site predicts with: without the rule above FedNPR-Per alone would be compared by a mixture."""
    shares = {name: registry.build(TrainConfig(method=name)).prototype_share for name in ("fedper", "fednpr-per")}
    assert shares == {"fedper": 0.0, "fednpr-per": 0.5}


def test_a_methods_own_options_reach_it():
    plan = make_plan(preset("quick"), methods=["fedprox"], grids={"fedprox": {"mu": [0.1, 1.0]}})
    assert [train_config(plan.settings, cell).method_options for cell in plan.cells] == [{"mu": 0.1}, {"mu": 1.0}]


def test_an_option_of_another_method_is_refused():
    with pytest.raises(ConfigError, match="unknown setting 'mu'"):
        make_plan(preset("quick"), methods=["fedavg"], train={"mu": 0.1})


def test_flags_go_over_the_preset():
    plan = make_plan(preset("paper-isic"), data="generated", overrides={"rounds": 3}, train={"clusters": 8})
    assert plan.settings.rounds == 3 and plan.settings.train["clusters"] == 8
    assert plan.settings.train["lambda_npr"] == 0.1, "what was not given stays the preset's"
