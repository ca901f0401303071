"""What people get wrong: each gets one line with what, where and what to do, the right exit code, and loses nothing."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli import cli as coordinator_command
from lazaret.terminal import run_command
from scripts.local_federation.federation import HOST, ROOT
from scripts.local_federation.party import cli as party_command
from security.audit.facts import read_history
from security.clock import SystemClock
from security.consortium.cli import cli as consortium_command
from site_agent.cli import cli as site_command
from tests.support.federation import NumberFederation

pytestmark = pytest.mark.timeout(180)  # above the waits within, which say what they waited for
DAY = 86_400_000
COMMANDS = {
    "coordinator": coordinator_command,
    "site-agent": site_command,
    "party": party_command,
    "consortium": consortium_command,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> NumberFederation:
    return NumberFederation(tmp_path_factory.mktemp("bad"))


@pytest.fixture
def federation(template: NumberFederation, tmp_path: Path) -> NumberFederation:
    """A fresh copy on disk; nothing runs."""
    folder = tmp_path / "federation"
    shutil.copytree(template.folders.folder, folder)
    return template.at(folder)


class Typed:
    """Runs a command as its console script does, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, program: str, *words: object) -> tuple[int, str]:
        self._monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_command(COMMANDS[program], program)
        return int(ended.value.code or 0), self._capsys.readouterr().err


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def complaint(said: str) -> str:
    """The one line about the error; a hint may follow, a traceback must not."""
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if ": error: " in line]
    assert len(lines) == 1, said
    return lines[0]


def coordinator_config(federation: NumberFederation) -> Path:
    return federation.folders.coordinator / "coordinator.toml"


def site_config(federation: NumberFederation, name: str = "site0") -> Path:
    return federation.folders.site(name) / "site.toml"


# Configuration.


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[rounds]\n", "[rounds]\ngrce = 3.0\n", ("rounds.grce", "unknown key", "did you mean grace?")),
        ('state = "state"', "state = 5", ("state", "string")),
        (':{port}"', '"', ("listen", "host:port")),
        (':{port}"', ':99999"', ("listen", "no port above 65535")),
        ('127.0.0.1:7480"', '127.0.0.1:70000"', ("dashboard.listen", "no port above 65535")),
        ('initial_model = "initial.safetensors"', 'initial_model = "gone.safetensors"', ("gone.safetensors",)),
        ('state = "state"', "state = ", ("not toml",)),
    ],
)
def test_a_wrong_coordinator_configuration(
    federation: NumberFederation, typed: Typed, old: str, new: str, expected: tuple[str, ...]
) -> None:
    path = coordinator_config(federation)
    path.write_text(path.read_text().replace(old.format(port=federation.folders.port), new))
    code, said = typed("coordinator", "--config", path)
    assert code == 2
    assert "coordinator.toml" in complaint(said) or "gone.safetensors" in complaint(said)
    for words in expected:
        assert words in said.lower()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[policy]", "[policy]\nleast_cohrt = 3\n#", ("least_cohrt", "did you mean least_cohort?")),
        ("[site]\n", "[site]\nthreads = 'four'\n", ("threads", "integer")),
        ('initial_model = "initial.safetensors"', 'initial_model = "gone.safetensors"', ("gone.safetensors",)),
        ('address = "', 'address = "http://', ("address",)),
    ],
)
def test_a_wrong_site_configuration(
    federation: NumberFederation, typed: Typed, old: str, new: str, expected: tuple[str, ...]
) -> None:
    path = site_config(federation)
    path.write_text(path.read_text().replace(old, new))
    code, said = typed("site-agent", "--config", path)
    assert code == 2
    complaint(said)
    for words in expected:
        assert words in said.lower()


@pytest.mark.parametrize("program", ["coordinator", "site-agent"])
def test_no_configuration_at_all(typed: Typed, tmp_path: Path, program: str) -> None:
    code, said = typed(program, "--config", tmp_path / "nothing.toml")
    assert code == 2 and "nothing.toml" in complaint(said) and "init" in said


# Certificates and clocks.


@pytest.mark.parametrize("days", [-30, 400])
@pytest.mark.parametrize("who", ["coordinator", "site"])
def test_a_clock_that_is_off_by_days_and_an_expired_certificate(
    federation: NumberFederation, typed: Typed, monkeypatch: pytest.MonkeyPatch, who: str, days: int
) -> None:
    before = tree(federation.folders.folder)
    now = SystemClock().now_ms()
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: now + days * DAY)
    if who == "coordinator":
        code, said = typed("coordinator", "--config", coordinator_config(federation))
    else:
        code, said = typed("party", "site", "--numbers", "--config", site_config(federation))
    assert code == 1
    assert ("valid from" if days < 0 else "expired at") in complaint(said)
    assert "clock" in said.partition("hint: ")[2]
    complaint(said)
    assert tree(federation.folders.folder) == before


def test_another_federations_manifest(federation: NumberFederation, typed: Typed, tmp_path: Path) -> None:
    other = NumberFederation(tmp_path / "other")
    before = tree(federation.folders.folder)
    for program, config in (("coordinator", coordinator_config), ("site-agent", site_config)):
        words = ["--config", config(federation), "join", "--manifest", other.folders.manifest]
        if program == "coordinator":
            words = ["join", "--manifest", other.folders.manifest, "--config", config(federation)]
        code, said = typed(program, *words)
        assert code == 1 and "manifest" in complaint(said)
    assert tree(federation.folders.folder) == before


def test_a_site_that_was_revoked(federation: NumberFederation, typed: Typed) -> None:
    folders = federation.folders
    assert typed("consortium", "revoke", "site0", "--reason", "left", "--dir", folders.consortium)[0] == 0
    folders.publish()
    code, _ = typed("site-agent", "--config", site_config(federation), "join", "--manifest", folders.manifest)
    assert code == 0
    code, said = typed("party", "site", "--numbers", "--config", site_config(federation))
    assert code == 1
    assert "site0" in complaint(said) or "revoked" in complaint(said)


def test_a_model_that_is_not_the_manifests(federation: NumberFederation, typed: Typed) -> None:
    path = federation.folders.site("site0") / "initial.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, said = typed("party", "site", "--numbers", "--config", site_config(federation))
    assert code != 0 and "initial.safetensors" in complaint(said)


def test_keys_that_others_can_read(federation: NumberFederation, typed: Typed) -> None:
    for path in (federation.folders.site("site0") / "identity" / "keys").glob("*"):
        if path.is_file():
            path.chmod(0o644)
    code, said = typed("party", "site", "--numbers", "--config", site_config(federation))
    assert code != 0 and "open to others" in complaint(said)


# The machine.


def test_a_port_in_use(federation: NumberFederation, typed: Typed) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, federation.folders.port))
        taken.listen()
        code, said = typed("coordinator", "--config", coordinator_config(federation))
    assert code == 2
    assert str(federation.folders.port) in complaint(said) and "in use" in said
    # The log that was begun ends in order and says why, no round was opened, and the coordinator can start here.
    stops = list(read_history(federation.folders.logs[0], origin="", name="", role="").of("agent.stop"))
    assert [stop.body["reason"] for stop in stops] == ["config"]
    assert federation.rounds == []
    code, said = typed("coordinator", "status", "--config", coordinator_config(federation))
    assert code == 0, said


@pytest.mark.parametrize("words", [(), ("status",)])
def test_a_database_that_is_none(federation: NumberFederation, typed: Typed, words: tuple[str, ...]) -> None:
    path = federation.folders.coordinator / "state" / "coordinator.sqlite"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"garbage" * 1000)
    code, said = typed("coordinator", *words, "--config", coordinator_config(federation))
    assert code == 2 and "coordinator.sqlite" in complaint(said) and "not a database" in complaint(said)
    assert "do not restore an old copy" in said.partition("hint: ")[2]
    assert path.read_bytes() == b"garbage" * 1000


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from scripts.local_federation.party import cli
from lazaret.terminal import run_command
run_command(cli, "party")
"""


@pytest.mark.parametrize("who", [pytest.param("coordinator", marks=pytest.mark.long), "site"])
@pytest.mark.parametrize("limit", [2000])
def test_a_full_disk(federation: NumberFederation, who: str, limit: int) -> None:
    """No file may grow beyond a few bytes: one line, no traceback; with room again everything is as before."""
    config = coordinator_config(federation) if who == "coordinator" else site_config(federation)
    words = [sys.executable, "-c", LIMITED, str(limit), who, "--config", str(config)]
    words += ["--numbers"] if who == "site" else []
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2), done.stderr
    complaint(done.stderr)
    with federation.running():
        federation.wait_published(1)
    federation.check_sums()


OTHER_PROTOCOL = """
import security.secagg.context as context
context.PROTOCOL_VERSION += 1
from scripts.local_federation.party import cli
from lazaret.terminal import run_command
run_command(cli, "party")
"""


def test_another_protocol_version(federation: NumberFederation) -> None:
    federation.coordinator.start()
    try:
        federation.coordinator.wait_for("listening", seconds=60)
        words = [sys.executable, "-c", OTHER_PROTOCOL, "site", "--numbers", "--config", str(site_config(federation))]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    finally:
        federation.coordinator.stop()
    assert done.returncode == 1
    assert "another version of the protocol" in complaint(done.stderr)
    assert "other_protocol" in federation.coordinator.text()
