"""A federation under bad links and sudden deaths: `python -m benchmarks.chaos --seconds 600 --seed 1 --json`.

Every few seconds something happens to somebody: SIGKILL, SIGSTOP, a link that is slow, lossy, reordering or cut, a
clock that jumps, a disk that is full. Then all is well again. What must hold: every published sum is exact over its
survivors, all sites come to the same model, the logs audit clean, and the rules explain every round without a sum.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import click

from benchmarks.stress import bad_links
from benchmarks.stress.bad_links import BadLinks, Link
from benchmarks.stress.verdict import ResultCount, Verdict, check_results, newest_accepted
from lazaret.terminal import emit, run_command, say
from scripts.local_federation.federation import Party, WaitFailed, wait_until
from security.audit.agreement import keys_of
from security.audit.compare import cross
from tests.support.audit_attacks import weighty
from tests.support.federation import NumberFederation

SITES: Final = 5
WORDS: Final = 3000
DISK: Final = "64m"
CALM_SECONDS: Final = 180.0
# A process that is killed takes its kernel's count with it. Of a clock that jumped, the log says so.
PERMITTED: Final = {"CounterCoverage"}
JUMPED: Final = {"ClockRollback", "ClockSkew", "Backdated", "WitnessClock"}
BAD_LINKS: Final = {
    "latency": Link(delay=0.2),
    "loss": Link(delay=0.02, loss=0.02),
    "reordering": Link(delay=0.01, jitter=0.1),
    "straggler": Link(delay=0.02, megabits=1.0),
    "partition": Link(cut=True),
}


class ChaosRun:
    """A federation, and what happens to it."""

    def __init__(self, federation: NumberFederation, links: BadLinks, seed: int, verdict: Verdict) -> None:
        self.federation, self.links, self.verdict = federation, links, verdict
        self.rng = Random(f"chaos {seed}")
        self.published = ResultCount(federation.coordinator)
        self.done: Counter[str] = Counter()
        self.jumped: set[str] = set()
        self.disks = False  # whether each party has a disk of its own, which can be full
        self._later: list[tuple[float, Callable[[], None]]] = []
        folders = federation.folders
        output = folders.folder / "output"
        self.parties: dict[str, Party] = {}
        for name, home in folders.homes().items():
            words = ["benchmarks.stress.shifted_site", "--config", home / "site.toml"]
            if name == "coordinator":
                words = ["scripts.local_federation.party", name, "--config", home / "coordinator.toml"]
            self.parties[name] = Party(name, words, output / f"{name}.log", home, prefix=links.prefix(name))
        federation.coordinator = self.parties["coordinator"]
        federation.sites = {name: party for name, party in self.parties.items() if name != "coordinator"}

    # What happens.

    def kill(self, party: Party) -> None:
        party.kill()
        self._in(self.rng.uniform(0.2, 2.0), self._revive(party))

    def freeze(self, party: Party) -> None:
        os.kill(party.pid, signal.SIGSTOP)

        def wake() -> None:
            with suppress(ProcessLookupError):
                os.kill(party.pid, signal.SIGCONT)

        self._in(self.rng.uniform(1.0, 8.0), wake)

    def link(self, party: Party, kind: str) -> None:
        self.links.set(party.name, BAD_LINKS[kind])
        self._in(self.rng.uniform(2.0, 10.0), lambda: self.links.set(party.name, Link()))

    def jump(self, party: Party) -> None:
        """By more than what is tolerated, or by less."""
        seconds = self.rng.choice([-3600, -120, 120, 3600])
        self.jumped.add(party.name)
        _set_clock(party, seconds)
        self._in(self.rng.uniform(2.0, 6.0), lambda: _set_clock(party, 0))

    def fill(self, party: Party) -> None:
        path = party.home / "state" / "filler"
        with path.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

        def empty() -> None:
            path.unlink(missing_ok=True)

        self._in(self.rng.uniform(1.0, 4.0), empty)

    def _in(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def _revive(self, party: Party) -> Callable[[], None]:
        def start() -> None:
            if party.code is not None:
                party.start()

        return start

    # The run of it.

    def choices(self) -> dict[str, Callable[[Party], None]]:
        found: dict[str, Callable[[Party], None]] = {"kill": self.kill, "stop": self.freeze, "clock jump": self.jump}
        if self.disks:
            found["full disk"] = self.fill
        for kind in BAD_LINKS:
            found[kind] = lambda party, kind=kind: self.link(party, kind)  # type: ignore[misc]
        return found

    def strike(self) -> None:
        name, act = self.rng.choice(sorted(self.choices().items()))
        sites = list(self.federation.sites.values())
        party = self.rng.choice(sites if name == "clock jump" else [*sites, self.federation.coordinator])
        if party.code is not None:
            return  # it is down already
        self.done[name] += 1
        act(party)

    def settle(self, all_of_it: bool = False) -> None:
        """What is due is undone; who has ended by its own rules is started again, as a service manager does."""
        now = time.monotonic()
        due = [item for item in self._later if all_of_it or item[0] <= now]
        self._later = [item for item in self._later if item not in due]
        for _, act in due:
            act()
        for party in self.parties.values():
            if party.code is not None and not any(item[0] > now for item in self._later):
                self.verdict.expect(party.code in (0, 1, -signal.SIGKILL), f"{party.name} ended with {party.code}")
                party.start()

    def disturb(self, seconds: float) -> None:
        end, strike = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < end:
            if time.monotonic() >= strike:
                self.strike()
                strike = time.monotonic() + self.rng.uniform(1.0, 4.0)
            self.settle()
            time.sleep(0.1)
        self.settle(all_of_it=True)
        self.links.calm()

    def recover(self) -> None:
        """Everybody accepts the sum of one and the same new round."""
        federation, deadline = self.federation, time.monotonic() + CALM_SECONDS
        target, before = self.published() + 2, max(map(newest_accepted, federation.sites.values()))

        def more() -> bool:
            self.settle()
            return self.published() >= target

        def together() -> bool:
            self.settle()
            accepted = [newest_accepted(site) for site in federation.sites.values()]
            return max(accepted) - min(accepted) <= 1 and min(accepted) > before

        try:
            wait_until(more, f"{target} results", seconds=CALM_SECONDS)
            wait_until(together, "one model at all sites", seconds=max(1.0, deadline - time.monotonic()))
        except WaitFailed as error:
            last = {name: party.text().splitlines()[-3:] for name, party in self.parties.items()}
            self.verdict.faults.append(f"{error}; {last}")


def _set_clock(party: Party, seconds: int) -> None:
    (party.home / "clock").write_text(f"{seconds}\n")


@contextmanager
def small_disks(homes: list[Path]) -> Iterator[bool]:
    """A file system for the state of each party, where that is permitted."""
    mounted = []
    try:
        for home in homes:
            folder = home / "state"
            folder.mkdir(mode=0o700, exist_ok=True)
            words = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(folder)]
            if subprocess.run(words, capture_output=True, check=False).returncode == 0:
                mounted.append(folder)
        yield len(mounted) == len(homes)
    finally:
        for folder in mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def check(chaos: ChaosRun) -> None:
    """When all have stopped."""
    federation, verdict = chaos.federation, chaos.verdict
    verdict.quiet(federation.parties)
    accepted = check_results(federation, verdict)
    if accepted:
        verdict.expect(accepted[-1] - accepted[0] <= 2, f"sites stopped at rounds {accepted}")
    rounds = federation.rounds
    outcomes = Counter(str(row["outcome"]) for row in rounds[:-1])
    verdict.figures["outcomes"] = dict(outcomes)
    verdict.expect("None" not in outcomes, "a round was left open, and a later one begun")
    folders = federation.folders
    root = folders.consortium / "root.pem"
    crossed = cross(folders.logs, keys_of(folders.logs, root))
    bad = weighty(crossed.findings) - PERMITTED - (JUMPED if chaos.jumped else set())
    lines = [str(finding) for finding in crossed.findings if finding.code in bad]
    verdict.expect(not bad, f"the logs do not audit clean: {lines[:5]}")
    verdict.figures["findings"] = sorted(weighty(crossed.findings))
    for home in folders.homes().values():
        twice = [about for about, words in federation.said(home).items() if len(words) > 1]
        verdict.expect(not twice, f"{home.name} said two things about {twice[:3]}")


def run(seconds: float, seed: int, *, sites: int = SITES, folder: Path | None = None) -> Verdict:
    verdict = Verdict(seed=seed)
    place = folder or Path(tempfile.mkdtemp(prefix="lazaret-chaos-"))
    start = time.monotonic()
    names = ["coordinator", *(f"site{number}" for number in range(sites))]
    try:
        with bad_links.links(place, names, seed) as links:
            options: dict[str, Any] = {"unwitnessed": 1000, "host": bad_links.HUB, "train": 8}
            federation = NumberFederation(place / "federation", sites=sites, rounds=100_000, words=WORDS, **options)
            chaos = ChaosRun(federation, links, seed, verdict)
            with small_disks(list(federation.folders.homes().values())) as disks:
                chaos.disks = disks
                with federation.running():
                    federation.wait_published(1, seconds=120)
                    before = chaos.published()
                    chaos.disturb(seconds)
                    during = chaos.published() - before
                    chaos.recover()
                verdict.figures |= {"happened": dict(sorted(chaos.done.items())), "results_in_the_storm": during}
                verdict.figures["lives"] = {name: party.starts for name, party in chaos.parties.items()}
                verdict.expect(during >= 1, "no result while links and processes failed")
                check(chaos)
                verdict.figures["results"] = federation.published
                if folder is not None:
                    shutil.copytree(place / "federation" / "output", place / "output")
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    verdict.figures["seconds"] = round(time.monotonic() - start, 1)
    return verdict


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", type=click.IntRange(5), default=600, show_default=True, help="How long they fail.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(seconds: int, seed: int, as_json: bool) -> None:
    """Let links and processes of a federation fail at random, and check what it has published."""
    reason = bad_links.why_not()
    if reason is not None:
        raise click.UsageError(f"no links between namespaces: {reason}")
    say(f"links and processes fail for {seconds} s")
    report: dict[str, Any] = run(seconds, seed).report
    if as_json:
        emit(report)
    else:
        for name, value in report.items():
            click.echo(f"{name:<22} {value}")
    raise SystemExit(not report["ok"])


if __name__ == "__main__":
    run_command(main, "chaos")
