"""One run of a plan: what is finished is kept, the rest runs, and every finished cell brings the results up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazaret.errors import ConfigError
from lazaret.files import write_atomically
from lazaret.terminal import remark
from npr.lab.cell import check_cells
from npr.lab.choices import Choices, settle
from npr.lab.engines import Outcome, Reporter, reporter, run_inline, run_ray, run_workers
from npr.lab.plan import Cell, LabPlan
from npr.lab.predictors import PARTS
from npr.lab.request import train_config
from npr.lab.store import Json, ResultStore, read_results
from npr.lab.summary import no_predictions, percent, predictions_loader, summarise_cells
from npr.lab.tables import summary_table
from npr.tracking import TrackedRun, open_tracker
from security.clock import SystemClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where to run: `name` is "process" or "ray"."""

    name: str = "process"
    workers: int = 1
    threads: int = 1
    address: str | None = None


def run_plan(
    plan: LabPlan, out: Path, *, engine: Engine, reference: str, plots: bool, track: Sequence[str] = ()
) -> Json:
    """Runs what is not finished and returns the results as written.

    :param track: for which tools learning curves are written too, of each cell when it is finished.
    """
    tell = _tracking(track, out)
    store = ResultStore(out)
    store.load(plan)
    _require_same_training(plan, store)
    plan = _without_losers(plan, store)
    Choices(out).require_open(cell for cell in plan.cells if not store.finished(cell))
    if engine.address is None:  # else the data are where the cluster is
        check_cells(plan.settings, [cell for cell in plan.cells if not store.finished(cell)])
    with store.locked():
        store.load(plan)
        todo = [cell for cell in plan.cells if not store.finished(cell)]
        update = _updater(plan, store, reference)
        settle(plan.settings, plan.cells, store)
        update()
        with reporter(len(todo)) as progress:
            for cell, result, error in _outcomes(engine, plan, todo, store, progress):
                if result is None:
                    store.record_failure(cell, error)
                    progress.cell_failed(cell.key, error)
                else:
                    store.record(cell, result)
                    tell([result])
                    progress.cell_done(cell.key, headline(result))
                settle(plan.settings, plan.cells, store)
                update(intervals=False)
        update()
        tell(store.cells)  # with what the test images gave
    results = read_results(out)
    if plots:
        from npr.lab.plots import draw_all

        draw_all(results, out)
    return results


def _without_losers(plan: LabPlan, store: ResultStore) -> LabPlan:
    kept = Choices(store.out).without_losers(plan.cells, store)
    for cell in plan.cells:
        if cell not in kept:
            remark("npr-lab", f"left out: {cell.key}, since the validation side chose other values for this row")
    return plan.model_copy(update={"cells": kept})


def _require_same_training(plan: LabPlan, store: ResultStore) -> None:
    """A cell of an older version may have been trained under other defaults, which its row would not show."""
    for cell in plan.cells:
        found = store.result(cell)
        if found is not None and found["config_hash"] != train_config(plan.settings, cell).config_hash:
            raise ConfigError(
                f"{cell.key} already exists, trained or evaluated with other defaults",
                where=str(store.out / "results.json"),
                hint="choose another --out",
            )


def _outcomes(
    engine: Engine, plan: LabPlan, todo: Sequence[Cell], store: ResultStore, progress: Reporter
) -> Iterator[Outcome]:
    if engine.name == "ray":
        return run_ray(
            plan.settings,
            todo,
            store,
            progress,
            address=engine.address,
            workers=engine.workers,
            threads=engine.threads,
        )
    if engine.workers > 1:
        return run_workers(plan.settings, todo, store, progress, workers=engine.workers, threads=engine.threads)
    return run_inline(plan.settings, todo, store, progress)


def _updater(plan: LabPlan, store: ResultStore, reference: str) -> Callable[..., None]:
    """Writes results.json and table.md: after every cell, so that a killed run leaves a table of what it had.

    Intervals take longer than the figures: they are drawn at the start and at the end of a run.
    """

    def update(*, intervals: bool = True) -> None:
        load = predictions_loader(store.out) if intervals else no_predictions
        summary = summarise_cells(store.cells, load, reference, store.earlier_summary)
        store.earlier_summary = summary
        choices = [choice.model_dump(mode="json") for choice in Choices(store.out).all]
        store.write(plan, {"reference": reference, "choices": choices, "summary": summary})
        write_atomically(store.out / "table.md", summary_table(read_results(store.out)).encode())

    return update


def _tracking(track: Sequence[str], out: Path) -> Callable[[Sequence[Json]], None]:
    """Writes the curves of cells into folders of OUT, one for each tool."""
    trackers = [open_tracker(kind, out / kind, experiment=out.resolve().name) for kind in track]

    def tell(cells: Sequence[Json]) -> None:
        now = SystemClock().now_ms()
        for cell in cells:
            for tracker in trackers:
                tracker.write(tracked(cell, now))

    return tell


def tracked(cell: Json, now_ms: int) -> TrackedRun:
    """The curves of a cell; its last point has what its models do on the validation side, and on the test side."""
    points: list[tuple[int, dict[str, float]]] = []
    for entry in cell["rounds"]:
        figures = {name: entry[name] for name in ("loss", "seconds")}
        points.append((entry["round"], figures | _flat("validation", entry.get("validation", {}))))
    last = points[-1][1] if points else {}
    last |= _flat("validation", cell["validation"]) | _flat("test", cell.get("final", {}))
    about = {name: str(cell[name]) for name in ("method", "variant", "seed", "fold", "config_hash", "device")}
    options = {f"options/{name}": str(value) for name, value in cell["options"].items()}
    return TrackedRun(name=cell["slug"], points=points, settings=about | options, written_ms=now_ms)


def _flat(side: str, by_kind: Json) -> dict[str, float]:
    """`side/model/predictor/figure`; numbers alone, and only those that exist."""
    return {
        f"{side}/{_word(kind)}/{_word(name)}/{figure}": float(value)
        for kind, by_name in by_kind.items()
        for name, figures in by_name.items()
        for figure, value in figures.items()
        if isinstance(value, float)
    }


def _word(name: str) -> str:
    """`0.75 head + 0.25 prototypes` without the plus sign: MLflow reads no run that has a figure with one."""
    return name.replace(" + ", "_").replace(" ", "-")


def headline(result: Json) -> str:
    """What a trained cell does on its validation side, in a few words."""
    parts = [
        f"{kind} by {name} {percent(figures['pooled_recall'])}"
        for kind, by_name in result["validation"].items()
        for name, figures in by_name.items()
        if name in PARTS
    ]
    return f"pooled recall on the validation side: {', '.join(parts)}; {result['seconds']:.0f} s"
