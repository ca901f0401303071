"""The root's second key: made by `publish`, under the same passphrase, and given to auditors in root.pem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lazaret.errors import ConfigError, ManifestRejected
from security.clock import SystemClock
from security.consortium import commands
from security.consortium.authority import Authority
from security.consortium.cli import cli
from security.identity.acceptance import unseal
from tests.support.consortium_world import NOW, World


def test_the_key_is_sealed_like_the_first_one(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "lesions", passphrase=b"long enough", now_ms=NOW)
    key = authority.unlock_ml_dsa(b"long enough")
    data = (tmp_path / "root-ml-dsa.key").read_bytes()
    assert b"BEGIN ENCRYPTED" in data and (tmp_path / "root-ml-dsa.key").stat().st_mode & 0o777 == 0o600
    assert authority.unlock_ml_dsa(b"long enough").private_bytes_raw() == key.private_bytes_raw()
    with pytest.raises(ConfigError, match="does not open"):
        authority.unlock_ml_dsa(b"another one")
    assert Authority.open(tmp_path).root == authority.root


def test_the_command_turns_it_on_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: NOW)
    world = World.make(tmp_path)
    folder = str(world.authority.folder)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(cli, [*arguments, "--dir", folder], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    run("publish", "--no-passphrase")
    assert json.loads(run("show", "--json"))["manifest"]["root_ml_dsa"] is None
    world.turn_on_ml_dsa()
    run("publish", "--no-passphrase")
    assert "signed too, with the key" in run("show")
    assert unseal(world.published())[0].version == 2
    assert b"PUBLIC KEY" in (world.authority.folder / "root.pem").read_bytes()


def test_a_manifest_is_shown_under_the_key_that_came_with_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: NOW)
    world = World.make(tmp_path / "world")
    world.publish()
    files = {"old": tmp_path / "old.json", "new": tmp_path / "new.json"}
    files["old"].write_bytes(world.published())
    world.turn_on_ml_dsa()
    world.publish()
    files["new"].write_bytes(world.published())
    both, certificate = world.authority.folder / "root.pem", tmp_path / "root.pem"
    certificate.write_text(both.read_text().split("-----BEGIN PUBLIC")[0])

    def show(name: str, root: Path) -> Any:
        result = CliRunner().invoke(cli, ["show", str(files[name]), "--root", str(root), "--json"])
        return result.exception or json.loads(result.stdout)

    assert "ML-DSA" not in " ".join(show("new", both)["warnings"])
    assert "no ML-DSA key" in " ".join(show("new", certificate)["warnings"])
    assert "ML-DSA" not in " ".join(show("old", certificate)["warnings"])
    assert isinstance(show("old", both), ManifestRejected), "whoever forges ECDSA signatures could have made it"
    monkeypatch.setattr(commands, "check_root_key", lambda *_: None)
    assert show("old", both)["version"] == 1, "twin: the key is there, and is not looked at"


def test_there_is_no_way_back(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    world.turn_on_ml_dsa()
    world.publish()
    world.write_plan(world.authority.plan_path.read_text().replace("ml_dsa = true", "ml_dsa = false"))
    with pytest.raises(ManifestRejected, match="not signed with the ML-DSA key of version 1"):
        world.publish()
    assert unseal(world.published())[0].version == 1
