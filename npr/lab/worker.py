"""One cell in its own process: `python -m npr.lab.worker`, started by `npr-lab run --workers N`.

The job comes as one JSON line on stdin; rounds and the end are reported as JSON lines on stdout. Stdin stays open for
as long as the parent lives: when it closes, the worker stops, so that a killed run leaves no process behind.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from npr.lab.plan import Cell, Settings


def main() -> int:
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    # Imported only now: torch reads the number of threads when it is loaded.
    import torch

    from npr.lab.cell import try_cell

    torch.set_num_threads(job["threads"])
    _, error = try_cell(
        Settings.model_validate(job["settings"]),
        Cell.model_validate(job["cell"]),
        Path(job["directory"]),
        on_round=lambda number, text: _tell({"round": number, "text": text}),
    )
    _tell({"error": error} if error else {"done": True})
    return 1 if error else 0


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _stop_with_parent() -> None:
    while sys.stdin.readline():
        pass
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main())
