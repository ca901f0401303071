"""The parties of docs/study.md: folders that the page's commands have made, run in this process while a year passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.assembly import assemble as assemble_coordinator
from coordinator.config import CoordinatorConfig
from coordinator.run import Shell
from coordinator.service import Service
from lazaret import process
from lazaret.control import BY_SIGNAL, NEXT_RUN
from security.clock import ManualClock
from security.consortium.authority import Authority
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.log.egress import KernelByteLog
from security.rng import CountedRandomness
from tests.support.memory_network import MemoryNetwork
from tests.support.site_world import write_config
from tests.support.whole_federation import SITES, WholeFederation, whole_federation


@dataclass(frozen=True)
class StudyFolders:
    """What a federation asks of a world: identities, and the root."""

    folder: Path

    @property
    def authority(self) -> Authority:
        return Authority.open(self.folder / "consortium")

    def identity(self, member: str) -> Identity:
        return Identity(folder=self.folder / member / "identity")


@contextmanager
def small_study(folder: Path, sites: tuple[str, ...] = SITES, *, rounds: int = 50) -> Iterator[StudyFederation]:
    """A folder for each party without typing: members are copied from a federation that was enrolled once."""
    with whole_federation(folder / "world", sites=sites, rounds=rounds) as whole:
        for member in ("hub", *sites):
            home = folder / member
            home.mkdir()
            (folder / "world" / member).rename(home / "identity")
            shutil.copyfile(whole.model_path, home / "initial.safetensors")
            if member == "hub":
                text = 'identity = "identity"\nstate = "state"\nlisten = "127.0.0.1:1"\n'
                lines = "[rounds]\ngrace = 2.0\nping = 1.0\naudit = 1.0\n"
                (home / "coordinator.toml").write_text(text + 'initial_model = "initial.safetensors"\n' + lines)
            else:
                write_config(home, Path("identity"), Path("initial.safetensors"))
        (folder / "world" / "consortium").rename(folder / "consortium")
        made = StudyFederation(folder, whole.clock)
    try:
        with quick_starts():
            yield made
    finally:
        if made.shell is not None:
            made.kill_hub()
        for site in list(made.agents):
            made.kill(site)


@contextmanager
def quick_starts() -> Iterator[None]:
    """For many starts in one process: collections that torch makes slow are left out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process, "release_memory", lambda: None)
        yield


class StudyFederation(WholeFederation):
    """A folder for each party, as its own commands have left it."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self.folder, self.clock = folder, clock
        self.hub = "hub"
        self.world = StudyFolders(folder)  # type: ignore[assignment]  # as much of a world as is used
        self.rng, self.network = CountedRandomness(b"study"), MemoryNetwork()
        self.configs, self.agents, self.counts, self.learners = {}, {}, {}, {}
        self.streams, self.jobs, self.left, self.refused, self.clocks = {}, {}, {}, {}, {}
        self.started, self.deaf, self.heartbeats = [], set(), True
        self.shell: Shell | None = None

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # it changes as the study goes on
        found = self.world.identity(self.hub).manifest(now_ms=self.clock.now_ms())
        assert found is not None
        return found

    def start_hub(self) -> Shell:
        config, base = CoordinatorConfig.read(self.folder / self.hub / "coordinator.toml")
        ready = assemble_coordinator(config, base, clock=self.clock, rng=self.rng)
        self.shell, self.service = ready.shell, Service(ready.shell, ready.identity, ready.seat)
        self.service.traffic = KernelByteLog(ready.shell.books.log, self.network.meter(self.hub))
        return ready.shell

    def start(self, site: str):  # type: ignore[no-untyped-def]  # the agent's own type
        self.configs[site] = self.folder / site / "site.toml"
        return super().start(site)

    def stop_hub(self, reason: str = BY_SIGNAL) -> None:
        """In order, while the sites stay."""
        assert self.shell is not None
        for site in list(self.streams):
            self.disconnect(site)
        self.service.traffic.close()
        self.shell.close(reason)
        self.shell = None

    def step(self) -> None:
        """As the service does: a run that is over makes room for one that waits."""
        super().step()
        if self.shell is not None and self.shell.next_run_due:
            queue = self.shell.queue
            self.stop_hub(NEXT_RUN)
            queue.begin_next(self.world.identity(self.hub), now_ms=self.clock.now_ms())
            self.start_hub()

    def settle(self, steps: int = 20) -> None:
        """What is under way arrives."""
        for _ in range(steps):
            self.step()

    def until(self, happened: Callable[[], bool]) -> None:
        self.run(happened, seconds=3600)


