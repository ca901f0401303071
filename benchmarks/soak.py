"""Many tiny rounds over the wire, with members coming and going: `python -m benchmarks.soak --rounds 1000 --json`.

Disk, memory, descriptors and logs are read as the rounds pass; their slopes are told, by round. At the end: how long a
start, `coordinator status` and `privacy-audit` take, against the same after the first rounds.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import click
import numpy as np

from benchmarks.stress.verdict import Reading, ResultCount, Verdict, check_results, newest_accepted
from coordinator.cli import cli as coordinator_command
from lazaret.terminal import emit, run_command, say
from scripts.local_federation.federation import ROOT, Party, WaitFailed, command, wait_until
from security.consortium.cli import cli as consortium_command
from security.identity.enrolment import Identity
from security.identity.pki import fingerprint
from tests.support.federation import NumberFederation

SITES: Final = 5
WORDS: Final = 300
WAIT: Final = 120.0
KB: Final = 1e3
# Per round, once the first tenth is over.
MOST_DESCRIPTORS: Final = 0.02
LATER: Final = 3.0  # how many times longer a start or a question may take at the end, beside a second


class Soak:
    """A federation whose members come and go while it runs."""

    def __init__(self, folder: Path, sites: int, seed: int, verdict: Verdict) -> None:
        self.federation = NumberFederation(folder, sites=sites, rounds=1_000_000, words=WORDS, unwitnessed=100_000)
        self.published = ResultCount(self.federation.coordinator)
        self.rng = Random(f"soak {seed}")
        self.verdict = verdict
        self.rows: list[dict[str, float]] = []
        self.events: dict[str, int] = {"away": 0, "joined": 0, "left": 0}
        self._least, self._next = sites - 1, sites

    @property
    def steady(self) -> Party:
        """A site that is there from the first round to the last."""
        return self.federation.sites["site0"]

    def read(self) -> None:
        folders = self.federation.folders
        row: dict[str, float] = {"round": self.published(), "life": self.federation.coordinator.starts}
        for name, party in {"coordinator": self.federation.coordinator, "site": self.steady}.items():
            now, home = Reading.of(party.pid), folders.coordinator if name == "coordinator" else folders.site("site0")
            row |= {f"{name}_memory_kb": now.memory / KB, f"{name}_descriptors": now.descriptors}
            if name == "coordinator":
                row[f"{name}_descriptors"] -= len(self.federation.sites)  # each site has a connection
            row |= {f"{name}_disk_kb": _size(home / "state") / KB, f"{name}_log_kb": _size(home / "state" / "log") / KB}
        self.rows.append(row)

    def run(self, rounds: int, every: int, churn: int, end: float) -> None:
        """:param churn: after so many rounds somebody goes, comes back, leaves for good or joins."""
        due, last = self.published() + churn, self.published() + rounds
        self.read()
        while self.published() < last and time.monotonic() < end:
            reached = min(self.published() + every, last)
            self._wait(lambda: self.published() >= reached, "the next rounds")  # noqa: B023
            self.read()
            say(f"{reached} of {last} rounds")
            if self.published() >= due:
                due = self.published() + churn
                self.rng.choice([self._pause, self._join, self._leave])()

    def _wait(self, true: Callable[[], bool], what: str) -> None:
        wait_until(true, what, seconds=WAIT, output=self.federation.coordinator.output)

    def _pause(self) -> None:
        """A site is away for some rounds: for so long that it must take a covered state, or not."""
        name = self.rng.choice([name for name in self.federation.sites if name != "site0"])
        site = self.federation.sites[name]
        self.verdict.expect(site.stop() == 0, f"{name} did not stop in order")
        missed = self.published() + self.rng.randint(1, 8)
        self._wait(lambda: self.published() >= missed, "rounds without a site")
        site.start()
        self._takes_part(name)
        self.events["away"] += 1

    def _takes_part(self, name: str) -> None:
        """The site is in a sum again."""
        site, before = self.federation.sites[name], newest_accepted(self.steady)
        self._wait(lambda: newest_accepted(site) > before, f"{name} in a sum")

    def _join(self) -> None:
        folders, name = self.federation.folders, f"site{self._next}"
        self._next += 1
        folders.sources[name] = "generated"  # type: ignore[index]  # a dict, as the federation made it
        folders.make_site(name)
        folders.enroll(folders.site(name))
        folders.publish()
        root = fingerprint(Identity(folder=folders.coordinator / "identity").root())
        folders.join(name, folders.site(name), root)
        self._adopt()
        self.federation.sites[name] = folders.parties("--numbers")[1][name]
        self.federation.sites[name].start()
        self._takes_part(name)
        self.events["joined"] += 1

    def _leave(self) -> None:
        if len(self.federation.sites) <= self._least:
            return self._join()
        folders = self.federation.folders
        name = self.rng.choice([name for name in self.federation.sites if name != "site0"])
        self.federation.sites.pop(name).stop()
        command(consortium_command, "revoke", name, "--reason", "left", "--dir", folders.consortium)
        del folders.sources[name]  # type: ignore[attr-defined]
        folders.publish()
        self._adopt()
        self._takes_part("site0")
        self.events["left"] += 1
        return None

    def _adopt(self) -> None:
        """The operator installs the newest manifest, and restarts."""
        folders, coordinator = self.federation.folders, self.federation.coordinator
        self.verdict.expect(coordinator.stop() == 0, "the coordinator did not stop in order")
        config = folders.coordinator / "coordinator.toml"
        command(coordinator_command, "join", "--manifest", folders.manifest, "--config", config)
        coordinator.start()

    def questions(self) -> dict[str, float]:
        """Processor seconds of a start of the coordinator, of its status, and of an audit of each kind of log."""
        folders = self.federation.folders
        config, root = folders.coordinator / "coordinator.toml", folders.consortium / "root.pem"
        audit = "from security.audit.cli import main; main()"
        status = "from coordinator.cli import main; main()"
        logs = {"coordinator": folders.logs[0], "site": folders.site("site0") / "state" / "log"}
        found = {"status_s": _asked(status, "status", "--config", str(config))}
        for name, log in logs.items():
            found[f"audit_{name}_s"] = _asked(audit, "verify", str(log), "--root-key", str(root))
        coordinator, said = self.federation.coordinator, self.federation.coordinator.text().count("listening")
        coordinator.stop()
        coordinator.start()
        coordinator.wait_for("listening", times=said + 1, seconds=WAIT)
        return found | {"start_s": round(Reading.of(coordinator.pid).processor, 2)}

    def slopes(self) -> dict[str, float]:
        """What a round adds, after the first tenth. Memory is compared within one life of the coordinator, which is
        started again whenever the roster changes."""
        rows = self.rows[len(self.rows) // 10 :]
        lives = [row["life"] for row in rows]
        names = [name for name in rows[0] if name not in ("round", "life")]
        rounds = [row["round"] for row in rows]
        within = [name for name in names if name.startswith("coordinator_memory")]
        found = {}
        for name in names:
            values = [row[name] for row in rows]
            pairs = (_centred(rounds, lives), _centred(values, lives)) if name in within else (rounds, values)
            found[name] = round(_slope(*pairs), 4)
        return found


def _centred(values: Sequence[float], groups: Sequence[float]) -> list[float]:
    """Each value less the mean of its group."""
    pairs = list(zip(values, groups, strict=True))
    means = {group: np.mean([value for value, of in pairs if of == group]) for group in set(groups)}
    return [float(value - means[group]) for value, group in pairs]


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    return float(np.polyfit(xs, ys, 1)[0]) if len(set(xs)) > 1 else 0.0


def _size(folder: Path) -> int:
    """Of all files; one may go while they are counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _asked(code: str, *words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)


def run(
    rounds: int,
    seed: int,
    seconds: float,
    *,
    sites: int = SITES,
    churn: int | None = None,
    ask: bool = True,
    folder: Path | None = None,
) -> Verdict:
    """:param churn: after so many rounds a member comes or goes; 0: never.
    :param ask: how long a start, the status and an audit take, at first and at the end.
    """
    verdict = Verdict(seed=seed)
    place = folder or Path(tempfile.mkdtemp(prefix="lazaret-soak-"))
    start = time.monotonic()
    try:
        soak = Soak(place / "federation", sites, seed, verdict)
        with soak.federation.running():
            soak.federation.wait_published(2, seconds=WAIT)
            first = soak.questions() if ask else {}
            try:
                often = max(4, rounds // 25) if churn is None else churn or sys.maxsize
                soak.run(rounds, max(1, rounds // 50), often, start + seconds)
            except WaitFailed as error:
                verdict.faults.append(str(error))
            last = soak.questions() if ask else {}
        check(soak, rounds, first, last)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    verdict.figures["seconds"] = round(time.monotonic() - start, 1)
    return verdict


def check(soak: Soak, rounds: int, first: dict[str, float], last: dict[str, float]) -> None:
    verdict, slopes = soak.verdict, soak.slopes()
    done = soak.published()
    verdict.figures["complete"] = done >= rounds
    for name in ("coordinator", "site") if done >= 200 else ():  # in a short run the beginning is most of it
        opened, kept = slopes[f"{name}_descriptors"], slopes[f"{name}_memory_kb"]
        verdict.expect(opened <= MOST_DESCRIPTORS, f"{name}: {opened} more descriptors in each round")
        # The tree over a log is in memory: hashes of its entries, which need less than the entries on disk.
        written = slopes[f"{name}_log_kb"]
        verdict.expect(kept <= written, f"{name}: {kept} kB more memory in each round, its log {written} kB")
    for name, value in last.items():
        verdict.expect(value <= LATER * first[name] + 1.0, f"{name}: {first[name]} at first, {value} at the end")
    verdict.quiet(soak.federation.parties)
    check_results(soak.federation, verdict)
    verdict.figures |= {"rounds": done, "members": soak.events, "per_round": slopes}
    verdict.figures |= {"first": first, "last": last, "at_the_end": soak.rows[-1] if soak.rows else {}}
    verdict.figures["course"] = soak.rows[:: max(1, len(soak.rows) // 10)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(5), default=1000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--seconds", type=click.IntRange(10), default=7200, show_default=True, help="At most this long.")
@click.option("--churn", type=click.IntRange(0), help="Rounds between changes of members; 0: none.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(rounds: int, seed: int, seconds: int, churn: int | None, as_json: bool) -> None:
    """Run many rounds, and tell what each adds."""
    say(f"{rounds} rounds")
    report: dict[str, Any] = run(rounds, seed, seconds, churn=churn).report
    if as_json:
        emit(report)
    else:
        for name, value in report.items():
            click.echo(f"{name:<12} {value}")
    raise SystemExit(not report["ok"])


if __name__ == "__main__":
    run_command(main, "soak")
