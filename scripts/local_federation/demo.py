"""`scripts/demo`: a federation on this machine; three processes are killed (SIGKILL), and everything is checked."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from coordinator.status import overview
from lazaret.errors import ConfigError, ToolkitError
from lazaret.terminal import emit, run_command
from npr.data.sources import open_dataset
from npr.lab.cli import model as model_command
from scripts.local_federation import demo_report
from scripts.local_federation.federation import (
    ROOT,
    FederationFolders,
    Party,
    WaitFailed,
    command,
    stop_all,
    wait_until,
)

IMAGE_SIZE = 32
BATCH = 32
# Five of Fed-ISIC2019's hospitals with a twelfth of their images each: the skew of sites and classes is the real one.
DATA = "generated:scale=0.0834"
PATIENCE = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line asks for."""

    out: Path
    model: str
    rounds: int
    sites: int
    data: str


@dataclass(slots=True)
class ProgressPrinter:
    """Prints what happens, with the time since the start."""

    quiet: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def __call__(self, text: str) -> None:
        click.echo(f"[{self.seconds:5.0f} s] {text}", err=True)


def hospitals(options: DemoOptions) -> tuple[dict[str, str], tuple[str, ...], int]:
    """Site ids with the names of their data, the classes, and the most images that a site trains on."""
    fold = "fold" if options.data.startswith("generated") else 0
    dataset = open_dataset(options.data, fold=fold, image_size=8 if fold else IMAGE_SIZE)
    largest = sorted(dataset.sites, key=lambda site: -len(site.train))[: options.sites]
    if len(largest) < 4:
        raise ConfigError(
            f"{len(largest)} sites are too few for a demo in which some are killed", where="--sites", hint="4 or more"
        )
    names = {site.name.replace("_", "-").lower(): site.name for site in largest}
    return names, dataset.class_names, max(len(site.train) for site in largest)


def set_up(options: DemoOptions, tell: ProgressPrinter) -> FederationFolders:
    """Initial model, consortium, members, manifest, configurations."""
    names, classes, largest = hospitals(options)
    architecture, _, weights = options.model.partition(":")
    options.out.mkdir(parents=True, exist_ok=True)
    initial = options.out / "initial.safetensors"
    tell(f"initial model: {architecture}, {weights or 'random'} weights, {len(classes)} classes")
    command(
        model_command, "--architecture", architecture, "--weights", weights or "none", "--classes", ",".join(classes),
        "--method", "fednpr-per", "--rounds", options.rounds, "--image-size", IMAGE_SIZE,
        # Small sites start their own head from one that has seen every class.
        "--set", f"personal_after={max(1, options.rounds - 2)}", "--set", f"batch_size={BATCH}", "-o", initial,
    )  # fmt: skip
    fold = '"fold"' if options.data.startswith("generated") else "0"
    folders = FederationFolders(
        folder=options.out,
        plan=PLAN.format(rounds=options.rounds, steps=-(-largest // BATCH), cap=1 << largest.bit_length()),
        sources=dict.fromkeys(names, options.data),
        initial=initial,
        coordinator_settings={"grace": 6.0, "ping": 3.0, "audit": 5.0},
        site_settings={
            "site": "threads = 1\nready_slot = 2.0",
            "coordinator": "least_wait = 0.5\nmost_wait = 2",
            "data": f'site = "{{data}}"\nfold = {fold}',
        },
        data_names=names,
    )
    tell(f"consortium, coordinator and {len(names)} hospitals: keys, certificates, signed manifest")
    folders.prepare()
    return folders


PLAN = """
run = "demo"
[model]
initial = "initial.safetensors"
[training]
rounds = {rounds}
steps = {steps}
[aggregation]
weight_cap = {cap}
[timing]
train = 120
message = 10
upload = 30
"""


class DemoRun:
    """The run itself: all parties start, three are killed, and each is started again."""

    def __init__(self, folders: FederationFolders, rounds: int, tell: ProgressPrinter) -> None:
        self.folders = folders
        self.rounds = rounds
        self.tell = tell
        self.coordinator, self.sites = folders.parties()
        self.survived: list[str] = []
        self._shown = 0

    @property
    def parties(self) -> list[Party]:
        return [*self.sites.values(), self.coordinator]

    def play(self) -> None:
        """All rounds; one site is killed in training, one in its upload, then the coordinator in the aggregation."""
        names = list(self.sites)
        trainer, uploader = self.sites[names[1]], self.sites[names[2]]
        first, second, third = (min(number, self.rounds) for number in (2, 3, 4))
        for party in self.parties:
            party.start()
        self.tell(f"{len(self.sites)} hospitals and a coordinator are starting")
        self._until(lambda: trainer.says(f"round {first}: training"), f"training of round {first}")
        time.sleep(0.5)
        trainer.kill()
        self._revive(trainer, f"{trainer.name} was killed while it trained round {first}")
        self._until(lambda: self.coordinator.says(f"round {second}: training"), f"round {second}")
        uploader.kill_at("during-S3")
        self._until(lambda: uploader.code is not None, f"upload of round {second}")
        self._revive(uploader, f"{uploader.name} was killed during its upload in round {second}")
        self._until(lambda: self.coordinator.says(f"round {third}: training"), f"round {third}")
        self.coordinator.kill_at("after-C3")
        self._until(lambda: self.coordinator.code is not None, f"survivors of round {third}")
        self._revive(self.coordinator, f"the coordinator was killed during the aggregation of round {third}")
        self._until(self._over, "the last round")
        self.survived = [party.name for party in (trainer, uploader, self.coordinator) if party.code is None]

    def _revive(self, party: Party, what: str) -> None:
        self.tell(what)
        time.sleep(1.0)
        party.start()
        self.tell(f"{party.name} is started again, with its state folder only")

    def _until(self, true: Any, what: str) -> None:
        def look() -> bool:
            self._narrate()
            for party in self.parties:
                if party.code is not None and party.code != -9:
                    raise WaitFailed(f"{party.name} ended with {party.code}\n{party.text()[-2000:]}")
            return bool(true())

        wait_until(look, what, seconds=PATIENCE, output=self.coordinator.output)

    def _narrate(self) -> None:
        lines = self.coordinator.text().splitlines()
        for line in lines[self._shown :]:
            self.tell(f"coordinator: {line.partition(' ')[2]}")
        self._shown = len(lines)

    def _over(self) -> bool:
        """All rounds published, the last sum checked, and every site has looked at its last model."""
        with suppress(ConfigError):
            found = overview(self.folders.coordinator / "coordinator.toml")
            last = max((row["number"] for row in found["rounds"] if row["outcome"] == "published"), default=0)
            checked = self.coordinator.says(f"the sum of round {last} is checked")
            return found["completed"] >= self.rounds and checked and all(map(self._looked(last), self.sites))
        return False

    def _looked(self, last: int) -> Any:
        def looked(name: str) -> bool:
            path = self.folders.site(name) / "state" / "metrics.jsonl"
            return path.exists() and any(json.loads(line)["round"] == last for line in path.read_text().splitlines())

        return looked

    def end(self) -> None:
        stop_all(self.sites.values(), self.coordinator)


def run(options: DemoOptions, tell: ProgressPrinter) -> dict[str, Any]:
    """The whole demo; returns the summary."""
    folders = set_up(options, tell)
    demo = DemoRun(folders, options.rounds, tell)
    try:
        demo.play()
    finally:
        demo.end()
    tell(f"{options.rounds} rounds are done; now each hospital alone, with the same number of steps")
    alone = demo_report.train_alone(folders, options.rounds)
    tell("checking the sums, the logs and the figures")
    summary = demo_report.summary(folders, demo.survived, alone)
    return summary | {"seconds": round(tell.seconds, 1)}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Output folder. [runs/demo]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--model", default="tf_efficientnet_lite0:package", show_default=True, help="ARCHITECTURE[:WEIGHTS].")
@click.option("--rounds", type=click.IntRange(3, 80), default=5, show_default=True)
@click.option("--sites", type=click.IntRange(4, 50), default=5, show_default=True)
@click.option("--data", default=DATA, show_default=True, help="A data source; docs/data.md lists them.")
def main(out: Path | None, as_json: bool, **given: Any) -> None:
    """Hospitals on this machine train together over mTLS; three processes are killed; then everything is checked."""
    tell = ProgressPrinter()
    target = (out or _unused(ROOT / "runs")).resolve()
    if (target / "consortium").exists():
        raise ConfigError("there is already a federation", where=str(target), hint="choose another --out")
    try:
        summary = run(DemoOptions(out=target, **given), tell)
    except WaitFailed as error:
        raise ToolkitError(str(error), where=str(target / "output")) from error
    (target / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    emit(summary) if as_json else demo_report.show(summary, target)
    if not (summary["exact_sums"] and summary["kills_survived"] == 3):
        sys.exit(1)


def _unused(folder: Path) -> Path:
    names = ["demo", *(f"demo-{number}" for number in range(2, 1000))]
    return next(folder / name for name in names if not (folder / name / "consortium").exists())


if __name__ == "__main__":
    run_command(main, "demo")
