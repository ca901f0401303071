"""The command `npr-lab`: compare federated methods on one machine, or on a Ray cluster."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any, Final, get_args

import click

from lazaret.errors import ConfigError
from lazaret.terminal import log_option, log_to_stderr, remark, run_command
from npr.config import DeviceSettings
from npr.lab.plan import Aggregation, LabPlan, parse_assignments, parse_folds, parse_grids, parse_integers
from npr.tracking import TRACKERS


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--plugin",
    "plugins",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Python file that registers methods of your own; may be repeated.",
)
@log_option
def cli(plugins: tuple[Path, ...], log_format: str | None) -> None:
    """The laboratory: methods x seeds x folds on one data set, with tables, plots and benchmarks."""
    log_to_stderr("npr-lab", log_format, json_lines=False)
    if plugins:
        from npr.lab.plugins import announce, load_plugins

        announce(plugins)
        load_plugins()


def _reports(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --json: one object on stdout; what is for people then stays away."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return command(*args, **kwargs)

    return wrapper


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def _registered() -> list[dict[str, Any]]:
    """The methods as the program knows them, those of plugins among them. Loads torch."""
    from npr.lab.request import method_rows

    return method_rows()


def _listed() -> list[dict[str, Any]]:
    """The same rows without plugins, from the source of the methods: a list should not take seconds to load torch."""
    folder = Path(__file__).parents[1] / "methods"
    modules = next(
        ast.literal_eval(node.value)
        for node in ast.parse((folder / "registry.py").read_bytes()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"
    )
    rows = []
    for module in modules:
        for node in ast.parse((folder / f"{module}.py").read_bytes()).body:
            for call in reversed(node.decorator_list) if isinstance(node, ast.ClassDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "register":
                    name, summary = (ast.literal_eval(word) for word in call.args)
                    more = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
                    row = {"name": name, "summary": summary, "npr": more.get("npr", False), "alias_of": None}
                    rows.append(row)
                    rows += [row | {"name": alias, "alias_of": name} for alias in more.get("aliases", ())]
    return rows


@cli.command("list")
@_reports
def list_methods(as_json: bool) -> None:
    """List the methods that can be run, with aliases as separate rows."""
    rows = _listed() if not click.get_current_context().find_root().params["plugins"] else _registered()
    if as_json:
        _print_json({"methods": rows})
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        note = f"alias of {row['alias_of']}" if row["alias_of"] else row["summary"]
        click.echo(f"{row['name']:<{width}}  {note}")


@cli.command(short_help="Run every cell that is not finished in --out.")
@click.option("--preset", "preset_name", default="quick", show_default=True, help="quick, paper-isic or paper-ich.")
@click.option("--data", help="generated, ham10000, npz:PATH, csv:PATH, folders:PATH, dicom:PATH or fed-isic:PATH.")
@click.option("--methods", help="Comma-separated; `npr-lab list` shows them.")
@click.option("--seeds", help="For example 0,1 or 0-4.")
@click.option("--folds", help="Numbers of cross-validation folds, or names of splits that came with the data.")
@click.option("--fold-count", type=int, help="Into how many folds the data is divided.")
@click.option("--rounds", type=int)
@click.option("--evaluate-every", type=int, help="Rounds between points of the learning curves (validation).")
@click.option("--image-size", type=int)
@click.option("--architecture", help="Any of timm, or monai:NAME.")
@click.option("--weights", help="none, timm, package or file:PATH#SHA256.")
@click.option("--set", "train", multiple=True, metavar="KEY=VALUE", help="A training setting for all methods.")
@click.option("--grid", "grids", multiple=True, metavar="[METHOD:]KEY=V1,V2", help="Values to try; one cell each.")
@click.option("--tune", "tuned", multiple=True, metavar="[METHOD:]KEY=V1,V2", help="Values that compete for one row.")
@click.option("--validation", type=float, help="Share of the training images that choices are made on; 0.2.")
@click.option("--aggregation", type=click.Choice(get_args(Aggregation)), default="plain", show_default=True)
@click.option("--dp", "dp", multiple=True, metavar="KEY=VALUE", help="Privacy at every site, e.g. epsilon=8.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Results directory.")
@click.option("--engine", type=click.Choice(["process", "ray"]), default="process", show_default=True)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Cells that run at a time.")
@click.option("--threads", type=click.IntRange(1), help="Threads of each cell.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N, mps or xpu.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Of the network; float32 on the processor and with --dp.",
)
@click.option("--deterministic", is_flag=True, help="The same bits each time on the same card.")
@click.option("--micro-batch", type=click.IntRange(1), help="Most images at once, where memory is short.")
@click.option("--checkpointing", is_flag=True, help="Compute activations twice instead of keeping them.")
@click.option("--compiled", is_flag=True, help="Compile the network first; gains on some cards only.")
@click.option("--ray-address", help="An existing cluster; without it a local one is started.")
@click.option("--reference", default="fedavg", show_default=True, help="METHOD[:MODEL[:PREDICTOR]] to compare with.")
@click.option("--plots/--no-plots", default=True, show_default=True)
@click.option("--track", multiple=True, type=click.Choice(TRACKERS), help="Curves as files of this tool, in --out.")
@click.option("--dry-run", is_flag=True, help="Check data and folds, show the cells and stop.")
@_reports
def run(as_json: bool, dry_run: bool, **given: Any) -> None:
    """Run every cell that is not finished in --out, then write results.json, table.md and plots there."""
    plan = _plan(given)
    _require_reference(given["reference"], {cell.variant for cell in plan.cells})
    for cell in plan.dropped:
        remark("npr-lab", f"left out: {cell.key} would repeat another cell")
    if dry_run:
        from npr.lab.cell import check_cells

        check_cells(plan.settings, plan.cells)
        _print_plan(plan, as_json)
        return
    from npr.lab.run import Engine, run_plan
    from npr.lab.tables import summary_table

    threads = given["threads"] or _threads(given["workers"])
    if given["workers"] == 1 and given["engine"] == "process":
        import torch

        torch.set_num_threads(threads)
    engine = Engine(name=given["engine"], workers=given["workers"], threads=threads, address=given["ray_address"])
    chosen = {name: given[name] for name in ("reference", "plots", "track")}
    results = run_plan(plan, given["out"], engine=engine, **chosen)
    if as_json:
        _print_json(results)
    else:
        click.echo(summary_table(results), nl=False)
        click.echo(f"\nwritten: {given['out'] / 'results.json'}", err=True)
    if results["failed"]:
        sys.exit(1)


def _threads(workers: int) -> int:
    """An equal share of the machine, or what OMP_NUM_THREADS says."""
    import os

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else max(1, (os.cpu_count() or 1) // workers)


def _plan(given: dict[str, Any]) -> LabPlan:
    """Everything that can be wrong with the request is found here, before anything is loaded or written."""
    from npr.lab.request import OVERRIDES, make_plan, preset

    return make_plan(
        preset(given["preset_name"]),
        data=given["data"],
        methods=[name.strip() for name in given["methods"].split(",")] if given["methods"] else None,
        seeds=parse_integers(given["seeds"]) if given["seeds"] else None,
        folds=parse_folds(given["folds"]) if given["folds"] else None,
        grids=parse_grids(given["grids"]),
        tuned=parse_grids(given["tuned"], where="--tune"),
        train=parse_assignments(given["train"], where="--set")
        | {f"dp.{key}": value for key, value in parse_assignments(given["dp"], where="--dp").items()},
        overrides={key: given[key] for key in OVERRIDES if given[key] is not None},
        aggregation=given["aggregation"],
        computing={key: given[key] for key in DeviceSettings.model_fields},
    )


def _require_reference(reference: str, variants: set[str]) -> None:
    """A method that has not run gives no differences; a name that nobody knows is a mistake."""
    from npr.lab.predictors import PARTS
    from npr.lab.request import require_known
    from npr.lab.summary import CHOSEN, KINDS
    from npr.methods import registry

    name, *rest = reference.split(":")
    require_known("method", name, {*variants, *registry.names()}, where="--reference")
    if rest:
        require_known("model", rest[0], {*KINDS, CHOSEN}, where="--reference")
    if rest[1:]:
        require_known("predictor", rest[1], PARTS, where="--reference")


def _print_plan(plan: LabPlan, as_json: bool) -> None:
    if as_json:
        _print_json({"settings": plan.settings.model_dump(mode="json"), "cells": [cell.key for cell in plan.cells]})
        return
    for cell in plan.cells:
        click.echo(cell.key)


@cli.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--paper", is_flag=True, help="Our figures next to the paper's tables A to E.")
@click.option("--dataset", type=click.Choice(["isic", "ich"]), default="isic", show_default=True)
@click.option("--reference", help="METHOD[:MODEL[:PREDICTOR]] to compare with; intervals need the run's predictions.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["markdown", "csv"]),
    default="markdown",
    show_default=True,
    help="csv: one row for each cell, model and predictor, as pandas reads it.",
)
@_reports
def table(results: Path, paper: bool, dataset: Any, reference: str | None, form: str, as_json: bool) -> None:
    """Print the table of a finished (or unfinished) run."""
    from npr.lab.store import read_results
    from npr.lab.summary import predictions_loader, summarise_cells
    from npr.lab.tables import cells_csv, paper_comparison, paper_rows, summary_table

    content = read_results(results)
    if form == "csv":
        click.echo(cells_csv(content), nl=False)
        return
    if reference:
        _require_reference(reference, {cell["variant"] for cell in content["cells"]})
        out = results if results.is_dir() else results.parent
        rows = summarise_cells(content["cells"], predictions_loader(out), reference)
        content = {**content, "reference": reference, "summary": rows}
    if as_json:
        beside = {"paper": paper_rows(content, dataset)} if paper else {}
        _print_json({"reference": content["reference"], "rows": content["summary"], **beside})
        return
    click.echo(paper_comparison(content, dataset) if paper else summary_table(content), nl=False)


@cli.command(short_help="Measure ratios that show whether code is fast.")
@click.option("--dp", "private", is_flag=True, help="Measure the differentially private step instead.")
@click.option("--check", is_flag=True, help="Exit with 1 when a ratio is above its limit.")
@_reports
def bench(private: bool, check: bool, as_json: bool) -> None:
    """Measure ratios that show whether the code is fast, each within one run."""
    from npr.lab.bench import learning_report, private_report

    report = private_report() if private else learning_report()
    if as_json:
        _print_json(report)
    else:
        for name, limit in report["limits"].items():
            verdict = "ok" if report[name] <= limit else "ABOVE"
            click.echo(f"{name:<34} {report[name]:.3g}  (limit {limit:g})  {verdict}")
    if check and any(report[name] > limit for name, limit in report["limits"].items()):
        sys.exit(1)


@cli.command(short_help="Attack our own private training.")
@click.option("--canaries", type=click.IntRange(100), default=1000, show_default=True)
@click.option("--epsilon", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True)
@click.option("--delta", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=1e-5, show_default=True)
@_reports
def audit(canaries: int, epsilon: float, delta: float, as_json: bool) -> None:
    """Attack our own private training: an empirical lower bound on epsilon, and a membership test.

    Exit code 1 is proof of a mistake: the attacks found more than the ledger's epsilon allows. 0 proves nothing.
    """
    from npr.dp.audit import audit_report

    report = audit_report(canaries=canaries, epsilon=epsilon, delta=delta)
    if as_json:
        _print_json(report)
    else:
        for name, part in report["attacks"].items():
            verdict = "consistent" if part["consistent"] else "MORE THAN CLAIMED"
            click.echo(f"{name:<31} found {part['found']:.3f}, allowed {part['allowed']:.3f}: {verdict}")
    if not report["consistent"]:
        sys.exit(1)


# The initial model of a federation, as a file for `consortium publish` and for every member.


@cli.command(short_help="Write the model that a federation starts from.")
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
    from npr.recipe import Recipe
    from npr.wire_layout import export, spec_of

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
    spec = replace(spec_of(given["architecture"], len(classes), recipe), weights=given["weights"])
    if recipe.privacy is not None:
        from npr.dp.engine import check_upstream

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
    from npr.config import TrainConfig
    from npr.lab.request import SETTINGS, require_known
    from npr.methods import registry

    # The laboratory judges every method by the same predictors; a federation's sites predict with the one set here.
    known = {*SETTINGS, "predict", "predict_mix"}
    values = parse_assignments(texts, where="--set")
    own = registry.get(method).method.Options.model_fields
    for key in values:
        require_known("setting", key, {*known, *own}, where="--set")
    fields = {key: value for key, value in values.items() if key in known}
    options = {key: value for key, value in values.items() if key not in known}
    return TrainConfig.parse({**fields, "method": method, "method_options": options}, where="--set")


def main() -> None:
    """Entry of the console script."""
    run_command(cli, "npr-lab", interrupted="stopped; run the same command again to continue")


if __name__ == "__main__":
    main()
