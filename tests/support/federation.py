"""Real processes over loopback TLS whose sites put in known numbers: every sum can be computed beforehand."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from coordinator.status import overview
from lazaret.errors import ConfigError
from scripts.local_federation.federation import HOST, FederationFolders, Party, stop_all, wait_until
from scripts.local_federation.known_updates import number_plan, words_of, write_numbers
from scripts.local_federation.sums import follows, is_exact, manifest_at, read_published
from security.audit.agreement import keys_of
from security.audit.compare import Comparison, cross
from security.identity.membership import groups_of
from security.identity.pinned_files import pinned_model
from site_agent.state_dir import read_state
from tests.support.audit_attacks import weighty

WORDS = 70_000  # two frames
WAIT = 60.0


class NumberFederation:
    """`sites` hospitals that do not learn, and a coordinator; each a process of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        sites: int = 4,
        rounds: int = 3,
        words: int = WORDS,
        ready_slot: float = 0.1,
        audit: str = "auto",
        unwitnessed: int = 20,  # who is killed again and again is witnessed late, the later the busier the machine is
        grace: float = 1.0,
        aggregation: str = "",
        settings: str = "",
        votes: bool = False,
        policy: str = "",
        train: int = 30,
        host: str = HOST,
        init_words: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        initial = folder / "initial.safetensors"
        write_numbers(initial, words)
        self.folders = FederationFolders(
            folder=folder,
            plan=number_plan(rounds, train=train, message=3, upload=4, aggregation=aggregation, settings=settings)
            + f'[audit]\nmode = "{audit}"\nmax_rounds_unwitnessed = {unwitnessed}\n'
            + ("strict = true\nvote_drop = 0.05\n" if votes else ""),
            sources={f"site{number}": "generated" for number in range(sites)},
            initial=initial,
            coordinator_settings={"grace": grace, "ping": 2.0, "audit": 1.0},
            site_settings={
                "site": f"ready_slot = {ready_slot}",
                "coordinator": "least_wait = 0.1\nmost_wait = 0.4",
                "policy": policy,
            },
            host=host,
            init_words=init_words or {},
        )
        self.folders.prepare()
        self.coordinator, self.sites = self.folders.parties("--numbers")

    def at(self, folder: Path) -> NumberFederation:
        """The same federation in a copy of its folder."""
        other = copy.copy(self)
        other.folders = replace(self.folders, folder=folder, initial=folder / "initial.safetensors")
        other.coordinator, other.sites = other.folders.parties("--numbers")
        return other

    @property
    def parties(self) -> list[Party]:
        return [*self.sites.values(), self.coordinator]

    def start(self) -> None:
        for party in self.parties:
            party.start()

    def stop(self) -> None:
        stop_all(self.sites.values(), self.coordinator)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything up, and down again whatever happens."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    @property
    def rounds(self) -> list[dict[str, object]]:
        """As `coordinator status` tells them; none while the database is being made."""
        try:
            return overview(self.folders.coordinator / "coordinator.toml")["rounds"]
        except ConfigError:
            return []

    @property
    def published(self) -> int:
        return sum(row["outcome"] == "published" for row in self.rounds)

    def wait_published(self, count: int, *, seconds: float = WAIT) -> None:
        wait_until(lambda: self.published >= count, f"{count} results", seconds=seconds, output=self.coordinator.output)

    def wait_checked(self, number: int, *, seconds: float = WAIT) -> None:
        self.coordinator.wait_for(f"the sum of round {number} is checked", seconds=seconds)

    # When all have stopped.

    def check_logs(self) -> Comparison:
        """All logs, each and against each other. A process that is killed takes its kernel's count with it."""
        logs, root = self.folders.logs, self.folders.consortium / "root.pem"
        crossed = cross(logs, keys_of(logs, root))
        assert weighty(crossed.findings) <= {"CounterCoverage"}, crossed.findings
        return crossed

    def check_models(self) -> None:
        """Every site has the model of the newest result that all have accepted: they stop one after the other."""
        layout = manifest_at(self.folders.coordinator / "identity").aggregation.layout
        accepted = [re.findall(r"round (\d+): sum of", site.text()) for site in self.sites.values()]
        number = min(int(rounds[-1]) for rounds in accepted)
        (after,) = [found.after for found in read_published(self.folders.coordinator) if found.round == number]
        for name in self.sites:
            read_state(self.folders.site(name) / "state" / "states", layout, after)

    def check_sums(self) -> list[tuple[int, tuple[str, ...]]]:
        """Every published sum is exact over its survivors, and each model follows from the one before."""
        manifest = manifest_at(self.folders.coordinator / "identity")
        layout, split = manifest.aggregation.layout, groups_of(manifest.aggregation)
        _, state = pinned_model(self.folders.initial, manifest)
        results = read_published(self.folders.coordinator)
        for result in results:
            assert result.good
            if result.total is not None:
                words = {site: words_of(layout, site, result.round) for site in result.survivors}
                assert is_exact(result, words, layout, split=split), f"round {result.round}"
        if all(result.total is not None for result in results):
            movements = b""
            for result in results:
                after = follows(result, state, manifest, movements)
                if result.stands:
                    state, movements = after, result.movements
        return [(result.round, result.survivors) for result in results]

    def steps(self) -> list[float]:
        """How far the model moved in each round, whatever the sites put in."""
        manifest = manifest_at(self.folders.coordinator / "identity")
        _, state = pinned_model(self.folders.initial, manifest)
        found, movements = [], b""
        for result in read_published(self.folders.coordinator):
            before, state = state, follows(result, state, manifest, movements)
            movements = result.movements
            found.append(float(np.linalg.norm(state - before)))
        return found

    def said(self, home: Path) -> dict[tuple[str, str], set[str]]:
        """What a party said about each thing, over all its lives."""
        found: dict[tuple[str, str], set[str]] = {}
        path = home / "said.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            kind, about, digest = json.loads(line)
            found.setdefault((kind, about), set()).add(digest)
        return found
