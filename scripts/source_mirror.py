"""`scripts/house`: figures about the source tree that say whether a newcomer can see through it.

They are a mirror and no gate. Only two of them are held by a test (tests/house/test_layout.py): class names are unique,
and the tree of unit tests mirrors the source.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from lazaret.software import PACKAGES

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = ("_pb2.py", "_pb2_grpc.py")
LONGEST: Final = 450  # lines of a file (CONTRIBUTING.md)
# Names that two rooms share because the word is the field's own in both; each with its reason.
SHARED_NAMES: Final[dict[str, str]] = {}
# Where the machines say what their shells are to do.
EFFECTS: Final = ("security/secagg/effects.py", "site_agent/effects.py", "coordinator/effects.py")


def sources() -> list[Path]:
    """Every module of the product, generated ones apart."""
    found = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [path for path in found if not path.name.endswith(GENERATED)]


def is_contract(path: Path) -> bool:
    """An `__init__` that holds a contract and no code."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return path.name == "__init__.py" and all(isinstance(node, ast.Expr) for node in body)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of the product that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def single_importers() -> dict[str, str]:
    """Modules that exactly one other module imports: would they read better inside it?"""
    modules = {dotted(path): path for path in sources()}
    users: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for found in imported(path, set(modules)):
            if found in modules and found != name:
                users[found].add(name)
    lone = {name: next(iter(by)) for name, by in users.items() if len(by) == 1 and not is_contract(modules[name])}
    # A package's commands import each other only from the entry; an entry is where a reader begins.
    return {name: by for name, by in sorted(lone.items()) if not by.endswith("__main__")}


def why_apart(name: str, importer: str) -> str:
    """What a figure can say for a module with one importer; the rest is for people to judge."""
    paths = {dotted(path): path for path in sources()}
    together = sum(len(paths[one].read_text(encoding="utf-8").splitlines()) for one in (name, importer))
    if together > LONGEST:
        return f"together {together} lines"
    tree = ast.parse(paths[importer].read_text(encoding="utf-8"))
    first = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    if name not in first:
        return "loaded when it is used"
    text = "".join(path.read_text(encoding="utf-8") for path in sources())
    return "a command of its own" if f'"{name}"' in text else "to be judged"


def class_names() -> dict[str, list[str]]:
    """Class names that more than one module defines, underscored ones apart, with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(dotted(path))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def code_lines(path: Path) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    text = path.read_text(encoding="utf-8")
    held: set[int] = set()
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in idle:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                held -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(held)


def comment_share() -> float:
    """Lines with a comment of their own, as a share of all lines."""
    lines = [line.strip() for path in sources() for line in path.read_text(encoding="utf-8").splitlines()]
    return round(sum(line.startswith("#") for line in lines) / len(lines), 4)


def tests_without_source() -> list[str]:
    """Unit tests of no module in the same place: `test_NAME.py` and `test_NAME_aspect.py` belong to NAME."""
    unit = ROOT / "tests" / "unit"
    lost = []
    for path in sorted(unit.rglob("test_*.py")):
        folder = ROOT / path.parent.relative_to(unit)
        name = path.stem.removeprefix("test_")
        known = {found.stem for found in folder.glob("*.py") if not found.name.endswith(GENERATED)} - {"__init__"}
        if not any(name == module or name.startswith(f"{module}_") for module in known):
            lost.append(str(path.relative_to(ROOT)))
    return lost


def effect_classes() -> int:
    texts = [ROOT / name for name in EFFECTS if (ROOT / name).exists()]
    return sum(isinstance(node, ast.ClassDef) for path in texts for node in ast.parse(path.read_text()).body)


def figures(*, trace: bool) -> dict[str, Any]:
    modules = [path for path in sources() if not is_contract(path)]
    sizes = Counter({dotted(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules})
    ((largest, lines),) = sizes.most_common(1)
    found: dict[str, Any] = {
        "modules": len(modules),
        "single_importer_modules": len(single_importers()),
        "largest_file": lines,
        "largest_file_name": largest,
        "class_names_defined_twice": len(class_names().keys() - SHARED_NAMES.keys()),
        "unit_tests_without_source": len(tests_without_source()),
        "product_lines": sum(code_lines(path) for path in sources()),
        "comment_share": comment_share(),
        "effect_classes": effect_classes(),
    }
    if trace:
        found["files_touched_by_one_deliver"] = len(files_touched_by_one_deliver())
    return found


# How long the way of one message is: the project files in which code runs when a site takes one `Deliver`.
#
# `Deliver` is the message with the longest way through a site. The site opens the boxes of the others, masks its
# update, writes down what it has bound itself to, logs, and sends a header and a vector. The figure counts layers: a
# file that only passes things on is on the list like one that does the work.


@contextmanager
def traced(touched: set[str]) -> Iterator[None]:
    """Note every project file in which a function is entered."""

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            touched.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(before)


def _of_project(name: str) -> str | None:
    path = Path(name)
    if not path.is_absolute() or not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] in PACKAGES else None


def files_touched_by_one_deliver() -> list[str]:
    """The files, sorted. A site of the tests' world runs a round; the second `Deliver` is traced, so that nothing is
    counted that runs once in a process only.
    """
    from tests.support.site_world import SITES, SiteWorld

    touched: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        world = SiteWorld(Path(folder))
        world.start_all()
        world.run_round()
        agent = world.agents[SITES[0]]
        agent.received = _watching(agent.received, touched)  # type: ignore[method-assign]
        world.run_round()
    return sorted(found for name in touched if (found := _of_project(name)) is not None)


def _watching(received: Callable[[bytes], Iterator[bytes]], touched: set[str]) -> Callable[[bytes], Iterator[bytes]]:
    from protos.parse import FROM_COORDINATOR
    from security.secagg import messages

    def watch(data: bytes) -> Iterator[bytes]:
        parcel = FROM_COORDINATOR.decode(data)
        if not isinstance(parcel.message, messages.Deliver):
            yield from received(data)
            return
        with traced(touched):
            sent = list(received(data))
        yield from sent

    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--no-trace", action="store_true", help="skip the round that is traced through the files")
    parser.add_argument("--list", action="store_true", help="also the names behind the figures")
    asked = parser.parse_args()
    found = figures(trace=not asked.no_trace)
    if asked.list:
        lone = {name: f"{by}: {why_apart(name, by)}" for name, by in single_importers().items()}
        found |= {"single_importers": lone, "twice": class_names(), "lost_tests": tests_without_source()}
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
