"""The distribution: what is in it, what it needs, and what must be in no file of the repository."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP = ("coordinator", "lazaret", "npr", "protos", "security", "site_agent")

# Written in pieces, so that this file is not its own finding.
FORBIDDEN = ("../" + "shared", "/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "pypi" + ".org", "python" + "hosted")


def committed():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_packages_are_the_tree():
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in TOP
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_python_file_is_in_a_listed_package():
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    for top in TOP:
        for path in (ROOT / top).rglob("*.py"):
            assert ".".join(path.parent.relative_to(ROOT).parts) in packages, path


def test_console_scripts_exist():
    for name, target in PROJECT["project"]["scripts"].items():
        module, _, function = target.partition(":")
        source = ROOT / (module.replace(".", "/") + ".py")
        assert re.search(rf"^def {function}\(", source.read_text(), re.MULTILINE), name


def test_constraints_pin_every_dependency():
    lines = [line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^=\s]+", pin) for pin in pins), "a constraint that is not one version"
    pinned = {normal(pin.split("==")[0]) for pin in pins}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(name for group in extras.values() for name in group)]
    # An extra may ask for other extras of this package, which has no pin of its own.
    missing = {normal(re.split(r"[\[<>=!~; ]", name)[0]) for name in wanted} - pinned - {PROJECT["project"]["name"]}
    assert not missing


def test_no_file_names_a_machine_or_a_registry():
    findings = []
    for path in committed():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        findings += [f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN if word in text]
    assert not findings


def test_no_pickle_and_no_torch_load():
    """Weights are safetensors and arrays are read without pickles; loading a pickle runs whatever is in it."""
    imports = r"^\s*(import|from) (pickle|dill|joblib|shelve)\b"
    pattern = re.compile(imports + r"|torch\.load\(|allow_pickle=True", re.MULTILINE)
    sources = [path for top in TOP for path in (ROOT / top).rglob("*.py")]
    assert not [str(path.relative_to(ROOT)) for path in sources if pattern.search(path.read_text())]


def test_the_licence_is_the_apache_licence():
    import hashlib

    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert PROJECT["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", ["demo", "test"])
def test_scripts_are_executable_and_never_need_more_than_pip(name):
    script = ROOT / "scripts" / name
    assert script.stat().st_mode & 0o111
    assert not re.search(r"\b(apt|apt-get|sudo|conda)\b", script.read_text())
