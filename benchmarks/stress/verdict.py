"""What stress must not change: results, memory, descriptors, and that whatever is wrong is said in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.local_federation.federation import Party
from scripts.local_federation.sums import manifest_at, read_published
from site_agent.state_dir import read_state
from tests.support.federation import NumberFederation


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment, as the kernel counts it."""

    memory: int
    descriptors: int
    threads: int
    processor: float

    @classmethod
    def of(cls, pid: int) -> Reading:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return cls(
            memory=int(status["VmRSS"].split()[0]) * 1024,
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(status["Threads"]),
            processor=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        )


class ResultCount:
    """How many results a coordinator has published, from what it has said since the last look: cheap to ask often."""

    def __init__(self, coordinator: Party) -> None:
        self._output = coordinator.output
        self._read, self._count = 0, 0

    def __call__(self) -> int:
        if self._output.exists():
            with self._output.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(end)
            self._count += whole.count(b": published")
        return self._count


class Verdict:
    """The figures of a run, and what was wrong; `ok` stands first."""

    def __init__(self, **figures: Any) -> None:
        self.figures = figures
        self.faults: list[str] = []

    def expect(self, true: bool, fault: str) -> None:
        if not true:
            self.faults.append(fault)

    def quiet(self, parties: Iterable[Party]) -> None:
        """No process says what only a fault in the program says."""
        for party in parties:
            said = party.text()
            at = said.find("Traceback (most recent call last)")
            if at >= 0:
                self.faults.append(f"{party.name} shows a traceback: {said[at : at + 2000]}")

    @property
    def report(self) -> dict[str, Any]:
        return {"ok": not self.faults, "faults": self.faults} | self.figures


def newest_accepted(site: Party) -> int:
    """The newest round whose sum a site has accepted, as it says; 0 if there is none."""
    return int(([0, *re.findall(r"round (\d+): sum of", site.text())])[-1])


def check_results(federation: NumberFederation, verdict: Verdict, without: Collection[str] = ()) -> list[int]:
    """Every published sum is exact over its survivors, and the model of each site is that of a published one.

    :param without: parties whose state says nothing.
    :return: the newest round that each site has accepted.
    """
    try:
        federation.check_sums()
        layout = manifest_at(federation.folders.coordinator / "identity").aggregation.layout
        after = {found.round: found.after for found in read_published(federation.folders.coordinator)}
        rounds = {}
        for name, site in federation.sites.items():
            if name not in without:
                rounds[name] = newest_accepted(site)
                read_state(federation.folders.site(name) / "state" / "states", layout, after[rounds[name]])
    except Exception as error:  # whatever it is, it is the finding
        verdict.faults.append(f"sums or models: {error!r}")
        return []
    return sorted(rounds.values())


def megabytes(size: float) -> float:
    return round(size / 1e6, 2)
