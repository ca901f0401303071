"""The tables of docs/evidence.md, and the sentences that say how to read them: all of it follows from the results."""

from statistics import mean, stdev

from benchmarks.evidence_rows import REFERENCES, without_npr
from npr.lab.models import BEST_SITE
from npr.lab.summary import CHOSEN
from npr.lab.tables import describe_choice, markdown

FIGURES = ("pooled_recall", "mean_bacc")
NAMES = {"pooled_recall": "pooled recall", "mean_bacc": "mean over sites"}


def interval(values, sign=""):
    first = format(values[0], f"{sign}.1f")
    return first if len(values) < 3 else f"{first} [{values[1]:{sign}.1f}, {values[2]:{sign}.1f}]"


def pairs(comparison):
    return f"{comparison['cells']} pair{'s' * (comparison['cells'] > 1)}"


def chosen(content):
    """What was chosen, rows with the most cells first: one cell alone is ahead or behind by chance."""
    rows = [row for row in content["summary"] if row["kind"] == CHOSEN]
    return sorted(rows, key=lambda row: (-row["cells"], -row["pooled_recall"][0]))


def judged_cells(content):
    """Test figures by what was chosen, of each variant by seed and fold."""
    cells = {}
    for cell in content["cells"]:
        if "final" in cell:
            judged = cell["final"][cell["chosen"]["model"]][cell["chosen"]["predictor"]]
            cells.setdefault(cell["variant"], {})[cell["seed"], cell["fold"]] = judged
    return cells


def between_cells(content):
    """How far differences of single cells lie apart, over the rows with the most cells: (figure, least, most).

    In points. With one cell an interval draws lesions alone, and has none of this in it.
    """
    cells = judged_cells(content)
    most = max(map(len, cells.values()))
    gaps = [
        [{figure: 100 * (mine[at][figure] - cells[reference][at][figure]) for figure in FIGURES} for at in mine]
        for variant, mine in cells.items()
        for reference in REFERENCES
        if most > 1 and len(mine) == most and variant != reference and mine.keys() == cells[reference].keys()
    ]
    spreads = {figure: [stdev(gap[figure] for gap in pair) for pair in gaps] for figure in FIGURES}
    return [(figure, min(found), max(found)) for figure, found in spreads.items() if found]


def main_table(content):
    against = {(c["variant"], c["against"]): c for c in content["comparisons"] if c["model"] == CHOSEN}

    def gaps(variant, figure):
        found = [against.get((variant, reference)) for reference in REFERENCES]
        return [interval(c[figure], "+") if c else "" for c in found]

    def cells(name, row, pooled, over_sites):
        auc = f"{row['mean_bauc'][0]:.1f}" if row["mean_bauc"] else "none"
        return (name, interval(row["pooled_recall"]), *pooled, interval(row["mean_bacc"]), *over_sites, auc,
                str(row["cells"]))

    rows = [
        cells(row["variant"], row, *(gaps(row["variant"], figure) for figure in FIGURES)) for row in chosen(content)
    ]
    nothing = [""] * len(REFERENCES)
    rows += [
        cells(f"{row['variant']}, best site everywhere ({row['predictor']})", row, nothing, nothing)
        for row in content["summary"]
        if row["kind"] == BEST_SITE
    ]
    header = ("method", "pooled recall", *(f"minus {ref}" for ref in REFERENCES), "mean over sites bACC",
              *(f"minus {ref}" for ref in REFERENCES), "bAUC", "cells")
    return markdown(header, rows)


def alike_table(content):
    """The same model and predictor on both sides: what remains when prediction is equal."""
    rows = [
        (c["variant"], c["model"], c["predictor"], c["against"], interval(c["pooled_recall"], "+"),
         interval(c["mean_bacc"], "+"), str(c["cells"]))
        for c in content["comparisons"]
        if c["model"] != CHOSEN and c["variant"].startswith("fednpr") and c["against"] == (
            "fedper" if c["variant"].startswith("fednpr-per") else "fedavg")
    ]
    return markdown(("method", "model", "predictor", "minus", "pooled recall", "mean over sites bACC", "cells"), rows)


def spread_of_cells(content):
    """Why a row with one cell shows less than its interval says."""
    found = between_cells(content)
    if not found:
        return "No row has several cells yet."
    figures = " and ".join(f"{least:.1f} to {most:.1f} points ({NAMES[figure]})" for figure, least, most in found)
    return (
        f"Over the rows with the most cells, differences of single cells have a standard deviation of {figures},\n  "
        "depending on the pair. An interval of a row with one cell draws lesions alone and has none of this in it."
        f"{shared_luck(content)}"
    )


def shared_luck(content):
    """Rows with one cell have the same references in the same cell, and share what chance did to those."""
    cells = judged_cells(content)
    alone = {at for row in cells.values() if len(row) == 1 for at in row}
    first, second = (cells[reference] for reference in REFERENCES)
    both = [at for at in first if at in second]
    if len(alone) != 1 or not alone <= set(both):
        return ""
    gaps = {at: 100 * (second[at]["pooled_recall"] - first[at]["pooled_recall"]) for at in both}
    (seed, fold), *_ = alone
    return (
        f"\n  Those rows are all of seed {seed} and fold {fold}, where FedPer minus FedAvg is {gaps[seed, fold]:+.1f} "
        f"points, and {mean(gaps.values()):+.1f} over all cells: all of them share that luck of their\n  references"
    )


def tuned_tables(content):
    """The same comparison of a run that chose the learning rate of each method and fold too."""
    if not content:
        return "Not run yet."
    folds = sorted({str(cell["fold"]) for cell in content["cells"]})
    seeds = sorted({cell["seed"] for cell in content["cells"]})
    return "\n\n".join([
        f"Folds {', '.join(folds)}; seeds {', '.join(map(str, seeds))}; {len(content['cells'])} cells.",
        main_table(content), choices(content), rate_table(content),
    ])


def fine_section(content):
    """The run that chose the rates: how much of it has run, its tables, and each row against the same without NPR."""
    waiting = ", ".join(f"`{key}`" for key in content["not_run"]) or "none"
    return "\n\n".join([
        tuned_tables(content), f"Cells that were planned and have not run: {waiting}.",
        "The same options with and without NPR:", control_table(content),
    ])


def controls(content):
    """Of each FedNPR row with options, the difference to the same options without NPR, as chosen."""
    return [
        c for c in content["comparisons"]
        if c["model"] == CHOSEN and c["against"] not in REFERENCES and c["against"] == without_npr(c["variant"])
    ]


def control_table(content):
    rows = [
        (c["variant"], c["against"], interval(c["pooled_recall"], "+"), interval(c["mean_bacc"], "+"), str(c["cells"]))
        for c in controls(content)
    ]
    return markdown(("method", "minus", "pooled recall", "mean over sites bACC", "cells"), rows)


def control_lines(content):
    """What the options give without NPR: a lead that FedAvg has as well is not NPR's."""
    against = {(c["variant"], c["against"]): c for c in content["comparisons"] if c["model"] == CHOSEN}
    lines = []
    for c in controls(content):
        plain = against.get((c["against"], "fedavg"))
        if plain:
            lines.append(
                f"The same options without NPR (`{c['against']}`) are {interval(plain['pooled_recall'], '+')} from "
                f"FedAvg; what NPR adds to them is {interval(c['pooled_recall'], '+')}."
            )
    return lines


def fixed_rate_line(content):
    """The run of all rows at the default rate: the paper's methods as they are, by the rows with the most cells."""
    found = [c for c in content["comparisons"] if c["model"] == CHOSEN and c["variant"] == "fednpr-per"
             and c["against"] in REFERENCES]
    gaps = "; ".join(
        f"`fednpr-per` minus `{c['against']}` is {interval(c['pooled_recall'], '+')} ({pairs(c)})" for c in found
    )
    return f"The paper's method as it is, at the default learning rate: {gaps}."


def choices(content):
    rows = [
        (row["variant"], fold, describe_choice(choice))
        for row in chosen(content)
        for fold, choice in row["choices"].items()
    ]
    return markdown(("method", "fold", "chosen on the validation side"), rows)


MIXTURES = ("head", "0.75 head + 0.25 prototypes", "0.50 head + 0.50 prototypes", "0.25 head + 0.75 prototypes",
            "prototypes", "refit", "0.33 head + 0.33 prototypes + 0.33 refit")


def by_predictor(content):
    """Of the methods with the most cells, each model by each predictor: means over the validation sides of all cells.

    :return: figures (pooled recall, mean over sites) by method and model, then by predictor, in percent.
    """
    by_variant = {}
    for cell in content["cells"]:
        by_variant.setdefault(cell["variant"], []).append(cell["validation"])
    most = max(map(len, by_variant.values()))
    return {
        (variant, kind): {
            name: tuple(100 * mean(each[kind][name][figure] for each in found) for figure in FIGURES)
            for name in MIXTURES
        }
        for variant, found in by_variant.items()
        for kind in found[0]
        if len(found) == most and all(name in found[0][kind] for name in MIXTURES)
    }


def predictor_table(content):
    rows = [
        (variant, kind, *(f"{found[name][0]:.1f} ({found[name][1]:.1f})" for name in MIXTURES))
        for (variant, kind), found in by_predictor(content).items()
    ]
    return markdown(("method", "model", *MIXTURES), rows)


def rate_table(content):
    """Of a run with `--tune learning_rate=...`: the best figure on the validation side for each method and rate."""
    found = {}
    for cell in content["cells"]:
        figures = [(by[name]["pooled_recall"], kind, name) for kind, by in cell["validation"].items() for name in by]
        others = {name: value for name, value in cell["tuned"].items() if name != "learning_rate"}
        rates = found.setdefault((cell["variant"], cell["fold"]), {})
        tried = rates.setdefault(cell["tuned"]["learning_rate"], [])
        tried.append((*max(figures), *(f"{name}={value}" for name, value in others.items())))
    rates = sorted({rate for row in found.values() for rate in row})
    chosen = {(choice["variant"], choice["fold"]): dict(choice["tuned"]) for choice in content["choices"]}
    rows = [
        (variant, str(fold), *(_best(row.get(rate)) for rate in rates),
         ", ".join(f"{key}={value}" for key, value in chosen.get((variant, fold), {}).items()) or "none yet")
        for (variant, fold), row in found.items()
    ]
    return markdown(("method", "fold", *(f"rate {rate}" for rate in rates), "chosen"), rows)


def _best(tried):
    """Of what was tried with one rate."""
    if not tried:
        return "not run"
    figure, kind, name, *others = max(tried)
    return f"{100 * figure:.1f} ({', '.join([f'{kind} model by {name}', *others])})"


def why(content):
    """What the figures say about why a lead is there or is not."""
    pairs = [c for c in content["comparisons"] if len(c["pooled_recall"]) == 3]
    most = max((c["cells"] for c in pairs), default=0)
    alike = [c for c in pairs if c["cells"] == most and (c["variant"], c["against"]) in (
        ("fednpr", "fedavg"), ("fednpr-per", "fedper")) and c["model"] != CHOSEN]
    lines = []
    if alike:
        values = [c["pooled_recall"] for c in alike]
        clear = sum(low > 0 or high < 0 for _, low, high in values)
        least, best = min(values)[0], max(values)[0]
        lines.append(
            "- With the same model and predictor on both sides the regulariser changes pooled recall by "
            f"{least:+.1f} to {best:+.1f} points;\n  {clear} of these {len(values)} intervals lie on one side of zero."
        )
    gains = {
        with_npr: [row["0.50 head + 0.50 prototypes"][0] - row["head"][0] for (variant, _), row in
                   by_predictor(content).items() if variant.startswith("fednpr") == with_npr]
        for with_npr in (False, True)
    }
    if all(gains.values()) and min(min(found) for found in gains.values()) > 0:
        told = " and ".join(
            f"{min(found):+.1f} to {max(found):+.1f} for those {'with' if with_npr else 'without'} NPR"
            for with_npr, found in gains.items()
        )
        lines.append(
            "- Prototypes help to predict, and they help every method: half head and half prototypes is above the "
            f"head,\n  on the validation sides, by {told}.\n  A site can have that without any regulariser in training."
        )
    bounds = {c["variant"]: c["pooled_recall"] for c in pairs if c["model"] == CHOSEN and c["against"] == "fedavg"}
    if {"central", "local"} <= bounds.keys():
        upper, alone = (interval(bounds[name], "+") for name in ("central", "local"))
        lines.append(
            f"- All images in one place, the upper bound, are {upper} points from FedAvg, and sites that train alone\n"
            f"  {alone}. The goal of 4 points asks for a large part of what all images together would give."
        )
    return "\n".join(lines) or "Too little has run to say."
