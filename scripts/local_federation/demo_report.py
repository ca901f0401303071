"""After the demo's run: every hospital alone, the sums against what went in, the logs, and a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from coordinator.status import overview
from lazaret.errors import DataError
from scripts.local_federation import sums
from scripts.local_federation.federation import ROOT, FederationFolders
from scripts.local_federation.sums import manifest_at
from security.audit.facts import LogHistory, read_history
from security.identity.pinned_files import pinned_model
from site_agent.config import SiteConfig
from site_agent.trainer.data import open_data

DUMPS = "plaintext-for-the-demo-only"


def train_alone(folders: FederationFolders, rounds: int) -> dict[str, dict[str, Any]]:
    """All sites without a federation, in as many processes as there are processors: each loads torch once."""
    names = list(folders.sources)
    paths = [folders.site(name) / "site.toml" for name in names]
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=get_context("spawn")) as workers:
        figures = workers.map(figures_alone, paths, names, [rounds] * len(names))
        return dict(zip(names, figures, strict=True))


def check_sums(folders: FederationFolders) -> tuple[bool, int]:
    """Open what the sites put aside, dump it, and compare; whether all sums are exact, and how many were checked."""
    manifest = sums.manifest_at(folders.coordinator / "identity")
    layout = manifest.aggregation.layout
    _, state = pinned_model(folders.initial, manifest)
    exact, checked, movements = True, 0, b""
    for result in sums.read_published(folders.coordinator):
        words = {site: sums.open_kept(folders.site(site), result.round, layout) for site in result.survivors}
        for site, vector in words.items():
            target = folders.folder / DUMPS / site / f"round-{result.round}.npy"
            target.parent.mkdir(parents=True, exist_ok=True)
            np.save(target, vector, allow_pickle=False)
        if result.total is None:  # it has left the spool; the model that the result names shows whether this is it
            result = replace(result, total=sums.sum_of(result.survivors, words, layout))
        exact &= sums.is_exact(result, words, layout)
        checked += result.checked
        after = sums.follows(result, state, manifest, movements)
        state, movements = (after, result.movements) if result.stands else (state, movements)
    return exact, checked


def summary(folders: FederationFolders, survived: list[str], alone: dict[str, Any]) -> dict[str, Any]:
    """The one object that `--json` prints and summary.json holds."""
    rounds = overview(folders.coordinator / "coordinator.toml")["rounds"]
    histories = {
        name: read_history(path, origin="", name=name, role="")
        for name, path in zip(["coordinator", *sorted(folders.sources)], folders.logs, strict=True)
    }
    written = begin_report(folders)
    exact, checked = check_sums(folders)
    return {
        "rounds_completed": sum(row["outcome"] == "published" for row in rounds),
        "rounds_aborted": sum(row["outcome"] not in ("published", None) for row in rounds),
        "sums_checked_by_sites": checked,
        "kills_survived": len(survived),
        "exact_sums": exact,
        "clip_refusals": sum(_clip_refusals(histories[name]) for name in folders.sources),
        "seconds": 0.0,
        "sites": [_site(folders, name, histories[name], alone[name]) for name in sorted(folders.sources)],
        "logs": [str(path) for path in folders.logs],
        "report": written(),
    }


def _clip_refusals(history: LogHistory) -> int:
    return sum(DataError.code in record.body["rule"] for record in history.of("round.declined"))


def _site(folders: FederationFolders, name: str, history: LogHistory, alone: dict[str, Any]) -> dict[str, Any]:
    lines = (folders.site(name) / "state" / "metrics.jsonl").read_text().splitlines()
    newest = json.loads(lines[-1])["test"]
    out: dict[str, int] = {}
    for record in history.of("egress"):
        out[record.body["message"]] = out.get(record.body["message"], 0) + record.body["bytes"]
    return {
        "id": name,
        "images": alone["images"],
        "federated": {key: newest[key] for key in ("bacc", "bauc")},
        "local_only": {key: alone[key] for key in ("bacc", "bauc")},
        "bytes_out": dict(sorted(out.items())),
    }


def begin_report(folders: FederationFolders) -> Callable[[], str | None]:
    """The auditor's report over all logs, in a process of its own while this one goes on.

    :returns: what waits for it and says where it is; None if it could not be made.
    """
    target = folders.folder / "report.html"
    words = ["report", *map(str, folders.logs), "--root-key", str(folders.consortium / "root.pem"), "-o", str(target)]
    code = "import sys; from security.audit.cli import main; main()"
    null = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT, stdout=null, stderr=null)

    def written() -> str | None:
        process.wait()
        return str(target.resolve()) if target.exists() else None

    return written


def show(summary: dict[str, Any], folder: Path) -> None:
    """For people: a table, the paths of all files, and the next commands to try."""
    table = Table(title="balanced accuracy and AUC on each hospital's own test images")
    for title in ("hospital", "images", "together", "alone", "AUC together", "AUC alone", "sent"):
        table.add_column(title, justify="left" if title == "hospital" else "right", no_wrap=title == "hospital")
    for site in summary["sites"]:
        fed, own = site["federated"], site["local_only"]
        figures = (fed["bacc"], own["bacc"], fed["bauc"], own["bauc"])
        sent = sum(site["bytes_out"].values()) / 1e6
        table.add_row(site["id"], str(site["images"]), *(f"{value:.3f}" for value in figures), f"{sent:.1f} MB")
    means = [
        sum(site[kind][key] for site in summary["sites"]) / len(summary["sites"])
        for key in ("bacc", "bauc") for kind in ("federated", "local_only")
    ]  # fmt: skip
    table.add_section()
    table.add_row("mean", "", *(f"{value:.3f}" for value in means), "")
    Console(highlight=False).print(table)
    verdict = "equal to the integer" if summary["exact_sums"] else "NOT EQUAL"
    lost, deaths, checked = summary["rounds_aborted"], summary["kills_survived"], summary["sums_checked_by_sites"]
    click.echo(f"{summary['rounds_completed']} rounds, {lost} lost, {deaths} processes killed (SIGKILL)")
    click.echo(f"published sums compared with the updates of the hospitals: {verdict}; {checked} checked by them")
    click.echo(f"\neverything is in   {folder}")
    click.echo(f"summary            {folder / 'summary.json'}")
    click.echo(f"privacy logs       {summary['logs'][0]} and sites/*/state/log")
    if summary["report"]:
        click.echo(f"auditor's report   {summary['report']}")
    click.echo("\nnext steps")
    click.echo(f"  privacy-audit verify {summary['logs'][0]} --root-key {folder / 'consortium' / 'root.pem'}")
    click.echo(f"  consortium show {folder / 'consortium' / 'manifest.json'} --dir {folder / 'consortium'}")
    click.echo(f"  coordinator status --config {folder / 'coordinator' / 'coordinator.toml'}")
    click.echo(f"delete {folder / DUMPS}: it contains updates without masks, which a real hospital never stores")


# The same hospital without a federation: same data, model, loss and number of steps, nothing exchanged.


def figures_alone(path: Path, name: str, rounds: int) -> dict[str, Any]:
    """Balanced accuracy and AUC on the test images of the site whose site.toml this is.

    Torch is imported here: who only names this function, to have it called in another process, needs none.
    """
    from npr.metrics import balanced_accuracy, balanced_auc
    from npr.recipe import recipe_of
    from site_agent.trainer.evaluation import train_alone

    config = SiteConfig.read(path)
    manifest = manifest_at(config.identity)
    initial, _ = pinned_model(config.model_file(manifest.model.initial_file), manifest)
    recipe = recipe_of(manifest)
    size, classes, labels = recipe.image_size, manifest.model.classes, recipe.config.labels
    _, data = open_data(config.data, site=name, image_size=size, classes=classes, labels=labels)
    scores = train_alone(manifest, initial, recipe, data, rounds=rounds)
    return {
        "bacc": float(balanced_accuracy(data.test.labels, scores)),
        "bauc": float(balanced_auc(data.test.labels, scores)),
        "images": len(data.train),
        "test_images": len(data.test),
    }
