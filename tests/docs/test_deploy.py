"""The units in deploy/: systemd accepts them, and they are as closed as their page says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.local_federation import units

ROOT = Path(__file__).parents[2]
UNITS = ("lazaret-coordinator.service", "lazaret-site-agent.service", "lazaret-site-trainer.service")
# Exposure in tenths, as deploy/README.md tells it.
EXPOSURE = {
    "lazaret-coordinator.service": 1.3,
    "lazaret-site-agent.service": 1.3,
    "lazaret-site-trainer.service": 1.1,
}

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")


def installed(folder: Path, name: str, change: tuple[str, str] = ("", "")) -> Path:
    """The unit as it would lie on a machine where the package is in this environment."""
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    text = text.replace("/opt/lazaret/.venv/bin", str(Path(sys.executable).parent)).replace(*change)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def analysed(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@analyze
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit_and_not_its_twin(name: str, tmp_path: Path) -> None:
    good = analysed("verify", installed(tmp_path, name))
    assert (good.returncode, good.stdout + good.stderr) == (0, "")
    twin = analysed("verify", installed(tmp_path, name, ("NoNewPrivileges=yes", "NoNewPrivilege=yes")))
    assert "Unknown key" in twin.stdout + twin.stderr


@analyze
@pytest.mark.parametrize("name", UNITS)
def test_the_unit_is_as_closed_as_the_page_says(name: str, tmp_path: Path) -> None:
    unit = installed(tmp_path, name)
    told = analysed("security", "--offline=true", "--json=short", unit)
    if "unrecognized option" in told.stderr:
        pytest.skip("this systemd-analyze cannot look at a unit offline")
    settings = {row["name"] or row["json_field"]: row["exposure"] for row in json.loads(told.stdout)}
    assert len(settings) > 50
    limit = str(round(EXPOSURE[name] * 10) + 1)
    assert analysed("security", "--offline=true", f"--threshold={limit}", unit).returncode == 0
    open_unit = installed(tmp_path, name, ("ProtectSystem=strict\nProtectHome=yes\n", ""))
    assert analysed("security", "--offline=true", f"--threshold={limit}", open_unit).returncode != 0
    page = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    assert all(str(figure) in page for figure in EXPOSURE.values())


def test_the_units_keep_what_protects_the_hospital() -> None:
    for name in UNITS:
        text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
        for line in ("ProtectSystem=strict", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "UMask=0077"):
            assert re.search(rf"^{re.escape(line)}$", text, re.MULTILINE), (name, line)
        for line in ("RestartPreventExitStatus=2", f"SyslogIdentifier={name.removesuffix('.service')}"):
            assert line in text, (name, line)
        assert ("WatchdogSec=15min" in text) == ("Type=notify" in text) == ("trainer" not in name), name
    agent = (ROOT / "deploy" / UNITS[1]).read_text(encoding="utf-8")
    assert "SocketBindDeny=any" in agent and "SocketBindAllow" not in agent, "nothing listens at a hospital"
    assert "MemoryDenyWriteExecute=yes" in agent, "it does not load torch"
    trainer = (ROOT / "deploy" / UNITS[2]).read_text(encoding="utf-8")
    for line in ("PrivateNetwork=yes", "IPAddressDeny=any", "InaccessiblePaths=%S/lazaret-site/identity"):
        assert line in trainer, line
    for name in ("log", "wal", "pending", "runs"):
        assert f"InaccessiblePaths=-%S/lazaret-site/state/{name}\n" in trainer, "also of runs that are over"
    walls = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp")
    assert f"SystemCallFilter={' '.join(walls)}" in trainer, "Debian 12 would refuse its own walls"
    assert "--required" in trainer, "it does not begin where a connection is possible"
    target = (ROOT / "deploy" / "lazaret-site.target").read_text(encoding="utf-8")
    assert all(f"Wants={UNITS[1]} {UNITS[2]}" in text for text in (target,))


# One file in each of deploy's three forms, and the script that plays the second of them.
STARTING = (
    "deploy/lazaret-site-trainer.service",
    "deploy/containers/compose.yaml",
    "deploy/kubernetes/site/trainer.yaml",
    "scripts/local_federation/containers.py",
)


@pytest.mark.parametrize("path", STARTING)
def test_a_trainer_imports_nothing_from_the_folder_with_site_toml(path: str) -> None:
    """It is started there, and there are plugins beside that file (`-P`; what it does is in test_trainer_process)."""
    text = re.sub(r'[\[\],"=]', " ", (ROOT / path).read_text(encoding="utf-8"))
    starts = re.findall(r"(\S+)\s+-m\s+site_agent\.trainer ", text)
    assert starts == ["-P"]


def test_a_card_is_closed_until_the_drop_in_is_copied(tmp_path: Path) -> None:
    trainer = (ROOT / "deploy" / UNITS[2]).read_text(encoding="utf-8")
    assert "PrivateDevices=yes" in trainer and "DevicePolicy=closed" in trainer and "DeviceAllow" not in trainer
    dropped = (ROOT / "deploy" / "lazaret-site-trainer-card.conf").read_text(encoding="utf-8")
    keys = {line.partition("=")[0] for line in dropped.splitlines() if "=" in line and not line.startswith("#")}
    assert keys == {"PrivateDevices", "DevicePolicy", "DeviceAllow", "Environment"}, "and opens nothing else"
    assert "DevicePolicy=closed" in dropped and "char-nvidia rw" in dropped
    if shutil.which("systemd-analyze") is None:
        return
    unit = installed(tmp_path, UNITS[2])
    beside = tmp_path / f"{UNITS[2]}.d"
    beside.mkdir()
    (beside / "card.conf").write_text(dropped, encoding="utf-8")
    good = analysed("verify", unit)
    assert (good.returncode, good.stdout + good.stderr) == (0, "")


FORBID = """
import ctypes, mmap, sys
# PR_SET_MDWE with PR_MDWE_REFUSE_EXEC_GAIN (Linux 6.3): what MemoryDenyWriteExecute=yes does to a service.
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0:
    sys.exit(77)
try:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    sys.exit(78)
except OSError:
    pass
import coordinator.service, numpy
assert "torch" not in sys.modules
"""


def test_a_coordinator_needs_no_memory_that_is_written_and_run() -> None:
    """And no torch, which does need it."""
    ran = subprocess.run([sys.executable, "-c", FORBID], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(("tools", "user", "reason"), [(None, 0, "not installed"), ("/bin/true", 1000, "only root")])
def test_where_the_units_cannot_run_it_says_why(
    monkeypatch: pytest.MonkeyPatch, tools: str | None, user: int, reason: str
) -> None:
    monkeypatch.setattr(units.shutil, "which", lambda name: tools)
    monkeypatch.setattr(units.os, "geteuid", lambda: user)
    said = CliRunner().invoke(units.main, ["--json"])
    assert said.exit_code == 0 and reason in json.loads(said.output)["skipped"]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_units_run() -> None:
    done = subprocess.run([ROOT / "scripts" / "units", "--json"], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout) if done.stdout else {}
    if "skipped" in told:
        pytest.skip(told["skipped"])
    assert told.get("ok") is True, done.stdout + done.stderr
    for name, figure in EXPOSURE.items():
        assert told["exposure"][name.removesuffix(".service")] <= figure, name
