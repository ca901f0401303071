"""The results of a run with the comparisons of docs/evidence.md, added to those that are committed already.

A row is of one run, and so are its pairs: references that ran again beside a later row are kept as `again`, with the
rows that they were trained `beside`. Nothing per image is kept.
"""

from lazaret.errors import ConfigError
from lazaret.files import write_atomically
from npr.lab.plan import Settings
from npr.lab.store import read_results, write_json
from npr.lab.summary import TableRow, compare, predictions_loader, rows_of, summarise_cells
from npr.lab.tables import summary_table

REFERENCES = ("fedavg", "fedper")


def collect(out, results):
    """The run's results with intervals and with the comparisons of the page; nothing per image goes along."""
    content = read_results(out)
    load = predictions_loader(out)
    content["summary"] = summarise_cells(content["cells"], load, content["reference"], content["summary"])
    content["comparisons"] = comparisons(content["cells"], load)
    if (results / "results.json").exists():
        content = added(content, read_results(results))
    write_json(results / "results.json", content)
    write_atomically(results / "table.md", summary_table(content).encode())


# What the same cell has twice: trained alike, on the same images, with the same figures.
SAME = ("config_hash", "data_fingerprint", "validation", "chosen", "final")


def added(run, earlier):
    """Earlier results with the rows of a later run. A row is of one run; what ran again for pairs is kept as `again`.

    :raises ConfigError: for other settings, and for a row that would be made of cells of two runs.
    """
    # A setting that is newer than the results has its default in them.
    ours, theirs = (Settings.model_validate(each["settings"]) for each in (run, earlier))
    if ours != theirs:
        raise ConfigError("these results have other settings than those that they would be added to")
    rows, again = [], []
    for variant in dict.fromkeys(cell["variant"] for cell in run["cells"]):
        mine, theirs = ({c["key"]: c for c in each["cells"] if c["variant"] == variant} for each in (run, earlier))
        # A row that ran again as a whole, with more cells, takes the place of the shorter one.
        same = theirs.keys() == mine.keys() and all(_same(mine[key], theirs[key]) for key in mine)
        if theirs.keys() < mine.keys() or same:
            rows.append(variant)
        elif mine.keys() <= theirs.keys():
            again.append(variant)
        else:
            raise ConfigError(f"{variant}: other cells of this row are there already, and they are of another run")

    def both(part):
        kept = [entry for entry in earlier[part] if entry["variant"] not in rows]
        return [*kept, *(entry for entry in run[part] if entry["variant"] in rows)]

    references = [cell | {"beside": rows} for cell in run["cells"] if cell["variant"] in again]
    before = [cell for cell in earlier.get("again", []) if not any(_again(cell, other) for other in references)]
    cells = sorted(both("cells"), key=lambda cell: (cell["seed"], str(cell["fold"]), cell["key"]))
    done = {cell["key"] for cell in cells}
    return run | {
        "cells": cells,
        "again": [*before, *references],
        **{part: both(part) for part in ("choices", "summary", "comparisons")},
        "failed": [entry for entry in [*earlier["failed"], *run["failed"]] if entry["key"] not in done],
        "not_run": [key for key in dict.fromkeys([*earlier["not_run"], *run["not_run"]]) if key not in done],
    }


def _again(one, other):
    return one["key"] == other["key"] and _same(one, other)


def _same(one, other):
    return all(one.get(name) == other.get(name) for name in SAME)


def comparisons(cells, load):
    """Paired differences of all rows against each reference: chosen with chosen, then the same model and predictor."""
    found = []
    rows = rows_of(cells)
    for row in rows:
        for reference in references_of(row.variant):
            other = TableRow(reference, row.kind, row.predictor)
            if row.variant == reference or other not in rows:
                continue
            difference = compare(row, other, cells, load)
            if difference:
                found.append({"row": row.name, "variant": row.variant, "model": row.kind, "predictor": row.predictor,
                              "against": reference, **difference})
    return found


def references_of(variant):
    """What a row is compared with: the references and, of a FedNPR row with options, the same options without NPR.

    Without that one, what fine-tuning gives would be taken for what the regulariser gives.
    """
    return tuple(dict.fromkeys((*REFERENCES, without_npr(variant))))


def without_npr(variant):
    """`fedavg[finetune_epochs=5]` for `fednpr[finetune_epochs=5]`, `moon` for `moon+npr`; others stay what they are."""
    method, bracket, options = variant.partition("[")
    return {"fednpr": "fedavg", "fednpr-per": "fedper"}.get(method, method.removesuffix("+npr")) + bracket + options


def with_npr(variant):
    return without_npr(variant) != variant
