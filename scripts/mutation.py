"""The mutation run behind `scripts/mutants`: changes one security-relevant line at a time and asks the tests.

`mutants.toml` lists the places with the change to make at each, and the tests that should notice it. A mutant is killed
if one of them fails that passes without the change. One that survives must say why it is redundant. Tests are asked in
the order of the list; naming first the one that notices a change (`file::test`) makes the run short. Nothing is
written: each mutant lives in a forked process, in which the changed functions take the place of the original ones,
wherever those are held.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import click
import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
LIST: Final = ROOT / "scripts" / "mutants.toml"
SECONDS: Final = 900
OK, FAILED, BROKEN = 0, 1, 3


class NoSuchPlace(click.ClickException):
    """The list is out of step with the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change. `redundant` says why nothing can notice it; empty for all others."""

    file: str
    was: str
    now: str
    tests: tuple[str, ...]
    redundant: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.was.strip().splitlines()[0]}"

    @property
    def key(self) -> str:
        """Tells the change from all others, in the file of results."""
        return hashlib.sha256("\0".join((self.file, self.was, self.now)).encode()).hexdigest()[:16]

    def source(self) -> str:
        """The module with the change."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.was) != 1:
            raise NoSuchPlace(f"{self.name}: stands there {text.count(self.was)} times; bring the list up to date")
        return text.replace(self.was, self.now)

    def apply(self) -> int:
        """Put the changed functions in the place of the original ones in this process; returns how many differ."""
        module = importlib.import_module(self.file.removesuffix(".py").replace("/", "."))
        scratch = ModuleType(module.__name__)
        scratch.__file__ = module.__file__
        vars(scratch)["__package__"] = module.__package__
        exec(compile(self.source(), module.__file__ or "", "exec"), vars(scratch))
        changed = dict(_functions(scratch))
        count = 0
        for name, function in _functions(module):
            new = changed.get(name)
            if new is not None and len(new.__code__.co_freevars) == len(function.__code__.co_freevars):
                count += _content(new.__code__) != _content(function.__code__)
                function.__code__ = new.__code__
        return count


def _content(code: CodeType) -> tuple[object, ...]:
    """What a function does, without the lines that it stands on."""
    constants = (_content(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts)
    return code.co_code, code.co_names, tuple(constants)


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Functions and methods that a module defines, by name; also behind properties and decorators of methods."""
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner, member in vars(value).items():
                if (function := _plain(member)) is not None:
                    yield f"{name}.{inner}", function
        elif (function := _plain(value)) is not None and function.__module__ == module.__name__:
            yield name, function


def _plain(value: Any) -> FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def read_mutants(path: Path = LIST) -> list[Mutant]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class FirstFailure:
    """Notes for pytest which test was the first to fail."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid


def in_a_fork(test: str, mutant: Mutant | None = None) -> tuple[int, str]:
    """Run tests in a process of their own, with or without a change; a run without end counts as failed.

    :returns: the exit code, and the first test that failed.
    """
    there, here = os.pipe()
    child = os.fork()
    if child:
        os.close(here)
        with open(there, encoding="utf-8") as file:
            failed = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), failed or test
    code, first = BROKEN, FirstFailure()
    try:
        signal.alarm(SECONDS)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        if mutant is None or mutant.apply():
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", test], plugins=[first]))
            os.write(here, first.test.encode())
    finally:
        os._exit(code)


@cache
def passes(test: str) -> bool:
    """Whether a test passes as the code is: one that fails anyway would kill every mutant."""
    return in_a_fork(test)[0] == OK


def judge(mutant: Mutant) -> tuple[str, str]:
    """`killed`, with the test that noticed it, `explained` or `survived`."""
    for test in mutant.tests:
        code, noticed = in_a_fork(test, mutant)
        if code in (FAILED, -signal.SIGALRM):
            if not passes(noticed):
                raise click.ClickException(f"{noticed} fails without any change: run it first")
            return "killed", noticed
        if code != OK:
            raise NoSuchPlace(f"{mutant.name}: the change is no program, or changes nothing")
    return "explained" if mutant.redundant else "survived", ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--only", default="", help="Only mutants whose name contains this.")
@click.option("--into", type=click.Path(path_type=Path), help="Keep the verdicts here, beside those of other runs.")
@click.option("--missing", is_flag=True, help="Only mutants of which the file of --into has no verdict.")
def main(as_json: bool, only: str, into: Path | None, missing: bool) -> None:
    """Change security-relevant lines one at a time; every change must be noticed or explained."""
    known = json.loads(into.read_text())["verdicts"] if into is not None and into.exists() else {}
    listed = read_mutants()
    chosen = [m for m in listed if only in m.name and not (missing and m.key in known)]
    tests = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "vectors")]
    for mutant in chosen:
        mutant.source()
    # What all of them need is imported once.
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *tests])
    verdicts: dict[str, str] = {}
    for number, mutant in enumerate(chosen, start=1):
        began = time.monotonic()
        verdict, noticed = judge(mutant)
        verdicts[mutant.key] = verdict
        if into is not None:
            kept = report_of(listed, known | verdicts)
            into.write_text(json.dumps(kept, indent=1) + "\n")
        took = f"{time.monotonic() - began:.0f} s"
        click.echo(f"{number}/{len(chosen)} {verdict} {noticed} {took}: {mutant.name}", err=True)
    report = report_of(chosen, verdicts)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(", ".join(f"{name} {report[name]}" for name in ("mutants", "killed", "explained")))
    sys.exit(1 if report["survived"] else 0)


def report_of(mutants: Sequence[Mutant], verdicts: Mapping[str, str]) -> dict[str, Any]:
    """The figures over those of these mutants that have a verdict; nothing of others is kept."""
    found = {mutant.key: verdicts[mutant.key] for mutant in mutants if mutant.key in verdicts}
    counts = Counter(found.values())
    return {
        "mutants": len(found),
        "killed": counts["killed"],
        "explained": counts["explained"],
        "survived": [mutant.name for mutant in mutants if found.get(mutant.key) == "survived"],
        "verdicts": found,
    }


if __name__ == "__main__":
    main()
