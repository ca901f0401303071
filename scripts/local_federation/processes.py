"""The processes of a federation on this machine: started, watched, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAUSE = 0.05


class GaveUp(Exception):
    """Something did not happen in time; the text says what, and the end of the output that should have shown it."""


def wait_until(true: Callable[[], bool], what: str, *, seconds: float, output: Path | None = None) -> None:
    """Look again and again.

    :raises GaveUp: after `seconds`.
    """
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            tail = output.read_text()[-2000:] if output is not None and output.exists() else ""
            raise GaveUp(f"{what} did not happen within {seconds:.0f} s\n{tail}")
        time.sleep(PAUSE)


class Party:
    """One process of the federation. Its output goes to a file, over all its lives."""

    def __init__(
        self, name: str, command: Sequence[object], output: Path, home: Path, *, prefix: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.output = output
        self.home = home
        self.command = [*prefix, sys.executable, "-m", *(str(word) for word in command)]
        self.folder = ROOT
        self._process: subprocess.Popen[bytes] | None = None
        self.lives = 0

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
        self.lives += 1

    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise GaveUp(f"{self.name} was never started")
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

    def ordain(self, ending: str) -> None:
        """Order it to kill itself at a step; see `fail_points`."""
        (self.home / "ending.new").write_text(ending)
        (self.home / "ending.new").rename(self.home / "ending")

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
