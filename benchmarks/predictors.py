"""Other ways to predict with the models that a lab run has kept: by head, by nearest prototype, or by both.

Nothing is trained again. Run the cells with LAZARET_LAB_KEEP_MODELS=1, then

    python benchmarks/predictors.py RESULTS_DIR [--mix 0.5 ...] [--present-only] [--temperature 0.1]

prints a table of pooled recall over all kept cells of a variant, and writes predictors.json beside results.json.
"""

import argparse
from pathlib import Path

from npr.bootstrap import bootstrap_interval, paired_difference
from npr.lab.cell import build_federation
from npr.lab.plan import Cell, Settings
from npr.lab.store import read_results, write_json
from npr.lab.tables import markdown
from npr.methods import registry
from npr.metrics import balanced_accuracy, site_mean


def ways(arguments):
    """Name and settings of every way to predict; gains are told against the first."""
    yield "head", {"predict": "head"}
    for mix in arguments.mix:
        yield f"both, prototypes {mix:g}", {"predict": "both", "predict_mix": mix}
    yield "prototype", {"predict": "prototype"}
    if arguments.present_only:
        yield "head, present classes only", {"predict": "head", "predict_present_only": True}


def predict(federation, kind, settings):
    config = federation.config.changed(**settings)
    federation.method = registry.build(config)
    for site in federation.sites:
        site.config = config
    return federation.evaluate(kind)


def collect(out, arguments):
    """{(variant, kind, way): predictions of all kept cells}"""
    results = read_results(out)
    settings = Settings.model_validate(results["settings"])
    found = {}
    for entry in results["cells"]:
        models = out / "cells" / entry["slug"] / "final.safetensors"
        if not models.exists():
            continue
        options = tuple(entry["options"].items())
        cell = Cell(method=entry["method"], seed=entry["seed"], fold=entry["fold"], options=options)
        federation = build_federation(settings, cell)
        federation.restore(models)
        for kind in federation.method.reports:
            if kind == "global":
                continue  # Prototypes are a site's own, so they go with a site's own model.
            for name, changed in ways(arguments):
                extra = {"temperature": arguments.temperature} if arguments.temperature else {}
                predictions = predict(federation, kind, changed | extra)
                found.setdefault((entry["variant"], kind, name), []).extend(predictions)
    return found


def rows_of(found):
    for (variant, kind, way), predictions in found.items():
        recall = bootstrap_interval(predictions)
        head = found[variant, kind, "head"]
        gain = None if way == "head" else paired_difference(predictions, head)
        yield {
            "variant": variant,
            "kind": kind,
            "predictor": way,
            "seeds": sorted({p.seed for p in predictions}),
            "pooled_recall": [round(100 * value, 2) for value in (recall.value, recall.low, recall.high)],
            "gain": gain and [round(100 * value, 2) for value in (gain.value, gain.low, gain.high)],
            "mean_bacc": round(100 * site_mean(predictions, balanced_accuracy), 2),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--mix", type=float, nargs="*", default=[0.5])
    parser.add_argument("--present-only", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the prototypes' softmax; 0 leaves it alone")
    arguments = parser.parse_args()
    rows = list(rows_of(collect(arguments.results, arguments)))
    write_json(arguments.results / "predictors.json", {"rows": rows})
    cells = [
        (
            row["variant"],
            row["kind"],
            row["predictor"],
            "{:.1f} [{:.1f}, {:.1f}]".format(*row["pooled_recall"]),
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(*row["gain"]) if row["gain"] else "",
            f"{row['mean_bacc']:.1f}",
        )
        for row in rows
    ]
    print(markdown(("method", "model", "predictor", "pooled recall", "against head", "mean over sites bACC"), cells))


if __name__ == "__main__":
    main()
