"""What a hospital does with its model: `evaluate`, `predict` and `export`. None of them opens a connection.

Each goes on in an isolated process before it loads what reads images (`trainer/process.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lazaret.errors import ConfigError
from lazaret.terminal import emit, log_to_stderr, progress, say, show_progress
from site_agent.config import SiteConfig
from site_agent.options import also_config, json_option
from site_agent.trainer.process import Workplace, isolate
from site_agent.trainer.ranks import Place

Command = TypeVar("Command", bound=Callable[..., Any])


def model_option(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--model",
        type=click.Choice(["best", "newest"]),
        default=default,
        show_default=True,
        help="The best by local validation, or the one that the last round gave.",
    )


@click.command()
@model_option("newest")
@also_config
@json_option
@click.pass_obj
def evaluate(config_path: Path, own_config: Path | None, model: Any, as_json: bool) -> None:
    """Evaluate this site's model on its own held-out images. Nothing leaves."""
    config = SiteConfig.read(own_config or config_path)
    place = isolate(config)
    from site_agent.trainer.evaluation import as_text, evaluate_site

    show_progress()
    told = evaluate_site(config, model=model)
    if as_json:
        emit(told | {"isolation": place.isolation.to_json()})
    else:
        click.echo(as_text(told))
        _tell(place)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The CSV file.")
@model_option("best")
@click.option("--batch", type=click.IntRange(1, 1024), default=32, show_default=True, help="Images at a time.")
@also_config
@json_option
@click.pass_obj
def predict(
    config_path: Path, own_config: Path | None, source: Path, output: Path, model: Any, batch: int, as_json: bool
) -> None:
    """Predict a folder, a file, or the images that a CSV table lists. Nothing leaves.

    A file that cannot be read is named and has its problem in the table; the rest is predicted, and the exit code is 1.
    """
    config = SiteConfig.read(own_config or config_path)
    place = isolate(config, source=source, target=output)
    from site_agent.trainer.predict import check_target
    from site_agent.trainer.predict import predict as run
    from site_agent.trainer.predictor import Predictor

    show_progress()
    check_target(output)
    predictor = Predictor.open(config, model)
    with progress("predicting") as tell:
        summary = run(predictor, source, place.target or output, tell=tell, batch=batch)
    for name, problem in summary.problems:
        say(f"{name}: {problem}")
    temperature = predictor.companion.temperature
    if as_json:
        about = {"output": str(output), "model_sha256": predictor.trained.digest, "round": predictor.trained.round}
        told = summary.to_json() | about | {"temperature": temperature, "calibrated": temperature is not None}
        emit(told | {"isolation": place.isolation.to_json()})
    else:
        good = summary.files - len(summary.problems)
        say(f"{good} of {summary.files} files predicted into {output}, {len(summary.problems)} with a problem")
        if summary.ignored:
            say(f"{summary.ignored} other files were passed over")
        if temperature is None:
            say("probabilities are not calibrated: there are too few validation images to fit a temperature")
        _tell(place)
    if summary.problems:
        sys.exit(1)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@model_option("best")
@click.option("--onnx/--no-onnx", default=True, show_default=True, help="Also write ONNX and check it: extra [export].")
@click.option("--with-prototypes", is_flag=True, help="Put the site's prototypes into the files too.")
@also_config
@json_option
@click.pass_obj
def export(
    config_path: Path,
    own_config: Path | None,
    folder: Path,
    model: Any,
    onnx: bool,
    with_prototypes: bool,
    as_json: bool,
) -> None:
    """Write this site's model, its description and its model card into FOLDER, which must not exist yet."""
    settings = SiteConfig.read(own_config or config_path)
    place = isolate(settings, target=folder)
    from site_agent.trainer.export import check_target, open_for_export
    from site_agent.trainer.export import export as run

    show_progress()
    check_target(folder, onnx=onnx)
    predictor = open_for_export(settings, model, with_prototypes=with_prototypes)
    told = run(predictor, place.target or folder, onnx=onnx) | {"folder": str(folder)}
    if as_json:
        emit(told | {"isolation": place.isolation.to_json()})
        return
    for name, digest in told["files"].items():
        click.echo(f"{digest}  {folder / name}")
    if onnx:
        found = told["checked"]["onnx"]
        say(f"ONNX Runtime and torch agree within {found['relative_difference']:.1e} on {found['images']} images")
    if predictor.place.head_alone:
        say("the files predict by the head alone: prototypes stay at the site unless --with-prototypes is given")
    if told["log_findings"]:
        say(f"the privacy log has {len(told['log_findings'])} findings, which the card lists")
    say("the files hold layers fitted to this hospital's patients: treat them as such")
    _tell(place)


def _tell(place: Workplace) -> None:
    """One line on what could reach what. Where something could, a warning has said it already."""
    if place.isolation.complete:
        say(place.isolation.sentence)


# ----------------------------------------
# `site-agent worker`: one of several processes or machines that train together. It has no keys and sends nothing.

@click.command()
@also_config
@click.pass_obj
def worker(config_path: Path, own_config: Path | None) -> None:
    """Train with the agent on another machine of this hospital (docs/site-agent.md, several processes)."""
    config, place = SiteConfig.read(own_config or config_path), Place.read()
    if place is None or place.rank == 0:
        raise ConfigError(
            "a worker cannot be the first process: that is the agent",
            where="RANK",
            hint="start through torchrun with --node-rank 1 or higher, and `site-agent` itself on the first machine",
        )
    log_to_stderr("site-agent", None, json_lines=config.logging.json_lines)
    help_agent(config, place)


def help_agent(config: SiteConfig, place: Place) -> None:
    """Work for the agent until it is gone."""
    from site_agent.trainer.workers import work

    work(place, config.data, seconds=float(config.site.worker_wait), threads=config.site.threads)
