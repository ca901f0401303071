"""Write the vectors in `merkle` and `notes`: ``python -m tests.vectors.reference.merkle_notes_generate``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .merkle_notes_notes import notes
from .merkle_notes_trees import merkle

FOLDER = Path(__file__).parents[1]
TOPICS = {"merkle": merkle, "notes": notes}


def files() -> Iterator[tuple[Path, str]]:
    for topic, make in TOPICS.items():
        for name, case in make():
            yield FOLDER / topic / f"{name}.json", json.dumps(case, indent=1, sort_keys=True) + "\n"


def main() -> None:
    for path, text in files():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
