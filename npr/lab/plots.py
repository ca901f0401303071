"""Plots of a run: learning curves, bars per site, ablations, and maps of features with their prototypes.

matplotlib is an extra and is imported only here, with a backend that needs no display.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazaret.errors import ConfigError
from npr.config import TrainConfig
from npr.lab.plan import format_value
from npr.lab.summary import CHOSEN

Json = dict[str, Any]
Point = tuple[float, list[float]]
"""A value of the option, and the figure with its interval."""

# What an ablation plots along its axis, and what the axis is called.
ABLATIONS = {"clusters": "prototypes per class (K)", "lambda_npr": "weight of NPR (lambda)", "dp.epsilon": "epsilon"}

LINES = {"global": "solid", "personal": "dashed", "local": "dotted"}

# So many letters of a legend fit side by side under a plot.
LEGEND_WIDTH = 100


def draw_all(results: Json, out: Path) -> list[Path]:
    """Draws whatever the results have data for, as PNG files in OUT/plots, and says which."""
    plt = _pyplot()
    if not results["cells"]:
        return []
    folder = out / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    drawings: list[tuple[str, Callable[[Any], bool]]] = [
        ("curves", lambda axes: _curves(axes, results)),
        ("sites", lambda axes: _sites(axes, results)),
        *((f"ablation-{key}", _ablation(results, key)) for key in ABLATIONS),
    ]
    for name, draw in drawings:
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        if draw(axes):
            figure.savefig(folder / f"{name}.png", dpi=120)
            written.append(folder / f"{name}.png")
        plt.close(figure)
    written.extend(_maps(plt, results, out, folder))
    return written


def _curves(axes: Any, results: Json) -> bool:
    """Pooled recall on the validation side over rounds, for the models that the tables judge, by their heads."""
    drawn = False
    for variant, colour in _coloured(results):
        for kind, style in LINES.items():
            lines = [_curve(cell, kind) for cell in results["cells"] if cell["variant"] == variant]
            lines = [line for line in lines if len(line[0]) > 1]
            if not lines:
                continue
            for rounds, values in lines:
                axes.plot(rounds, values, color=colour, linestyle=style, alpha=0.3, linewidth=0.8)
            common = sorted(set.intersection(*(set(rounds) for rounds, _ in lines)))
            means = [np.mean([values[rounds.index(at)] for rounds, values in lines]) for at in common]
            axes.plot(common, means, color=colour, linestyle=style, marker=".", label=f"{variant} ({kind})")
            drawn = True
    axes.set(xlabel="round", ylabel="pooled recall on the validation side (%)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if drawn:
        _finish(axes)
    return drawn


def _coloured(results: Json) -> list[tuple[str, str]]:
    variants = dict.fromkeys(cell["variant"] for cell in results["cells"])
    return [(variant, f"C{number % 10}") for number, variant in enumerate(variants)]


def _curve(cell: Json, kind: str) -> tuple[list[int], list[float]]:
    points = [(entry["round"], entry.get("validation", {})) for entry in cell["rounds"]]
    points.append((cell["rounds"][-1]["round"], cell["validation"]))
    known = [(at, by_kind[kind]["head"]["pooled_recall"]) for at, by_kind in points if "head" in by_kind.get(kind, {})]
    return [at for at, _ in known], [100 * value for _, value in known]


def _sites(axes: Any, results: Json) -> bool:
    """Balanced accuracy at every site by the model and predictor that were chosen, one group of bars per site."""
    cells = [cell for cell in results["cells"] if "final" in cell]
    variants = list(dict.fromkeys(cell["variant"] for cell in cells))
    if not cells:
        return False
    sites = list(cells[0]["counts"]["test"])
    width = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        finals = [
            cell["final"][cell["chosen"]["model"]][cell["chosen"]["predictor"]]
            for cell in cells
            if cell["variant"] == variant
        ]
        heights, spread = np.transpose([_spread(final["sites"][site]["bacc"] for final in finals) for site in sites])
        places = np.arange(len(sites)) + number * width
        axes.bar(places, heights, width, yerr=spread, error_kw={"linewidth": 0.8}, label=f"{variant} (chosen)")
    axes.set_xticks(np.arange(len(sites)) + 0.4 - width / 2, sites)
    axes.set(ylabel="balanced accuracy (%)")
    _finish(axes)
    return True


def _spread(values: Iterable[float | None]) -> tuple[float, float]:
    """Mean and deviation over cells in percent. A site without test images has no figure; it is left out."""
    known = [100 * value for value in values if value is not None]
    return (float(np.mean(known)), float(np.std(known))) if known else (0.0, 0.0)


def _finish(axes: Any) -> None:
    """Lines to read values by, and the legend where it hides nothing."""
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    longest = max((len(label) for label in axes.get_legend_handles_labels()[1]), default=0)
    columns = max(1, min(3, LEGEND_WIDTH // max(1, longest)))
    axes.figure.legend(loc="outside lower center", ncols=columns, fontsize="small", frameon=False)


def ablation_lines(results: Json, key: str) -> list[tuple[list[Point], str]]:
    """Rows that differ in `key` alone, joined to lines of two points or more; what nobody set has its default."""
    default = results["settings"]["train"].get(key, getattr(TrainConfig(), key, None))
    found: dict[str, list[Point]] = {}
    for row in results["summary"]:
        others = ",".join(f"{name}={format_value(value)}" for name, value in row["options"].items() if name != key)
        value = row["options"].get(key, default)
        if value is not None:
            judged = CHOSEN if row["kind"] == CHOSEN else f"{row['kind']}, {row['predictor']}"
            label = f"{row['method']}[{others}] ({judged})" if others else f"{row['method']} ({judged})"
            found.setdefault(label, []).append((float(value), row["pooled_recall"]))
    return [(sorted(points), label) for label, points in found.items() if len(points) > 1]


def _ablation(results: Json, key: str) -> Callable[[Any], bool]:
    def draw(axes: Any) -> bool:
        """Pooled recall with its interval over the values of one option, one line for whatever else was the same."""
        lines = ablation_lines(results, key)
        axes.set(xscale="log", xlabel=ABLATIONS[key], ylabel="pooled balanced recall (%)")
        for number, (points, label) in enumerate(lines):
            # Side by side, so that no interval hides another.
            _points_with_intervals(axes, points, label, shift=1.03 ** (number - (len(lines) - 1) / 2))
        if lines:
            tried = sorted({at for points, _ in lines for at, _ in points})
            axes.set_xticks(tried, [f"{value:g}" for value in tried])
            axes.minorticks_off()
            _finish(axes)
        return bool(lines)

    return draw


def _points_with_intervals(axes: Any, points: Sequence[Point], label: str, *, shift: float) -> None:
    places, values = [at * shift for at, _ in points], [figures[0] for _, figures in points]
    spread = [[figures[0] - figures[1], figures[2] - figures[0]] for _, figures in points if len(figures) == 3]
    errors = np.transpose(spread) if len(spread) == len(points) else None
    axes.errorbar(places, values, yerr=errors, marker="o", capsize=3, label=label)


def _maps(plt: Any, results: Json, out: Path, folder: Path) -> list[Path]:
    """Features of a site's training images in the plane of their two main axes, with the site's prototypes on top."""
    written = []
    first = {cell["variant"]: cell for cell in reversed(results["cells"])}
    for cell in first.values():
        source = out / "cells" / cell["slug"] / "maps.npz"
        if not source.exists():
            continue
        with np.load(source, allow_pickle=False) as arrays:
            figure = _map_figure(plt, {name: arrays[name] for name in arrays.files}, cell["classes"], cell["key"])
        path = folder / f"features-{cell['slug']}.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        written.append(path)
    return written


def _map_figure(plt: Any, arrays: dict[str, Any], classes: Sequence[str], title: str) -> Any:
    sites = sorted({name.split("/")[0] for name in arrays})
    columns = math.ceil(math.sqrt(len(sites)))
    rows = -(-len(sites) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4 * columns, 4 * rows), squeeze=False, layout="constrained")
    for axes, site in zip(grid.flat, sites, strict=False):
        points, labels = arrays[f"{site}/points"], arrays[f"{site}/labels"]
        centres, owners = arrays[f"{site}/prototypes"], arrays[f"{site}/owners"]
        for number, name in enumerate(classes):
            colour = f"C{number % 10}"
            axes.scatter(*points[labels == number].T, s=10, color=colour, alpha=0.6, linewidth=0, label=name)
            axes.scatter(*centres[owners == number].T, s=70, color=colour, marker="*", edgecolor="black", linewidth=0.6)
        axes.set_title(site, fontsize="medium")
        axes.set(xticks=[], yticks=[])
    for axes in list(grid.flat)[len(sites) :]:
        axes.axis("off")
    stars = plt.Line2D([], [], color="white", marker="*", markersize=9, markeredgecolor="black", label="prototypes")
    handles, _ = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles=[*handles, stars], loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    figure.suptitle(title, fontsize="large")
    return figure


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "plots need matplotlib, which is not installed", hint="pip install 'lazaret[bench]', or --no-plots"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
