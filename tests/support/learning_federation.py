"""Real processes over loopback TLS whose sites really learn, each with a trainer of its own."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from coordinator.status import overview
from lazaret.errors import ConfigError
from npr.data.generated import ISIC_CLASSES
from npr.lab.cli import model as model_command
from scripts.local_federation.federation import FederationFolders, Party, command, stop_all, wait_until

SIZE = 32
SITES = {"bcn": "bcn", "vidir-molemax": "vidir_molemax", "vidir-modern": "vidir_modern"}
PLAN = """
run = "learning"
[model]
initial = "initial.safetensors"
[training]
rounds = {rounds}
steps = 60
[timing]
train = 90
message = 10
upload = 20
"""


class LearningFederation:
    """Three hospitals with a small network and generated images, and a coordinator."""

    def __init__(
        self, folder: Path, *, rounds: int, images: int = 16, epochs: int = 1, isolation: str = "best"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        initial = folder / "initial.safetensors"
        command(
            model_command, "--architecture", "test_efficientnet", "--weights", "none", "--image-size", SIZE,
            "--classes", ",".join(ISIC_CLASSES), "--method", "fednpr-per", "--rounds", rounds, "--set", "batch_size=16",
            "--set", f"local_epochs={epochs}", "-o", initial,
        )  # fmt: skip
        self.folders = FederationFolders(
            folder=folder,
            plan=PLAN.format(rounds=rounds),
            sources=dict.fromkeys(SITES, f"generated:balanced={images},sites=3"),
            data_names=SITES,
            initial=initial,
            coordinator_settings={"grace": 5.0, "ping": 2.0, "audit": 2.0},
            site_settings={
                "site": f'threads = 1\nready_slot = 0.2\nisolation = "{isolation}"',
                "coordinator": "least_wait = 0.2\nmost_wait = 1",
                "data": 'site = "{data}"',
            },
        )
        self.folders.prepare()
        self.coordinator, self.sites = self.folders.parties()

    @property
    def parties(self) -> list[Party]:
        return [*self.sites.values(), self.coordinator]

    def start(self) -> None:
        for party in self.parties:
            party.start()

    def stop(self) -> list[int | None]:
        return stop_all(self.sites.values(), self.coordinator)

    def outcomes(self) -> list[str | None]:
        with suppress(ConfigError):
            return [row["outcome"] for row in overview(self.folders.coordinator / "coordinator.toml")["rounds"]]
        return []

    @property
    def published(self) -> int:
        return self.outcomes().count("published")

    def wait_published(self, count: int, *, seconds: float = 240) -> None:
        what = f"{count} published rounds"
        wait_until(lambda: self.published >= count, what, seconds=seconds, output=self.coordinator.output)

    def trainer_of(self, site: Party, *, seconds: float = 60) -> int:
        """The process id of a site's trainer, once it is there."""
        found: list[int] = []

        def there() -> bool:
            found[:] = children_of(site.pid)
            return bool(found)

        wait_until(there, f"trainer of {site.name}", seconds=seconds, output=site.output)
        return found[0]


def children_of(parent: int) -> list[int]:
    """Running children; not those that have ended and wait to be asked for."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                after = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if int(after[1]) == parent and after[0] != "Z":
                    found.append(int(name))
    return found


def end(party: Party, number: signal.Signals = signal.SIGTERM, *, seconds: float = 15.0) -> tuple[int, float]:
    """Send a signal and wait; the exit code and how long it took."""
    started = time.monotonic()
    os.kill(party.pid, number)
    code = party.wait_dead(seconds=seconds)
    return code, time.monotonic() - started
