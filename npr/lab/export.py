"""`npr-lab model`: the initial model of a federation, as a file for `consortium publish` and for every member."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from lazaret.errors import ConfigError
from npr.lab.plan import parse_assignments


@click.command(short_help="Write the model that a federation starts from.")
@click.option("--architecture", default="efficientnet_b0", show_default=True, help="Any of timm, or monai:NAME.")
@click.option("--weights", default="none", show_default=True, help="none, timm, package or file:PATH#SHA256.")
@click.option("--classes", required=True, metavar="NAME,NAME,...", help="The classes, in the order of every site.")
@click.option("--method", default="fednpr-per", show_default=True, help="`npr-lab list` shows them.")
@click.option("--rounds", type=click.IntRange(1), default=80, show_default=True, help="Length of the run.")
@click.option("--set", "train", multiple=True, metavar="KEY=VALUE", help="A setting of training or of the method.")
@click.option("--dp", "private", multiple=True, metavar="KEY=VALUE", help="Private rounds: steps, rate and the like.")
@click.option("--image-size", type=click.IntRange(8), default=224, show_default=True)
@click.option("--channels", type=click.Choice(["1", "3"]), default="3", show_default=True)
@click.option("--drop-rate", type=click.FloatRange(0, 1), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="For the head and all training.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), default="initial.safetensors")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def model(as_json: bool, out: Path, **given: Any) -> None:
    """Write the model that a federation starts from, with the training settings in its metadata."""
    from npr.data.catalogue import check_class_list
    from npr.data.sources import read_class_list
    from npr.model import ModelSpec
    from npr.recipe import Recipe
    from npr.wire_layout import export

    classes = read_class_list(given["classes"])
    if len(classes) < 2:
        raise ConfigError(
            f"{given['classes']!r} is no list of classes", where="--classes", hint="names, such as melanoma,nevus,bcc"
        )
    recipe = Recipe(
        config=_config(given["method"], given["train"]),
        seed=given["seed"],
        image_size=given["image_size"],
        in_channels=int(given["channels"]),
        drop_rate=given["drop_rate"],
        privacy=_privacy(given["private"], given["method"], given["weights"]),
    )
    check_class_list(classes, where="--classes", many=recipe.config.labels == "many")
    spec = ModelSpec(
        architecture=given["architecture"],
        num_classes=len(classes),
        in_channels=recipe.in_channels,
        image_size=recipe.image_size,
        weights=given["weights"],
        drop_rate=recipe.drop_rate,
        seed=recipe.seed,
        norm=recipe.norm,
        trainable="all" if recipe.privacy is None else recipe.privacy.trainable,
        projection=0 if recipe.privacy is None else recipe.privacy.projection,
    )
    if recipe.privacy is not None:
        from npr.dp.model_rules import check_upstream

        check_upstream(recipe.config)
    written = export(out, spec, recipe, rounds=given["rounds"], classes=classes)
    if as_json:
        click.echo(json.dumps(asdict(written) | {"path": str(out.resolve())}, indent=1))
        return
    click.echo(f"{out}: {written.shared_values:,} values are sent, {len(written.personal)} tensors stay at the sites")
    click.echo(f"sha256       {written.sha256}\nconfig hash  {written.config_hash}")


PRETRAINED: Final = {"trainable": "head", "projection": 128, "rate": "1", "steps": 1, "views": 4, "counts_sigma": "10"}
"""Defaults for pretrained weights and a method without NPR: what won in benchmarks/results/dp."""


def _privacy(texts: tuple[str, ...], method: str, weights: str) -> Any:
    """What stands for BatchNorm follows from the weights, and whether prototypes are released from the method."""
    from npr.methods import registry
    from security.dp.planner import PREFIX, PrivateSettings

    if not texts:
        return None
    given, npr = parse_assignments(texts, where="--dp"), registry.get(method).npr
    settings: dict[str, Any] = {"norm": "group" if weights == "none" else "frozen"}
    if npr:
        settings["prototypes_sigma"] = str(PrivateSettings().prototypes_sigma)
    elif weights != "none" and given.get("trainable", "head") == "head":
        settings |= PRETRAINED
    settings |= given
    return PrivateSettings.of({PREFIX + name: value for name, value in settings.items()}, where="--dp")


def _config(method: str, texts: tuple[str, ...]) -> Any:
    from npr.lab import request
    from npr.lab.request import require_known
    from npr.methods import registry

    # The laboratory judges every method by the same predictors; a federation's sites predict with the one set here.
    known = {*request.SETTINGS, "predict", "predict_mix"}
    values = parse_assignments(texts, where="--set")
    own = registry.get(method).method.Options.model_fields
    for key in values:
        require_known("setting", key, {*known, *own}, where="--set")
    fields = {key: value for key, value in values.items() if key in known}
    options = {key: value for key, value in values.items() if key not in known}
    from npr.config import TrainConfig

    return TrainConfig.parse({**fields, "method": method, "method_options": options}, where="--set")
