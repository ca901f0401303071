"""A release: same bytes twice, a folder a role that installs without a network, licences, checksums, a signature."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lazaret.errors import ConfigError
from scripts.releasing import (
    PUBLIC_KEY,
    ROOT,
    SIGNATURE,
    SUMS,
    Distribution,
    bill_of_materials,
    build,
    checksums,
    good,
    normal_archive,
    refuse_gpl,
    release,
    sign,
)

PEM, PKCS8, OPEN = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()


def archive(order: list[str], *, mtime: int, owner: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as new:
        for name in order:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uname = len(name), mtime, owner
            new.addfile(entry, io.BytesIO(name.encode()))
    return packed.getvalue()


def test_day_owner_and_order_do_not_change_an_archive() -> None:
    one, other = archive(["b", "a"], mtime=1, owner="x"), archive(["a", "b"], mtime=2, owner="y")
    assert one != other and normal_archive(one, 7) == normal_archive(other, 7) != normal_archive(one, 8)
    with tarfile.open(fileobj=io.BytesIO(normal_archive(one, 7))) as read:
        assert [(entry.name, entry.mtime, entry.uid) for entry in read] == [("a", 7, 0), ("b", 7, 0)]


def wheel(folder: Path, name: str, *lines: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(
            f"{name}-1.0.dist-info/METADATA", "\n".join([f"Name: {name}", "Version: 1.0", *lines, "", "text"])
        )
    return path


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("License-Expression: Apache-2.0", False),
        ("License-Expression: LGPL-3.0-or-later", False),
        ("License: BSD 3-Clause", False),
        ("Classifier: License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)", False),
        ("License-Expression: GPL-3.0-or-later", True),
        ("License: GPLv3+", True),
        ("Classifier: License :: OSI Approved :: GNU General Public License v2 (GPLv2)", True),
        ("License-Expression: MIT AND AGPL-3.0-only", True),
    ],
)
def test_a_package_under_the_gpl_is_refused_by_name(tmp_path: Path, line: str, refused: bool) -> None:
    found = [Distribution.read(wheel(tmp_path, "Some_Package", line))]
    if not refused:
        refuse_gpl(found)
        return
    with pytest.raises(ConfigError, match="some-package"):
        refuse_gpl(found)


def test_a_file_that_is_no_wheel_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match="not a wheel"):
        Distribution.read(tmp_path / "x.whl")


def test_the_bill_of_materials_lists_every_wheel_by_its_hash(tmp_path: Path) -> None:
    paths = [wheel(tmp_path, name, "License-Expression: MIT") for name in ("beta", "Alpha")]
    told = bill_of_materials([Distribution.read(path) for path in paths], "audit", "0.2.0")
    assert told == bill_of_materials([Distribution.read(path) for path in reversed(paths)], "audit", "0.2.0")
    read = json.loads(told)
    assert (read["bomFormat"], read["specVersion"], "serialNumber" in read) == ("CycloneDX", "1.6", False)
    by_name = {one["name"]: one for one in read["components"]}
    assert by_name["alpha"]["purl"] == "pkg:pypi/alpha@1.0"
    assert by_name["beta"]["hashes"][0]["content"] == hashlib.sha256(paths[0].read_bytes()).hexdigest()


def test_a_changed_file_or_list_is_found(tmp_path: Path) -> None:
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "install").write_text("#!/bin/sh\n")
    (tmp_path / SUMS).write_bytes(checksums(tmp_path))
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key").write_bytes(key.private_bytes(PEM, PKCS8, OPEN))
    sign(tmp_path, tmp_path / "key")
    public = serialization.load_pem_public_key((tmp_path / PUBLIC_KEY).read_bytes())
    assert isinstance(public, Ed25519PublicKey)
    signature, sums = (tmp_path / SIGNATURE).read_bytes(), (tmp_path / SUMS).read_bytes()
    public.verify(signature, sums)
    with pytest.raises(InvalidSignature):
        public.verify(signature, sums.replace(b"audit", b"adult"))
    check = ["sha256sum", "--check", "--status", SUMS]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "audit" / "install").write_text("#!/bin/sh\nrm\n")
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 1


def test_only_an_ed25519_key_signs(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(generate_private_key(SECP256R1()).private_bytes(PEM, PKCS8, OPEN))
    for path in (tmp_path / "key", tmp_path / "none"):
        with pytest.raises(ConfigError):
            sign(tmp_path, path)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        release(tmp_path, (), None, install=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "fault",
    [
        {"reproducible": False},
        {"auditor_megabytes": 300.1},
        {"coordinator_megabytes": 400.1},
        {"audit_clean": False},
        {"sbom_as_logged": False},
    ],
)
def test_a_release_with_a_fault_is_not_ok(fault: dict[str, object]) -> None:
    found = {"reproducible": True, "auditor_megabytes": 300.0, "coordinator_megabytes": 400.0, "site_megabytes": 9e9}
    tried = {"audit_clean": True, "sbom_as_logged": True}
    assert good(found) and good(found | tried)
    assert not good(found | tried | fault)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_roles_install_without_a_network_and_work_together(tmp_path: Path) -> None:
    """The auditor's and the operator's environment: small, without torch, and the list is the one that is logged.

    Rounds of a coordinator and sites, each in its role's environment, are audited in the auditor's.
    """
    found = release(tmp_path / "out", ("audit", "coordinator", "site"), None, install=True)
    assert found["ok"] and found["audit_clean"] and found["sbom_as_logged"] and found["rounds"] == 2
    assert found["reproducible"] and found["auditor_megabytes"] <= 300 and found["coordinator_megabytes"] <= 400
    assert build("HEAD", tmp_path / "again")[0].read_bytes() == next((tmp_path / "out").glob("*.whl")).read_bytes()
    clean = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull}
    for role, command in (("audit", "privacy-audit"), ("coordinator", "coordinator")):
        subprocess.run([tmp_path / "out" / role / "install", tmp_path / role], check=True, env=clean)
        subprocess.run([tmp_path / role / "bin" / command, "--help"], check=True, capture_output=True)
        code = "from lazaret import software; print(software.sbom_digest(), software.differences())"
        said = subprocess.run(
            [tmp_path / role / "bin" / "python", "-c", code], check=True, capture_output=True, text=True
        )
        assert said.stdout.split() == [found["sbom"][role], "()"]
        missing = subprocess.run(
            [tmp_path / role / "bin" / "python", "-c", "import torch"], capture_output=True, check=False
        )
        assert missing.returncode != 0
    shutil.rmtree(tmp_path)
