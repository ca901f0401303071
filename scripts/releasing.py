"""Makes a release from what is committed: `scripts/release --out DIR`.

    DIR/lazaret-VERSION-py3-none-any.whl, lazaret-VERSION.tar.gz    the same bytes from the same commit, on any day
    DIR/ROLE/wheels/                                                everything that the role needs, for `--no-index`
    DIR/ROLE/sbom.cdx.json                                          its bill of materials (CycloneDX 1.6)
    DIR/ROLE/install                                                makes an environment from the two
    DIR/SHA256SUMS, SHA256SUMS.sig                                  over all of it; signed where a key is given

Nothing here is random and nothing asks for the time: a bill of materials has no serial number, and the dates in the
archives are the commit's.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Final

import click
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lazaret.errors import ConfigError, ToolkitError
from lazaret.files import write_atomically
from lazaret.software import SBOM, SBOM_FOLDER
from lazaret.terminal import say

ROOT: Final = Path(__file__).resolve().parents[1]
ROLES: Final = ("audit", "consortium", "coordinator", "site", "lab")
MOST_MEGABYTES: Final = {"audit": 300, "coordinator": 400}
SUMS, SIGNATURE, PUBLIC_KEY = "SHA256SUMS", "SHA256SUMS.sig", "release-key.pem"
_GPL: Final = re.compile(r"\bA?GPL|(?<!Lesser )(?<!Library )General Public", re.IGNORECASE)

_INSTALL: Final = """\
#!/bin/sh
# Installs this role into a new environment, without a network: ./install FOLDER
set -eu
[ $# -eq 1 ] || {{ echo "usage: install FOLDER" >&2; exit 2; }}
here=$(cd "$(dirname "$0")" && pwd)
"${{PYTHON:-python3}}" -m venv "$1"
"$1/bin/python" -m pip install --quiet --no-index --find-links "$here/wheels" 'lazaret[{role}]=={version}'
mkdir -p "$1/{folder}"
cp "$here/{sbom}" "$1/{folder}/{sbom}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One wheel, as its own metadata and its bytes describe it."""

    name: str
    version: str
    license: str
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Distribution:
        """:raises ConfigError: if the file is no wheel."""
        try:
            with zipfile.ZipFile(path) as archive:
                (entry,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
                metadata = HeaderParser().parsestr(archive.read(entry).decode("utf-8", "replace"))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"is not a wheel: {error}", where=str(path)) from None
        classifiers = [line for line in metadata.get_all("Classifier", []) if line.startswith("License ::")]
        stated = metadata["License-Expression"] or "; ".join(line.split(" :: ")[-1] for line in classifiers)
        return cls(
            name=re.sub(r"[-_.]+", "-", metadata["Name"]).lower(),
            version=metadata["Version"],
            license=stated or (metadata["License"] or "not stated").strip().splitlines()[0][:100],
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def build(commit: str, out: Path) -> tuple[Path, Path]:
    """The wheel and the source archive of a commit, from a copy of its own."""
    seconds = _git("show", "-s", "--format=%ct", commit).strip()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        with tarfile.open(fileobj=io.BytesIO(_git_bytes("archive", commit))) as archive:
            archive.extractall(source, filter="data")
        for path in source.rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        for hook in ("build_sdist", "build_wheel"):
            code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
            _run([sys.executable, "-c", code, scratch], cwd=source, env=os.environ | {"SOURCE_DATE_EPOCH": seconds})
        (wheel,), (archive_path,) = Path(scratch).glob("*.whl"), Path(scratch).glob("*.tar.gz")
        out.mkdir(parents=True, exist_ok=True)
        target = out / archive_path.name
        write_atomically(target, normal_archive(archive_path.read_bytes(), int(seconds)), mode=0o644)
        return Path(shutil.copyfile(wheel, out / wheel.name)), target


def normal_archive(data: bytes, seconds: int) -> bytes:
    """The same files in order of their names, without owner, and with one date: what setuptools writes has today's."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as old,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry in sorted(old.getmembers(), key=lambda entry: entry.name):
            plain = tarfile.TarInfo(entry.name)
            plain.type, plain.size, plain.mode, plain.mtime = entry.type, entry.size, entry.mode, seconds
            new.addfile(plain, old.extractfile(entry) if entry.isfile() else None)
    return gzip.compress(packed.getvalue(), mtime=0)


def gather(wheel: Path, role: str, folder: Path, version: str) -> list[Distribution]:
    """A folder that installs a role without a network.

    :raises ConfigError: if a package of it is under a licence that this distribution does not carry.
    """
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    _run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:",
            "--constraint", str(ROOT / "constraints.txt"), "--dest", str(wheels), f"lazaret[{role}] @ {wheel.as_uri()}",
        ]
    )  # fmt: skip
    found = sorted((Distribution.read(path) for path in wheels.glob("*.whl")), key=lambda one: one.name)
    refuse_gpl(found)
    write_atomically(folder / SBOM, bill_of_materials(found, role, version), mode=0o644)
    install = _INSTALL.format(role=role, version=version, folder=SBOM_FOLDER, sbom=SBOM)
    write_atomically(folder / "install", install.encode(), mode=0o755)
    return found


def refuse_gpl(found: list[Distribution]) -> None:
    """:raises ConfigError: that names the packages; the lesser licence is not meant."""
    if wrong := [f"{one.name} ({one.license})" for one in found if _GPL.search(one.license)]:
        raise ConfigError(f"under the GPL: {', '.join(wrong)}", where="licences", hint="replace the package")


def bill_of_materials(found: list[Distribution], role: str, version: str) -> bytes:
    """CycloneDX 1.6, in one form only: sorted, without serial number and time."""
    components = [
        {
            "type": "library",
            "bom-ref": one.purl,
            "name": one.name,
            "version": one.version,
            "purl": one.purl,
            "licenses": [{"license": {"name": one.license}}],
            "hashes": [{"alg": "SHA-256", "content": one.sha256}],
        }
        for one in sorted(found, key=lambda one: one.name)
    ]
    about = {"type": "application", "name": f"lazaret[{role}]", "version": version, "bom-ref": f"lazaret[{role}]"}
    metadata = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": about},
        "components": components,
    }
    return json.dumps(metadata, indent=1, sort_keys=True).encode() + b"\n"


def installed_megabytes(folder: Path, target: Path) -> float:
    """Installs the role as its users do, and weighs the environment."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    _run([str(folder / "install"), str(target)], env=own | {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull})
    return sum(path.lstat().st_size for path in target.rglob("*") if not path.is_dir()) / 1e6


def checksums(out: Path) -> bytes:
    """As `sha256sum --check` reads them."""
    mine = {SUMS, SIGNATURE, PUBLIC_KEY}
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    lines = (f"{hashlib.sha256((out / name).read_bytes()).hexdigest()}  {name}\n" for name in names if name not in mine)
    return "".join(lines).encode()


def sign(out: Path, key_path: Path) -> None:
    """:raises ConfigError: if the key cannot be read, or is no Ed25519 key."""
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the release key cannot be read: {error}", where=str(key_path)) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            "is not an Ed25519 key", where=str(key_path), hint=f"openssl genpkey -algorithm ed25519 -out {key_path}"
        )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_atomically(out / SIGNATURE, key.sign((out / SUMS).read_bytes()), mode=0o644)
    write_atomically(out / PUBLIC_KEY, public, mode=0o644)


def release(out: Path, roles: tuple[str, ...], key: Path | None, *, install: bool) -> dict[str, Any]:
    """Everything; what it found, for people and programs."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError("is not empty", where=str(out), hint="choose a new folder for a release")
    commit = _git("rev-parse", "HEAD").strip()
    version = tomllib.loads(_git("show", f"{commit}:pyproject.toml"))["project"]["version"]
    say(f"building {version} from {commit[:12]}, twice")
    with tempfile.TemporaryDirectory() as scratch:
        first, second = build(commit, out), build(commit, Path(scratch))
        same = all(one.read_bytes() == other.read_bytes() for one, other in zip(first, second, strict=True))
        found: dict[str, Any] = {"version": version, "commit": commit, "reproducible": same, "sbom": {}, "packages": {}}
        for role in roles:
            say(f"gathering what the role {role} needs")
            listed = gather(first[0], role, out / role, version)
            found["packages"][role] = len(listed)
            found["sbom"][role] = hashlib.sha256((out / role / SBOM).read_bytes()).hexdigest()
            if install:
                found[_weight_key(role)] = round(installed_megabytes(out / role, Path(scratch) / role), 1)
        if install and {"audit", "coordinator", "site"} <= set(roles):
            say("rounds among the installed roles, and an audit of them")
            found |= _tried(out, Path(scratch), roles)
    write_atomically(out / SUMS, checksums(out), mode=0o644)
    if key is not None:
        sign(out, key)
    found["signed"] = key is not None
    found["ok"] = good(found)
    return found


def good(found: dict[str, Any]) -> bool:
    """Everything that was tried holds; roles that were left out were not tried."""
    light = all(found.get(_weight_key(role), 0) <= most for role, most in MOST_MEGABYTES.items())
    return light and all(found.get(name, True) for name in ("reproducible", "audit_clean", "sbom_as_logged"))


def _tried(out: Path, environments: Path, roles: tuple[str, ...]) -> dict[str, Any]:
    from scripts.local_federation.federation import WaitFailed
    from scripts.local_federation.quickstart import try_release  # which loads what a release without it does not need

    try:
        places, bills = ({role: folder / role for role in roles} for folder in (environments, out))
        return try_release(environments / "federation", places, {role: bill / SBOM for role, bill in bills.items()})
    except WaitFailed as error:
        raise ConfigError(str(error), where="installed roles") from error


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new folder.")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, help="Only these; all if left out.")
@click.option("--key", type=click.Path(path_type=Path, dir_okay=False), help="Ed25519 private key (PEM) that signs.")
@click.option("--install/--no-install", default=True, help="Install each role without a network, and weigh it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(out: Path, roles: tuple[str, ...], key: Path | None, install: bool, as_json: bool) -> None:
    """Make a release from what is committed."""
    try:
        found = release(out, roles or ROLES, key, install=install)
    except ToolkitError as error:
        click.echo(f"release: error: {error}", err=True)
        sys.exit(2)
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))
    sys.exit(0 if found["ok"] else 1)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"version {found['version']} of {found['commit']}"
    yield "two builds have the same bytes" if found["reproducible"] else "TWO BUILDS DIFFER"
    for role, count in found["packages"].items():
        weight = f", {found[_weight_key(role)]} MB installed" if _weight_key(role) in found else ""
        yield f"{role}: {count} packages{weight}, sbom {found['sbom'][role]}"
    if "verdict" in found:
        same = "is" if found["sbom_as_logged"] else "IS NOT"
        yield f"{found['rounds']} rounds among installed roles: audit {found['verdict']}, the logged sbom {same} theirs"
    yield "signed" if found["signed"] else "not signed: give --key"


def _weight_key(role: str) -> str:
    return f"{'auditor' if role == 'audit' else role}_megabytes"


def _run(command: list[str], **how: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"{' '.join(command[:4])} failed: {' / '.join(output[-3:])}", where="release")


def _git(*words: str) -> str:
    return _git_bytes(*words).decode()


def _git_bytes(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise ConfigError(f"git {words[0]} failed: {done.stderr.decode().strip()}", where=str(ROOT))
    return done.stdout


if __name__ == "__main__":
    main()
