"""Which software runs, for the privacy log: bill of materials, differences from it, and the image that is stated."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from lazaret import software
from lazaret.errors import ConfigError
from security.log.events import AgentStart, SoftwareDiffers
from security.log.opening import start_entries

HERE = {"lazaret": "0.2.0", "numpy": "2.4.6", "pip": "26.0"}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with three packages; returns where its bill of materials would be."""
    monkeypatch.setattr(software.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(software, "_installed", lambda: dict(HERE))
    path = tmp_path / "share" / "lazaret" / "sbom.cdx.json"
    path.parent.mkdir(parents=True)
    return path


def listed(path: Path, **versions: str) -> None:
    path.write_text(json.dumps({"components": [{"name": name, "version": at} for name, at in versions.items()]}))


def test_without_a_bill_of_materials_nothing_is_claimed(environment: Path) -> None:
    assert software.sbom_digest() is None and software.differences() == ()
    (entry,) = start_entries(config="0" * 64, proto="1" * 64)
    assert isinstance(entry, AgentStart) and entry.sbom is None


def test_the_listed_environment_is_logged_by_the_digest_of_the_list(environment: Path) -> None:
    listed(environment, lazaret="0.2.0", numpy="2.4.6")
    (entry,) = start_entries(config="0" * 64, proto="1" * 64)
    assert entry.sbom == hashlib.sha256(environment.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"lazaret": "0.2.0", "numpy": "2.4.5"}, "numpy: 2.4.6 is installed, 2.4.5 is listed"),
        ({"lazaret": "0.2.0"}, "numpy: 2.4.6 is installed, none is listed"),
        (HERE | {"torch": "2.13.0"}, "torch: none is installed, 2.13.0 is listed"),
        (HERE | {"pip": "25.0"}, "pip: 26.0 is installed, 25.0 is listed"),
    ],
)
def test_every_difference_is_an_entry(environment: Path, versions: dict[str, str], said: str) -> None:
    listed(environment, **versions)
    _, warning = start_entries(config="0" * 64, proto="1" * 64)
    assert isinstance(warning, SoftwareDiffers) and (warning.count, warning.packages) == (1, (said,))


@pytest.mark.parametrize("content", ["", "[]", '{"components": [{}]}', '{"components": 1}'])
def test_a_damaged_list_is_one_error(environment: Path, content: str) -> None:
    environment.write_text(content)
    with pytest.raises(ConfigError, match="bill of materials"):
        software.differences()


def test_the_image_is_what_the_launcher_states(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.image_digest() is None
    for stated in (f"sha256:{'a' * 64}", f"lazaret-site@sha256:{'a' * 64}"):
        monkeypatch.setenv("LAZARET_IMAGE", stated)
        assert software.image_digest() == "a" * 64
    for wrong in ("latest", f"sha256:{'a' * 63}", f"sha256:{'a' * 64}\n"):
        monkeypatch.setenv("LAZARET_IMAGE", wrong)
        with pytest.raises(ConfigError, match="digest of an image"):
            software.image_digest()
