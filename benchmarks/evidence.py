"""The page docs/evidence.md, made from the results of a lab run: no figure on it is written by hand.

    python -m benchmarks.evidence collect OUT     # results of a run, with intervals, to benchmarks/results
    python -m benchmarks.evidence page            # docs/evidence.md, its plot and the headline of the README

`collect` needs the run's folder of cells, whose predictions stay there. A later run, on any machine, adds rows to the
results that are there: its references run again beside them, because pairs are of one run. `page` needs `results.json`
alone.
"""

import argparse
from collections import Counter
from pathlib import Path
from statistics import mean, stdev

from benchmarks.evidence_rows import REFERENCES, collect
from npr.lab.store import read_results, write_atomically
from npr.lab.summary import CHOSEN
from npr.lab.tables import describe_choice, markdown
from npr.methods.fedbabu import BabuOptions
from npr.methods.fedrep import RepOptions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ham10000" / "five-folds"
RATES, TUNED = RESULTS.with_name("learning-rate"), RESULTS.with_name("tuned")
PAGE, PLOT = ROOT / "docs" / "evidence.md", ROOT / "docs" / "images" / "evidence-forest.png"
README, TEMPLATE = ROOT / "README.md", ROOT / "benchmarks" / "evidence.template.md"
MARK = "<!-- evidence: made by benchmarks/evidence.py -->"
END = "<!-- end of evidence -->"
POINTER = "The page [evidence](docs/evidence.md) has every method and every choice."
# Every row that the paper has and that part of the comparison was asked for, in the order in which they run.
WANTED = (
    "fedavg", "fedper", "fednpr", "fednpr-per", "frozen", "local", "central", "fedprox", "moon", "creff", "fedrs",
    "fedlc", "balancefl", "fedrep", "fedrod", "fedbabu", "fedprox+npr", "moon+npr", "fedrep+npr", "fedrod+npr",
    "fedbabu+npr",
    "fednpr-per[clusters=1]", "fednpr-per[clusters=2]", "fednpr-per[clusters=8]", "fednpr-per[clusters_by=explained]",
    "fednpr-per[lambda_npr=0.01]", "fednpr-per[lambda_npr=0.05]", "fednpr-per[lambda_npr=1]",
    "fednpr-per[supervision=none]",
)


def interval(values, sign=""):
    first = format(values[0], f"{sign}.1f")
    return first if len(values) < 3 else f"{first} [{values[1]:{sign}.1f}, {values[2]:{sign}.1f}]"


def chosen(content):
    """What was chosen, rows with the most cells first: one cell alone is ahead or behind by chance."""
    rows = [row for row in content["summary"] if row["kind"] == CHOSEN]
    return sorted(rows, key=lambda row: (-row["cells"], -row["pooled_recall"][0]))


def between_cells(content):
    """How far differences of single cells lie apart, over the rows with the most cells: (figure, least, most).

    In points. With one cell an interval draws lesions alone, and has none of this in it.
    """
    cells = {}
    for cell in content["cells"]:
        if "final" in cell:
            judged = cell["final"][cell["chosen"]["model"]][cell["chosen"]["predictor"]]
            cells.setdefault(cell["variant"], {})[cell["seed"], cell["fold"]] = judged
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

    rows = [
        (
            row["variant"],
            interval(row["pooled_recall"]),
            *gaps(row["variant"], "pooled_recall"),
            interval(row["mean_bacc"]),
            *gaps(row["variant"], "mean_bacc"),
            f"{row['mean_bauc'][0]:.1f}" if row["mean_bauc"] else "none",
            str(row["cells"]),
        )
        for row in chosen(content)
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
        "depending on the pair. An interval of a row with one cell draws lesions alone and has none of this in it"
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


def choices(content):
    rows = [
        (row["variant"], fold, describe_choice(choice))
        for row in chosen(content)
        for fold, choice in row["choices"].items()
    ]
    return markdown(("method", "fold", "chosen on the validation side"), rows)


FIGURES = ("pooled_recall", "mean_bacc")
NAMES = {"pooled_recall": "pooled recall", "mean_bacc": "mean over sites"}
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
        best, kind, name = max(figures)
        rates = found.setdefault((cell["variant"], cell["fold"]), {})
        rates[cell["tuned"]["learning_rate"]] = f"{100 * best:.1f} ({kind} model by {name})"
    rates = sorted({rate for row in found.values() for rate in row})
    chosen = {(choice["variant"], choice["fold"]): dict(choice["tuned"]) for choice in content["choices"]}
    rows = [
        (variant, str(fold), *(row.get(rate, "not run") for rate in rates),
         str(chosen.get((variant, fold), {}).get("learning_rate", "none yet")))
        for (variant, fold), row in found.items()
    ]
    return markdown(("method", "fold", *(f"rate {rate}" for rate in rates), "chosen"), rows)


def headline(content):
    """Three sentences for the README, whatever the figures say: the verdict, the differences, the predictor."""
    ours = [c for c in content["comparisons"] if c["model"] == CHOSEN and c["variant"].startswith("fednpr")]
    best = {}
    for reference in REFERENCES:
        mine = [c for c in ours if c["against"] == reference]
        if mine:
            best[reference] = by_validation(content, mine)
    if not best:
        return "On real images nothing has been compared yet."
    names = {"fedavg": "FedAvg", "fedper": "FedPer"}
    gaps = [
        f"`{c['variant']}` minus {names[reference]} is {interval(c['pooled_recall'], '+')} points of pooled recall and "
        f"{interval(c['mean_bacc'], '+')} of mean-over-sites bACC ({c['cells']} pairs)"
        for reference, c in best.items()
    ]
    # Only what the validation side prefers may lead: one of many variants is ahead on the test images by chance.
    checks = goal_checks(content)
    shown = all(all(checks.get(c["variant"], {"compared": False}).values()) for c in best.values())
    verdict = "A lead of FedNPR is shown" if shown else "A lead of FedNPR is not shown"
    size, rounds = content["settings"]["data"]["image_size"], content["settings"]["rounds"]
    return "\n".join([
        f"{verdict} on HAM10000 (four hospitals, {size} px, {rounds} rounds).",
        f"With 95 % intervals, {'; '.join(gaps)}.",
        f"Variant, model and predictor were chosen on validation images{predicting(content, best)}.",
    ])


def by_validation(content, rows):
    """Of the variants with the most trained pairs, the one that the validation side prefers: never the test images."""
    scores = {}
    for choice in content["choices"]:
        scores.setdefault(choice["variant"], []).append(choice["validation"])
    most = max(row["cells"] for row in rows)
    return max((row for row in rows if row["cells"] == most), key=lambda row: mean(scores[row["variant"]]))


def predicting(content, best):
    """The predictor behind most figures of the headline; the page lists the choice of each method and fold."""
    names = {*(c["variant"] for c in best.values()), *best}
    found = Counter(
        choice["predictor"]
        for row in content["summary"]
        if row["kind"] == CHOSEN and row["variant"] in names
        for choice in row["choices"].values()
    )
    if not found:
        return ""
    predictor, times = found.most_common(1)[0]
    return f"; the predictor was most often {predictor} ({times} of {found.total()} choices)"


def readme_block(content):
    return f"{MARK}\n{headline(content)}\n{POINTER}\n{END}"


def goal_checks(content):
    """For each FedNPR variant that has intervals against both references: the parts of the goal, met or not."""
    ours = {(c["variant"], c["against"]): c for c in content["comparisons"] if c["model"] == CHOSEN}
    found = {}
    for variant in dict.fromkeys(name for name, _ in ours if name.startswith("fednpr")):
        first, second = ours.get((variant, "fedavg")), ours.get((variant, "fedper"))
        if first and second and len(first["pooled_recall"]) == len(second["pooled_recall"]) == 3:
            found[variant] = {
                "4 points or more above FedAvg by pooled recall": first["pooled_recall"][0] >= 4,
                "lower end of that interval above zero": first["pooled_recall"][1] > 0,
                "not below FedAvg by mean over sites": first["mean_bacc"][0] >= 0,
                "above FedPer, lower end above zero": second["pooled_recall"][1] > 0,
            }
    return found


def goal(content):
    cells = {row["variant"]: row["cells"] for row in content["summary"] if row["kind"] == CHOSEN}
    lines = []
    for variant, checks in goal_checks(content).items():
        told = "; ".join(f"{text}: **{'yes' if met else 'no'}**" for text, met in checks.items())
        lines.append(f"- `{variant}` ({cells[variant]} cell{'s' * (cells[variant] > 1)}): {told}.")
    return "\n".join(lines) or "No variant has cells in common with both references yet."


def again(content):
    """Which references were trained a second time, beside rows of a later run."""
    keys = list(dict.fromkeys(f"`{cell['key']}`" for cell in content.get("again", [])))
    if not keys:
        return "All rows are of one run."
    return (
        "Some rows were trained later, by code whose sums differ in the last bits. Their references were trained again "
        f"beside them, and pairs are\n  of one run: {', '.join(keys)}."
    )


def page(content):
    settings, data = content["settings"], content["settings"]["data"]
    seeds = sorted({cell["seed"] for cell in content["cells"]})
    folds = sorted({str(cell["fold"]) for cell in content["cells"]})
    found = {row["variant"] for row in content["summary"]}
    missing = [f"`{name}`" for name in WANTED if name not in found]
    waiting = [f"`{key}`" for key in content["not_run"]]
    pairs = [c for c in content["comparisons"] if c["model"] == CHOSEN]
    most = max((c["cells"] for c in pairs), default=0)
    resolvable = [c["resolvable"] for c in pairs if c["resolvable"] and c["cells"] == most]
    smallest = f"{min(resolvable):.1f} to {max(resolvable):.1f}" if resolvable else "not known"
    train = ", ".join(f"`{key} = {value}`" for key, value in settings["train"].items()) or "the defaults"
    return TEMPLATE.read_text().format(
        mark=MARK,
        headline=headline(content),
        goal=goal(content),
        source=data["source"],
        size=data["image_size"],
        fold_count=data["folds"],
        folds=", ".join(folds),
        seeds=", ".join(map(str, seeds)),
        architecture=settings["model"]["architecture"],
        weights=settings["model"]["weights"],
        rounds=settings["rounds"],
        train=train,
        cells=len(content["cells"]),
        minutes=sum(cell["seconds"] for cell in content["cells"]) / 60,
        validation=data["validation"],
        smallest=smallest,
        main_table=main_table(content),
        choices=choices(content),
        alike_table=alike_table(content),
        predictor_table=predictor_table(content),
        rate_table=rate_table(read_results(RATES)) if RATES.exists() else "Not tried yet.",
        tuned=tuned_tables(read_results(TUNED) if TUNED.exists() else None),
        spread=spread_of_cells(content),
        finetuning=BabuOptions().finetune_epochs,
        fits=settings["rounds"] * RepOptions().head_epochs + RepOptions().final_head_epochs,
        again=again(content),
        missing=", ".join(missing) or "none",
        waiting=", ".join(waiting) or "none",
    )


def forest(content, path):
    """Paired differences of pooled recall of what was chosen, with intervals, against each reference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [c for c in content["comparisons"] if c["model"] == CHOSEN]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.32 * max(1, len(rows))), layout="constrained")
    for number, c in enumerate(reversed(rows)):
        value, *ends = c["pooled_recall"]
        errors = [[value - ends[0]], [ends[1] - value]] if ends else None
        axes.errorbar([value], [number], xerr=errors, fmt="o", capsize=3, color=f"C{REFERENCES.index(c['against'])}")
    axes.axvline(0, color="black", linewidth=0.8)
    names = [f"{c['variant']} minus {c['against']}" for c in reversed(rows)]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.set(xlabel="difference of pooled recall (points)")
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    take = commands.add_parser("collect")
    take.add_argument("out", type=Path)
    for command in (take, commands.add_parser("page")):
        command.add_argument("--results", type=Path, default=RESULTS)
    commands.choices["page"].add_argument("--page", type=Path, default=PAGE)
    commands.choices["page"].add_argument("--plot", type=Path, default=PLOT)
    given = parser.parse_args(arguments)
    if given.command == "collect":
        collect(given.out, given.results)
        return
    content = read_results(given.results)
    forest(content, given.plot)
    write_atomically(given.page, page(content).encode())
    if given.page == PAGE:
        before, _, rest = README.read_text().partition(MARK)
        after = rest.partition(END)[2]
        write_atomically(README, f"{before}{readme_block(content)}{after}".encode())


if __name__ == "__main__":
    main()
