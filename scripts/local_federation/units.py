"""`scripts/units`: the systemd units of deploy/ run as they are, under a systemd of their own (`systemd-nspawn`).

The coordinator and one hospital, agent and trainer, are services there; the other hospitals are processes of this
machine. Then one service hangs, its watchdog ends it, and it takes part again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from coordinator.status import overview
from lazaret.errors import ConfigError, ToolkitError
from lazaret.terminal import emit, run_command
from scripts.local_federation.containers import run
from scripts.local_federation.demo import DATA, DemoOptions, ProgressPrinter, set_up
from scripts.local_federation.federation import ROOT, FederationFolders, Party, WaitFailed, wait_until
from security.audit.agreement import keys_for, keys_of
from security.audit.compare import cross
from security.audit.findings import Severity
from security.audit.verify import verify
from security.log.reader import LogReader

PACKAGES: Final = "systemd,systemd-sysv,dbus,python3,python3-venv"
UNITS: Final = ("lazaret-coordinator", "lazaret-site-agent", "lazaret-site-trainer")
WATCHDOG_SECONDS: Final = 20  # in place of the 15 minutes of the unit
PATIENCE: Final = 600.0


def hindrance(base: Path | None) -> str | None:
    """Why it cannot be tried on this machine."""
    needed = ["systemd-nspawn", "nsenter", *([] if base else ["mmdebstrap"])]
    if missing := [name for name in needed if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed here"
    if os.geteuid() != 0:
        return "only root can start a system of its own"
    if sys.version_info[:2] != (3, 11):
        return "the base has Python 3.11, and uses the packages of this environment"
    return None


@dataclass(slots=True)
class OwnSystem:
    """A Debian in a folder, with systemd as its first process. Its network is this machine's."""

    root: Path
    process: subprocess.Popen[bytes] | None = None

    def install(self, base: Path | None) -> None:
        """Debian, this tree and the packages of this environment, the units, and the two users."""
        if base is None:
            run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", self.root, seconds=1200)
        else:
            run("cp", "-a", base, self.root, seconds=300)
        software = self.root / "opt" / "lazaret"
        (software / "packages").mkdir(parents=True)
        source = software / "src"
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
        run("chroot", self.root, "python3", "-m", "venv", "--without-pip", "/opt/lazaret/.venv")
        (found,) = software.glob(".venv/lib/python3*/site-packages")
        (found / "lazaret.pth").write_text("/opt/lazaret/src\n/opt/lazaret/packages\n")
        for name in ("coordinator", "site_agent"):
            script = software / ".venv" / "bin" / name.replace("_", "-")
            script.write_text(f"#!/opt/lazaret/.venv/bin/python\nfrom lazaret.commands import {name}\n{name}()\n")
            script.chmod(0o755)
        units = self.root / "etc" / "systemd" / "system"
        for path in (*(ROOT / "deploy").glob("*.service"), ROOT / "deploy" / "lazaret-site.target"):
            shutil.copy(path, units)
        users = self.root / "usr" / "lib" / "sysusers.d" / "lazaret.conf"
        shutil.copy(ROOT / "deploy" / "lazaret.sysusers.conf", users)
        # Limits that this machine may not permit to raise.
        limits = self.root / "etc" / "systemd" / "system.conf.d" / "limits.conf"
        limits.parent.mkdir(parents=True, exist_ok=True)
        limits.write_text("[Manager]\nDefaultLimitNOFILE=1024:4096\nDefaultLimitNPROC=1024:1024\n")
        run("chroot", self.root, "systemd-sysusers")

    def add(self, unit: str, text: str) -> None:
        """A drop-in, as an administrator would write it."""
        folder = self.root / "etc" / "systemd" / "system" / f"{unit}.service.d"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "here.conf").write_text(f"[Service]\n{text}")

    def give(self, home: Path, user: str) -> Path:
        """A party's folder becomes the state folder of its service."""
        target = self.root / "var" / "lib" / user
        shutil.copytree(home, target)
        run("chroot", self.root, "chown", "-R", f"{user}:{user}", f"/var/lib/{user}")
        target.chmod(0o700)
        return target

    @contextmanager
    def running(self) -> Iterator[None]:
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        words = ["systemd-nspawn", "--quiet", "-D", str(self.root), "--register=no", "--keep-unit", "--console=pipe"]
        # What a machine lets its services do, and such a container by itself does not.
        words += ["--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self"]
        words += [f"--bind-ro={packages}:/opt/lazaret/packages", "--boot"]
        with (self.root.parent / "console.log").open("wb") as console:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=console, stderr=console)
        try:
            wait_until(lambda: self.state() in ("running", "degraded"), "the start of systemd", seconds=60)
            yield
        finally:
            with suppress(WaitFailed):
                run("kill", "-s", "RTMIN+4", self.first, seconds=10)  # power off
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60)
            self.process.kill()
            self.process.wait()

    @property
    def first(self) -> int:
        """The process with number 1 there."""
        if self.process is None:
            raise WaitFailed("the system was never started")
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = path.read_text().split() if path.exists() else []
        if not children:
            raise WaitFailed("the system has ended")
        return int(children[0])

    def inside(self, *words: object, seconds: float = 120) -> str:
        return run("nsenter", "-t", self.first, "-a", "--", *words, seconds=seconds)

    def state(self) -> str:
        try:
            shown = subprocess.run(
                ["nsenter", "-t", str(self.first), "-a", "--", "systemctl", "is-system-running"],
                capture_output=True, text=True, timeout=30, check=False,
            )  # fmt: skip
        except WaitFailed:
            return "starting"
        return shown.stdout.strip()

    def shown(self, unit: str) -> dict[str, str]:
        wanted = "ActiveState,NRestarts,Result,Type"
        lines = self.inside("systemctl", "show", f"--property={wanted}", f"{unit}.service").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def exposure(self, unit: str) -> float:
        """As `systemd-analyze` says of the loaded unit."""
        lines = self.inside("systemd-analyze", "security", "--no-pager", f"{unit}.service").splitlines()
        return float(re.search(r": ([0-9.]+) ", lines[-1])[1])  # type: ignore[index]

    def journal(self, unit: str) -> list[dict[str, Any]]:
        lines = self.inside("journalctl", "-t", unit, "-o", "json", "--no-pager").splitlines()
        return [json.loads(line) for line in lines]


def settle(system: OwnSystem, folders: FederationFolders, name: str) -> tuple[Path, Path]:
    """The coordinator and one hospital move into the system."""
    hub = system.give(folders.coordinator, "lazaret-coordinator")
    config = folders.site(name) / "site.toml"
    more = 'trainer_socket = "/run/lazaret-site/trainer.sock"\nisolation = "required"\n'
    config.write_text(re.sub(r"^(\[site\].*\n)", lambda found: found[0] + more, config.read_text(), flags=re.M))
    site = system.give(folders.site(name), "lazaret-site")
    system.add("lazaret-coordinator", f"SocketBindAllow=tcp:{folders.port}\n")
    system.add("lazaret-site-agent", f"WatchdogSec={WATCHDOG_SECONDS}\n")
    return hub, site


def hang(system: OwnSystem) -> float:
    """Stop the agent's process without ending it; seconds until the watchdog has it running again."""
    before = system.shown("lazaret-site-agent")
    started = time.monotonic()
    system.inside("systemctl", "kill", "--kill-who=main", "--signal=STOP", "lazaret-site-agent")

    def again() -> bool:
        now = system.shown("lazaret-site-agent")
        return now["ActiveState"] == "active" and int(now["NRestarts"]) > int(before["NRestarts"])

    wait_until(again, "the restart by the watchdog", seconds=PATIENCE)
    return round(time.monotonic() - started, 1)


def _uploads(log: Path) -> int:
    """How many masked vectors have left this site."""
    found = LogReader(log).records() if (log / "FORMAT").exists() else ()
    return sum(record.body.get("data_class") == "masked-vector" for record in found)


def _settled(log: Path, root: Path, least: int) -> bool:
    """So many uploads have left, and an audit of the log of this site alone would be clean, but for what every log of
    an agent that runs shows: witnesses have signed, and the kernel's count covers what left.
    """
    time.sleep(1.0)  # each look reads the whole log
    if _uploads(log) < least:
        return False
    found = verify(log, keys_for(log, root)).findings
    return {one.code for one in found if one.severity is not Severity.NOTE} <= {"NoStop", "UnsealedTail"}


def stop(system: OwnSystem, others: list[Party]) -> None:
    """All agents at once, then the coordinator: as `stop_all`, with one agent that is a service. One after the other,
    the last ones would have too few left to witness the ends of their logs.
    """
    for party in others:
        party.ask_to_stop()
    system.inside("systemctl", "stop", "lazaret-site-agent", seconds=PATIENCE)
    for party in others:
        party.wait_stopped()
    system.inside("systemctl", "stop", "lazaret-site.target", "lazaret-site-trainer", seconds=PATIENCE)
    system.inside("systemctl", "stop", "lazaret-coordinator", seconds=PATIENCE)


def play(folder: Path, base: Path | None, tell: ProgressPrinter) -> dict[str, Any]:
    """The whole demo; returns the summary."""
    options = DemoOptions(out=folder / "federation", model="tf_efficientnet_lite0", rounds=40, sites=4, data=DATA)
    folders = set_up(options, tell)
    name = sorted(folders.sources)[0]
    system = OwnSystem(folder / "system")
    tell("a system of Debian's packages")
    system.install(base)
    hub, site = settle(system, folders, name)
    _, parties = folders.parties()
    others = [party for other, party in parties.items() if other != name]

    def published() -> int:
        with suppress(ConfigError):
            return sum(row["outcome"] == "published" for row in overview(hub / "coordinator.toml")["rounds"])
        return 0

    tell("systemd starts")
    with system.running():
        system.inside("systemctl", "start", "lazaret-coordinator", seconds=PATIENCE)
        tell("the coordinator says that it is ready")
        system.inside("systemctl", "enable", "lazaret-site-agent", "lazaret-site-trainer")
        system.inside("systemctl", "start", "lazaret-site.target", seconds=PATIENCE)
        try:
            for party in others:
                party.start()
            settled = partial(_settled, site / "state" / "log", folders.consortium / "root.pem")
            wait_until(lambda: settled(1), "a round, and witnesses of it", seconds=PATIENCE)
            tell(f"a round is over and witnessed; now the agent of {name} hangs")
            before = _uploads(site / "state" / "log")
            waited = hang(system)
            tell("the watchdog has started it again")
            wait_until(lambda: settled(before + 1), "a round with the agent that was started again", seconds=PATIENCE)
            taken = _uploads(site / "state" / "log") - before
        finally:
            facts = {unit: system.shown(unit) | {"exposure": system.exposure(unit)} for unit in UNITS}
            rows = {unit: system.journal(unit) for unit in UNITS}
            (folder / "journal.json").write_text(json.dumps(rows, indent=1))
            stop(system, others)
        ends = {unit: system.shown(unit)["Result"] for unit in UNITS}
    logs = [hub / "state" / "log", site / "state" / "log"]
    logs += [folders.site(other) / "state" / "log" for other in sorted(folders.sources) if other != name]
    crossed = cross(logs, keys_of(logs, folders.consortium / "root.pem"))
    weighty = [finding for finding in crossed.findings if finding.severity is not Severity.NOTE]
    return {
        "ok": all(end == "success" for end in ends.values()) and waited > 0 and taken > 0 and crossed.exit_code == 0,
        "rounds": published(),
        "watchdog_seconds": WATCHDOG_SECONDS,
        "restarted_after_seconds": waited,
        "uploads_after_restart": taken,
        "exposure": {unit: facts[unit]["exposure"] for unit in UNITS},
        "type": {unit: facts[unit]["Type"] for unit in UNITS},
        "ends": ends,
        "priorities": {unit: sorted({row.get("PRIORITY") for row in rows[unit]}) for unit in UNITS},
        "audit_clean": crossed.exit_code == 0,
        "findings": [f"{finding.log}: {finding.code}: {finding.detail}" for finding in weighty],
        "notes": sorted({finding.code for finding in crossed.findings} - {finding.code for finding in weighty}),
        "seconds": round(tell.seconds, 1),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--base", type=click.Path(path_type=Path, exists=True), help=f"A folder with Debian 12 and {PACKAGES}.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(base: Path | None, as_json: bool) -> None:
    """The systemd units, under a systemd of their own: start, rounds, a hanging process, stop."""
    if reason := hindrance(base):
        emit({"skipped": reason}) if as_json else click.echo(f"skipped: {reason}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the system there is powered off
    folder = Path(tempfile.mkdtemp(prefix="lazaret-units-"))
    try:
        summary = play(folder, base, ProgressPrinter())
    except WaitFailed as error:
        raise ToolkitError(str(error), where=str(folder)) from error
    emit(summary) if as_json else click.echo(json.dumps(summary, indent=2))
    if not summary["ok"]:
        sys.exit(1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_command(main, "units")
