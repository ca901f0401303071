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
from statistics import mean

from benchmarks.evidence_rows import REFERENCES, collect, with_npr
from benchmarks.evidence_tables import (
    alike_table,
    choices,
    chosen,
    control_lines,
    fine_section,
    fixed_rate_line,
    interval,
    main_table,
    pairs,
    predictor_table,
    rate_table,
    spread_of_cells,
    tuned_tables,
    why,
)
from lazaret.files import write_atomically
from npr.lab.store import read_results
from npr.lab.summary import CHOSEN
from npr.methods.fedbabu import BabuOptions
from npr.methods.fedrep import RepOptions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ham10000" / "five-folds"
RATES, TUNED = RESULTS.with_name("learning-rate"), RESULTS.with_name("tuned")
# The run in which every method's rate is chosen in every fold, and sites may fine-tune the last model.
FINE = RESULTS.with_name("fine-tuned")
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
    "fednpr-per[supervision=none]", "fednpr-per[lambda_rounds=2]", "fednpr-per[personal_after=2]",
    "fednpr-per[personal_start=prototypes]", "fednpr-per[prototype_momentum=0.5]",
)


def headline(content):
    """Three sentences for the README, whatever the figures say: the verdict, the differences, the predictor."""
    ours = [c for c in content["comparisons"] if c["model"] == CHOSEN and with_npr(c["variant"])]
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
        f"{interval(c['mean_bacc'], '+')} of mean-over-sites bACC ({pairs(c)})"
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


def verdict(content):
    """The headline of the run that chose the rates, what the same options give without NPR, and the run at one rate."""
    fine = read_results(FINE)
    return "\n".join([headline(fine), *control_lines(fine), fixed_rate_line(content)])


def readme_block(content):
    return "\n".join([MARK, verdict(content), POINTER, END])


def goal_checks(content):
    """For each FedNPR variant that has intervals against both references: the parts of the goal, met or not."""
    ours = {(c["variant"], c["against"]): c for c in content["comparisons"] if c["model"] == CHOSEN}
    found = {}
    for variant in dict.fromkeys(name for name, _ in ours if with_npr(name)):
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
    """Of the rows with the most cells: one cell is ahead or behind by chance."""
    cells = {row["variant"]: row["cells"] for row in content["summary"] if row["kind"] == CHOSEN}
    found = goal_checks(content)
    most = max((cells[variant] for variant in found), default=0)
    lines = []
    for variant, checks in found.items():
        if cells[variant] < most:
            continue
        answers = "; ".join(f"{text}: **{'yes' if met else 'no'}**" for text, met in checks.items())
        lines.append(f"- `{variant}` ({cells[variant]} cell{'s' * (cells[variant] > 1)}): {answers}.")
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
    fine = read_results(FINE)
    settings, data = content["settings"], content["settings"]["data"]
    seeds = sorted({cell["seed"] for cell in content["cells"]})
    folds = sorted({str(cell["fold"]) for cell in content["cells"]})
    found = {row["variant"] for row in content["summary"]}
    missing = [f"`{name}`" for name in WANTED if name not in found]
    waiting = [f"`{key}`" for key in content["not_run"]]
    compared = [c for c in content["comparisons"] if c["model"] == CHOSEN]
    most = max((c["cells"] for c in compared), default=0)
    resolvable = [c["resolvable"] for c in compared if c["resolvable"] and c["cells"] == most]
    smallest = f"{min(resolvable):.1f} to {max(resolvable):.1f}" if resolvable else "not known"
    train = ", ".join(f"`{key} = {value}`" for key, value in settings["train"].items()) or "the defaults"
    return TEMPLATE.read_text().format(
        mark=MARK,
        headline=verdict(content),
        goal=goal(fine),
        goal_fixed=goal(content),
        fine=fine_section(fine),
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
        why=why(content),
        finetuning=BabuOptions().finetune_epochs,
        fits=settings["rounds"] * RepOptions().head_epochs + RepOptions().final_head_epochs,
        again=again(content),
        missing=", ".join(missing) or "none",
        waiting=", ".join(waiting) or "none",
    )


def forest(content, path):
    """Paired differences of pooled recall of what was chosen, with intervals, against each reference side by side.

    Rows in the order of the table; a row with one cell is hollow, since its interval draws lesions alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = {(c["variant"], c["against"]): c for c in content["comparisons"] if c["model"] == CHOSEN}
    rows = [row for row in reversed(chosen(content)) if any((row["variant"], each) in found for each in REFERENCES)]
    size = (9, 1.2 + 0.26 * max(1, len(rows)))
    figure, both = plt.subplots(1, len(REFERENCES), figsize=size, sharey=True, layout="constrained")
    for axes, reference in zip(both, REFERENCES, strict=True):
        for number, row in enumerate(rows):
            c = found.get((row["variant"], reference))
            if c is None:
                continue
            value, *ends = c["pooled_recall"]
            errors = [[value - ends[0]], [ends[1] - value]] if ends else None
            fill = "none" if c["cells"] == 1 else None
            axes.errorbar([value], [number], xerr=errors, fmt="o", capsize=3, color="C0", markerfacecolor=fill)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set(xlabel=f"minus {reference}: pooled recall (points)")
        axes.grid(axis="x", alpha=0.3, linewidth=0.6)
        axes.margins(y=0.01)
    names = [f"{row['variant']} ({row['cells']} cell{'s' * (row['cells'] > 1)})" for row in rows]
    both[0].set_yticks(range(len(rows)), names, fontsize="small")
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
