"""`init` asks a person for what no flag says, and tells a script which flag is missing; nothing is half-made."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cli as coordinator
from lazaret import terminal
from lazaret.errors import ConfigError
from security.identity.enrolment_files import EnrolmentRequest
from security.identity.pki import Purpose, read_request
from site_agent.cli import cli as site_agent
from site_agent.config import SiteConfig, placed

SITE = {"--federation": "lesions", "--name": "graz", "--address": "hub.example:7443", "--data": "csv:images/table.csv"}
HUB = {"--federation": "lesions", "--name": "hub", "--host": "hub.example", "--listen": "0.0.0.0:7444"}


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "can_ask", lambda: True)


def typed(command: click.Group, folder: Path, told: dict[str, str], answers: str | None = None) -> Result:
    words = [word for pair in told.items() for word in pair]
    return CliRunner().invoke(command, ["init", str(folder), *words], input=answers)


@pytest.mark.usefixtures("at_a_terminal")
def test_a_hospital_is_asked_for_everything(tmp_path: Path) -> None:
    answers = "lesions\ngraz\nhub.example:7443\nfolders:/data/skin\nconsent\n\n"
    done = typed(site_agent, tmp_path / "graz", {}, answers)
    assert done.exit_code == 0, done.output
    config = tomllib.loads((tmp_path / "graz" / "site.toml").read_text())
    assert config["coordinator"]["address"] == "hub.example:7443" and config["data"]["source"] == "folders:/data/skin"
    assert config["site"]["initial_model"] == "initial.safetensors" and config["data"]["legal_basis"] == "consent"
    request = EnrolmentRequest.read(tmp_path / "graz" / "identity" / "request.json")
    assert (request.federation, request.member) == ("lesions", "graz")
    # Only the fingerprint is a result; questions and remarks are for people.
    assert re.sub("[^0-9a-f]", "", done.stdout) == re.sub("[^0-9a-f]", "", request.fingerprint)


@pytest.mark.usefixtures("at_a_terminal")
def test_an_operator_is_asked_for_names_and_port(tmp_path: Path) -> None:
    done = typed(coordinator, tmp_path / "hub", {}, "lesions\nhub\nhub.example, 192.0.2.7\n\n")
    assert done.exit_code == 0, done.output
    assert tomllib.loads((tmp_path / "hub" / "coordinator.toml").read_text())["listen"] == "0.0.0.0:7443"
    request = EnrolmentRequest.read(tmp_path / "hub" / "identity" / "request.json")
    assert read_request(request.tls_request, Purpose.TLS).hosts == ("hub.example", "192.0.2.7")


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize("missing", SITE)
def test_only_what_is_missing_is_asked(tmp_path: Path, missing: str) -> None:
    told = SITE | {"--initial-model": "m.safetensors", "--legal-basis": "consent"}
    del told[missing]
    done = typed(site_agent, tmp_path / "graz", told, SITE[missing] + "\n")
    assert done.exit_code == 0 and done.output.count(": ") <= 2, done.output
    assert (tmp_path / "graz" / "site.toml").exists()


@pytest.mark.parametrize(
    ("command", "flags"), [(site_agent, SITE), (coordinator, HUB)], ids=["site-agent", "coordinator"]
)
def test_a_script_is_told_which_flag_is_missing(tmp_path: Path, command: click.Group, flags: dict[str, str]) -> None:
    for missing in flags:
        if missing in ("--listen", "--address"):
            continue  # has a default
        done = typed(
            command, tmp_path / "new", {flag: value for flag, value in flags.items() if flag != missing}, "x\n"
        )
        assert isinstance(done.exception, ConfigError), done.output
        assert str(done.exception) == f"{missing} is missing" and missing in (done.exception.hint or "")
        assert not (tmp_path / "new").exists()
    assert typed(command, tmp_path / "new", flags).exit_code == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"--address": "hub.example"}, "host:port"),
        ({"--address": "hub.example:99999"}, "host:port"),
        ({"--address": "hub.example:7443\n"}, "host:port"),
        ({"--data": "table.csv"}, "unknown data source"),
        ({"--name": "Graz LKH"}, "is not allowed"),
    ],
)
def test_a_wrong_answer_makes_no_keys(tmp_path: Path, wrong: dict[str, str], words: str) -> None:
    done = typed(site_agent, tmp_path / "graz", SITE | wrong)
    assert isinstance(done.exception, ConfigError) and words in str(done.exception)
    assert not (tmp_path / "graz").exists()


def test_a_relative_folder_of_images_is_the_one_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed from here, found from anywhere; edited in the file, it starts at the file."""
    monkeypatch.chdir(tmp_path)
    typed(site_agent, Path("graz"), SITE)
    monkeypatch.chdir("/")
    config = tmp_path / "graz" / "site.toml"
    assert SiteConfig.read(config).data.source == f"csv:{tmp_path}/images/table.csv"
    config.write_text(config.read_text().replace(f"{tmp_path}/images", "../skin"))
    assert SiteConfig.read(config).data.source == f"csv:{tmp_path}/skin/table.csv"
    for unchanged in ("generated", "generated:scale=0.1", "ham10000", "npz:/a.npz?partition=natural"):
        assert placed(unchanged, tmp_path) == unchanged


def test_json_stays_one_object(tmp_path: Path) -> None:
    words = [word for pair in SITE.items() for word in pair]
    done = CliRunner().invoke(site_agent, ["init", str(tmp_path / "graz"), *words, "--json"])
    assert set(json.loads(done.stdout)) == {"config", "request", "fingerprint"}
