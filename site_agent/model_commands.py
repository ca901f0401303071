"""`site-agent evaluate`, `predict`, `export` and `curves`, none of which opens a connection; and `site-agent worker`.

The first three continue in an isolated process before they load what reads images (`command_process.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lazaret.errors import ConfigError
from lazaret.process import block_signals
from lazaret.terminal import emit, log_to_stderr, progress, say, show_progress
from npr.tracking import TRACKERS, TrackedRun, open_tracker
from security.clock import SystemClock
from security.identity.token import forget_pin
from site_agent.command_process import Workplace, isolate
from site_agent.config import SiteConfig
from site_agent.options import json_option, with_config
from site_agent.status import overview
from site_agent.trainer.ranks import RankPlace
from site_agent.trainer_process import closed_words

Command = TypeVar("Command", bound=Callable[..., Any])


model_option = click.option(
    "--model",
    type=click.Choice(["best", "newest"]),
    help="The best by local validation, or that of the last round; by default the best, if rounds were validated.",
)


@click.command()
@model_option
@click.option("--alone", is_flag=True, help="Also train as many rounds on these images alone, to compare with.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page with plots.")
@with_config
@json_option
def evaluate(config_path: Path, model: Any, alone: bool, html: Path | None, as_json: bool) -> None:
    """Evaluate this site's model on its own held-out images. Nothing is sent."""
    config = SiteConfig.read(config_path)
    place = isolate(config, source=config.subgroup_table, target=html)
    from site_agent.trainer.evaluation import as_text, evaluate_site

    show_progress()
    if html is not None:
        from site_agent.trainer.predict import check_target

        check_target(html)
    figures = evaluate_site(config, place.record, model=model, alone=alone)
    if html is not None:
        from site_agent.trainer.evaluation_page import write_page

        write_page(figures, place.target or html, now_ms=SystemClock().now_ms())
        say(f"{html} is for this hospital only: its figures are exact")
    if as_json:
        emit(figures | {"isolation": place.isolation.to_json()})
    else:
        click.echo(as_text(figures))
        _say_isolation(place)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The CSV file.")
@model_option
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write DICOM structured reports into this new folder: extra [dicom]. `archive-send` sends them.",
)
@click.option("--batch", type=click.IntRange(1, 1024), default=32, show_default=True, help="Images at a time.")
@with_config
@json_option
def predict(
    config_path: Path, source: Path, output: Path, model: Any, store: Path | None, batch: int, as_json: bool
) -> None:
    """Predict a folder, a file, or the images that a CSV table lists. Nothing is sent.

    For a file that cannot be read, the table has the reason; all others are predicted, and the exit code is 1.
    """
    config = SiteConfig.read(config_path)
    place = isolate(config, source=source, target=output, store=store)
    from site_agent.trainer.evaluation import why_no_temperature
    from site_agent.trainer.predict import check_store, check_target
    from site_agent.trainer.predict import predict as run
    from site_agent.trainer.predictor import Predictor

    show_progress()
    check_target(output)
    if store is not None:
        check_store(config.data.source, store)
    predictor = Predictor.open(config, place.record, model)
    with progress("predicting") as tell:
        summary = run(predictor, source, place.target or output, tell=tell, batch=batch, store=place.store)
    for name, problem in (*summary.problems, *summary.unreported):
        say(f"{name}: {problem}")
    temperature = predictor.companion.temperature
    if as_json:
        trained = predictor.trained
        about = {"output": str(output), "model": trained.which, "model_sha256": trained.digest, "round": trained.round}
        result = summary.to_json() | about | {"temperature": temperature, "calibrated": temperature is not None}
        emit(result | {"isolation": place.isolation.to_json()})
    else:
        good = summary.files - len(summary.problems)
        say(predictor.trained.sentence)
        say(f"{good} of {summary.files} files predicted into {output}, {len(summary.problems)} with a problem")
        if store is not None:
            say(f"reports for the archive are in {store}: `site-agent archive-send {store}` sends them")
        if summary.ignored:
            say(f"{summary.ignored} other files were skipped")
        if temperature is None:
            say(f"not calibrated: {why_no_temperature(predictor.place.recipe.config.labels)}")
        _say_isolation(place)
    if summary.problems or summary.unreported:
        sys.exit(1)


format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["files", "monai-bundle"]),
    default="files",
    show_default=True,
    help="monai-bundle: in the folders of a MONAI bundle.",
)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@model_option
@click.option("--onnx/--no-onnx", default=True, show_default=True, help="Also write ONNX and check it: extra [export].")
@click.option("--with-prototypes", is_flag=True, help="Write the site's prototypes to the files too.")
@format_option
@with_config
@json_option
def export(
    config_path: Path,
    folder: Path,
    model: Any,
    onnx: bool,
    with_prototypes: bool,
    form: str,
    as_json: bool,
) -> None:
    """Write this site's model, its description and its model card into FOLDER, which must not exist yet."""
    settings, bundle = SiteConfig.read(config_path), form == "monai-bundle"
    if bundle and not onnx:
        raise ConfigError("a MONAI bundle has its network as ONNX", where="--no-onnx", hint="leave it out")
    place = isolate(settings, target=folder, log=True)
    from site_agent.trainer.export import check_target, open_for_export
    from site_agent.trainer.export import export as run
    from site_agent.trainer.model_card import HOSPITAL_ONLY

    show_progress()
    check_target(folder, onnx=onnx)
    predictor = open_for_export(settings, place.record, model, with_prototypes=with_prototypes)
    written = run(predictor, place.target or folder, onnx=onnx, bundle=bundle) | {"folder": str(folder)}
    if as_json:
        emit(written | {"isolation": place.isolation.to_json()})
        return
    say(predictor.trained.sentence)
    for name, digest in written["files"].items():
        click.echo(f"{digest}  {folder / name}")
    if onnx:
        found = written["checked"]["onnx"]
        say(f"ONNX Runtime and torch agree within {found['absolute_difference']:.1e} on {found['images']} images")
    if predictor.place.head_alone:
        say("the files predict with the head alone: prototypes stay at the site unless --with-prototypes is given")
    if written["log_findings"]:
        say(f"the privacy log has {len(written['log_findings'])} findings, which the card lists")
    if HOSPITAL_ONLY in written["files"]:
        say(f"{HOSPITAL_ONLY} holds exact figures, which epsilon does not cover: it stays at the hospital")
    say("the files hold layers fitted to this hospital's patients: treat them as such")
    _say_isolation(place)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--track", type=click.Choice(TRACKERS), required=True, help="The tool that is to read the files.")
@with_config
def curves(config_path: Path, folder: Path, track: str) -> None:
    """Write this site's figures after each round into FOLDER, for TensorBoard or MLflow. Nothing is sent."""
    clock = SystemClock()
    shown = overview(SiteConfig.read(config_path), clock)
    points: dict[int, dict[str, float]] = {}
    for row in shown["metrics"]:  # the newest row of a round counts
        sides = {side: row.get(side) or {} for side in ("validation", "test")}
        points[row["round"]] = {
            f"{side}/{name}": figures[name]
            for side, figures in sides.items()
            for name in ("bacc", "bauc", "loss")
            if figures.get(name) is not None
        }
    if not points:
        raise ConfigError("no round was evaluated yet", where=str(config_path), hint="has the agent run?")
    run = TrackedRun(name=shown["run"], points=sorted(points.items()), written_ms=clock.now_ms())
    open_tracker(track, folder, experiment=f"{shown['federation']} at {shown['site']}").write(run)
    say(f"{len(points)} rounds written to {folder}; these figures are exact, and for this hospital only")


def _say_isolation(place: Workplace) -> None:
    """One line on what could reach what. Where something could, a warning has said it already."""
    if place.isolation.complete:
        say(place.isolation.sentence)


# `worker`: one of several processes or machines that train together. It has no keys, and sends nothing to the
# coordinator.


@click.command()
@with_config
def worker(config_path: Path) -> None:
    """Train with the agent on another machine of this hospital (docs/site-agent.md, several processes)."""
    config, place = SiteConfig.read(config_path), RankPlace.read()
    if place is None or place.rank == 0:
        raise ConfigError(
            "a worker cannot be the first process: that is the agent",
            where="RANK",
            hint="start through torchrun with --node-rank 1 or higher, and `site-agent` itself on the first machine",
        )
    log_to_stderr("site-agent", None, json_lines=config.logging.json_lines)
    help_agent(config, place)


def help_agent(config: SiteConfig, place: RankPlace) -> None:
    """Work for the agent until it is gone, in a program that can still be isolated: this one has threads."""
    del place  # read again there
    words = [sys.executable, "-P", "-m", "site_agent.trainer", "--config", str(config.path), "--worker"]
    words += closed_words(config)
    forget_pin()
    block_signals()  # until that program takes them
    os.execv(sys.executable, words)
