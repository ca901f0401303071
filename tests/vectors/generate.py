"""Write the test vectors from the reference: ``python tests/vectors/generate.py`` (``--check`` only compares)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from reference import arithmetic, cases, rounds

HERE = Path(__file__).parent
TOPICS = cases.TOPICS | arithmetic.TOPICS | rounds.TOPICS


def files() -> Iterator[tuple[Path, str]]:
    """Yield every vector's path and text."""
    for topic, make in TOPICS.items():
        for name, case in make():
            yield HERE / topic / f"{name}.json", json.dumps(case, indent=1, sort_keys=True) + "\n"


def differences() -> list[str]:
    expected = dict(files())
    present = {path for topic in TOPICS for path in (HERE / topic).glob("*.json")}
    wrong = [path for path, text in expected.items() if path not in present or path.read_text() != text]
    return sorted(str(path.relative_to(HERE)) for path in {*wrong, *(present - expected.keys())})


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = differences()
        for path in found:
            print(f"differs: {path}")
        return 1 if found else 0
    for path, text in files():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
