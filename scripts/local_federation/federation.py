"""A federation on this machine: its processes, started, watched, killed and started again; and the folders they need,
made by the commands that people would type.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from coordinator.cli import cli as coordinator_command
from security.consortium.cli import cli as consortium_command
from site_agent.cli import cli as site_command

ROOT = Path(__file__).resolve().parents[2]
PAUSE = 0.05


class WaitFailed(Exception):
    """Something did not happen in time; the text says what, with the end of the output that should have shown it."""


def wait_until(true: Callable[[], bool], what: str, *, seconds: float, output: Path | None = None) -> None:
    """Look again and again.

    :raises WaitFailed: after `seconds`.
    """
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            tail = output.read_text()[-2000:] if output is not None and output.exists() else ""
            raise WaitFailed(f"{what} did not happen within {seconds:.0f} s\n{tail}")
        time.sleep(PAUSE)


class Party:
    """One process of the federation. Its output goes to a file, over all its starts."""

    def __init__(
        self, name: str, command: Sequence[object], output: Path, home: Path, *, prefix: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.output = output
        self.home = home
        self.command = [*prefix, sys.executable, "-m", *(str(word) for word in command)]
        self.folder = ROOT
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        """Start it, or start it again."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as file:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.starts += 1

    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise WaitFailed(f"{self.name} was never started")
        return self._process

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs, negative for a signal."""
        return self._running.poll()

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def says(self, words: str, *, times: int = 1) -> bool:
        return self.text().count(words) >= times

    def wait_for(self, words: str, *, seconds: float, times: int = 1) -> None:
        """Wait until `words` are in the output so many times."""
        what = f"{self.name}: {words!r}"
        wait_until(lambda: self.says(words, times=times), what, seconds=seconds, output=self.output)

    def wait_dead(self, *, seconds: float) -> int:
        wait_until(lambda: self.code is not None, f"end of {self.name}", seconds=seconds, output=self.output)
        return self._running.returncode

    def kill_at(self, step: str) -> None:
        """Order it to kill itself at a step; see `party`."""
        (self.home / "kill-order.new").write_text(step)
        (self.home / "kill-order.new").rename(self.home / "kill-order")

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up."""
        self._running.send_signal(signal.SIGKILL)
        self._running.wait()

    def ask_to_stop(self) -> None:
        """SIGTERM, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait_stopped(self, *, seconds: float = 20.0) -> int | None:
        """Patience, and SIGKILL after that."""
        if self._process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self._process.poll() is None:
            self.kill()
        return self._process.returncode

    def stop(self, *, seconds: float = 20.0) -> int | None:
        """SIGTERM, and patience; SIGKILL after that."""
        self.ask_to_stop()
        return self.wait_stopped(seconds=seconds)


def stop_all(sites: Iterable[Party], coordinator: Party) -> list[int | None]:
    """All sites at once, then the coordinator: each log's end is witnessed by those that are still there, and whoever
    stops last waits for nobody."""
    sites = list(sites)
    for site in sites:
        site.ask_to_stop()
    codes = [site.wait_stopped() for site in sites]
    return [*codes, coordinator.stop()]


# Everything a federation needs on disk before it can start.

HOST = "127.0.0.1"


def free_port() -> int:
    """A port below the range that the system assigns to clients, so that it stays free over restarts."""
    for _ in range(200):
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    raise OSError("no free port on the loopback interface")


def command(which: click.Command, *words: object) -> str:
    """Run one of our commands in this process; what it says to people is not shown. Returns its standard output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        which.main([str(word) for word in words], standalone_mode=False)
    return output.getvalue()


LEGAL_BASIS: Final = "none: generated or public images"


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationFolders:
    """The folders of one federation on this machine.

    :param plan: federation.toml, without the place of the initial model.
    :param sources: each site and the data source that its site.toml names.
    :param coordinator_settings: keys of [rounds] in coordinator.toml.
    :param site_settings: lines for tables of every site.toml; `{data}` stands for the name of the site's data.
    :param data_names: where that is another than the site's own.
    :param init_words: more words for `init` of a site, of "coordinator" or of "consortium", such as `--token`.
    :param secrets: of the draw of groups, as the sites have opened them; see `draw`.
    """

    folder: Path
    plan: str
    sources: Mapping[str, str]
    initial: Path
    federation: str = "demo"
    coordinator_settings: Mapping[str, float | int] = field(default_factory=dict)
    site_settings: Mapping[str, str] = field(default_factory=dict)
    data_names: Mapping[str, str] = field(default_factory=dict)
    init_words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    host: str = HOST

    @property
    def consortium(self) -> Path:
        return self.folder / "consortium"

    @property
    def coordinator(self) -> Path:
        return self.folder / "coordinator"

    def site(self, name: str) -> Path:
        return self.folder / "sites" / name

    @property
    def manifest(self) -> Path:
        return self.consortium / "manifest.json"

    @property
    def logs(self) -> list[Path]:
        """The log folders, the coordinator's first."""
        homes = [self.coordinator, *(self.site(name) for name in sorted(self.sources))]
        return [(home / "state" / "log").resolve() for home in homes]

    def prepare(self) -> None:
        """Root key, members, manifest, configurations."""
        words = self.init_words.get("consortium") or ["--no-passphrase"]
        printed = json.loads(
            command(consortium_command, "init", self.federation, "--dir", self.consortium, *words, "--json")
        )
        self.make_coordinator()
        for name in self.sources:
            self.make_site(name)
        self.enroll(self.coordinator)
        for name in self.sources:
            self.enroll(self.site(name))
        self.publish()
        for name, home in self.homes().items():
            self.join(name, home, printed["root_fingerprint"])
        if "groups" in tomllib.loads(self.plan).get("aggregation", {}):
            self.draw()

    def draw(self) -> None:
        """Groups are drawn: every site opens its secret, and a second manifest has them all.

        Only the coordinator is given the file. It passes the manifest on to the sites when they connect.
        """
        for name in self.sources:
            drawn = json.loads(command(site_command, "--config", self.site(name) / "site.toml", "draw", "--json"))
            self.secrets[drawn["site"]] = drawn["secret"]
        self.publish()
        config = self.coordinator / "coordinator.toml"
        command(coordinator_command, "join", "--manifest", self.manifest, "--config", config)

    def homes(self) -> dict[str, Path]:
        return {"coordinator": self.coordinator} | {name: self.site(name) for name in self.sources}

    def make_coordinator(self) -> None:
        command(
            coordinator_command, "init", self.coordinator, "--federation", self.federation, "--name", "coordinator",
            "--host", self.host, "--listen", f"{self.host}:{self.port}", *self.init_words.get("coordinator", ()),
        )  # fmt: skip
        config = self.coordinator / "coordinator.toml"
        lines = "".join(f"{key} = {value}\n" for key, value in self.coordinator_settings.items())
        config.write_text(config.read_text().replace("[rounds]\n", f"[rounds]\n{lines}"))
        shutil.copyfile(self.initial, self.coordinator / "initial.safetensors")

    def make_site(self, name: str) -> None:
        home = self.site(name)
        command(
            site_command, "init", home, "--federation", self.federation, "--name", name,
            "--address", f"{self.host}:{self.port}", "--data", self.sources[name],
            "--legal-basis", LEGAL_BASIS, *self.init_words.get(name, ()),
        )  # fmt: skip
        config = home / "site.toml"
        text = config.read_text()
        for table, lines in self.site_settings.items():
            more = lines.replace("{data}", self.data_names.get(name, name))
            text = re.sub(rf"^\[{table}\].*$", lambda found, more=more: f"{found[0]}\n{more}", text, flags=re.M)
        config.write_text(text)
        shutil.copyfile(self.initial, home / "initial.safetensors")

    def enroll(self, home: Path) -> None:
        request = home / "identity" / "request.json"
        command(consortium_command, "enroll", request, "--yes", "--dir", self.consortium, "--no-passphrase")

    def publish(self) -> None:
        """Sign the next manifest for everybody who is enrolled."""
        shutil.copyfile(self.initial, self.consortium / "initial.safetensors")
        lines = "".join(f'{site} = "{secret}"\n' for site, secret in self.secrets.items())
        opened = f"[aggregation.secrets]\n{lines}" if lines else ""
        (self.consortium / "federation.toml").write_text(self.plan + opened)
        command(consortium_command, "publish", "--dir", self.consortium, "--no-passphrase")

    def join(self, name: str, home: Path, root: str) -> None:
        words = ["join", self.consortium / "answers" / f"{name}.json", "--root-fingerprint", root]
        words += ["--manifest", self.manifest]
        if home == self.coordinator:
            command(coordinator_command, *words, "--config", home / "coordinator.toml")
        else:
            command(site_command, "--config", home / "site.toml", *words)

    def parties(self, *site_words: str) -> tuple[Party, dict[str, Party]]:
        """The processes, not yet started: the coordinator, and the sites by name."""
        output = self.folder / "output"

        def party(name: str, home: Path, *words: object) -> Party:
            return Party(name, ["scripts.local_federation.party", *words], output / f"{name}.log", home)

        first = party("coordinator", self.coordinator, "coordinator", "--config", self.coordinator / "coordinator.toml")
        sites = {
            name: party(name, self.site(name), "site", *site_words, "--config", self.site(name) / "site.toml")
            for name in self.sources
        }
        return first, sites
