"""False messages to a real coordinator and a real site: `python -m benchmarks.fuzz --messages 100000 --json`.

A listed site and a coordinator, each with its good certificate, send false and damaged messages among honest ones; raw
sockets abuse TLS and HTTP/2, with and without a certificate. Honest sites go on with their rounds meanwhile.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.stress import http2_abuse
from benchmarks.stress.verdict import Reading, Verdict, check_results, megabytes
from lazaret.terminal import emit, run_command, say
from scripts.local_federation.federation import HOST, Party, WaitFailed
from security.audit.agreement import keys_of
from security.audit.compare import cross
from security.identity.enrolment import Identity
from tests.support.audit_attacks import weighty
from tests.support.federation import NumberFederation

ENTRY: Final = "benchmarks.stress.fuzzing_parties"
LISTED: Final = "site4"
VICTIM: Final = "site0"
TO_COORDINATOR: Final = 0.7  # of all messages
MEMORY_GROWTH: Final = 64e6  # bytes, over the whole run: less than what one vector of a real model needs
DESCRIPTOR_GROWTH: Final = 40
DAMAGED: Final = 20
WORDS: Final = 3000
# A site's log has receipts for what it never sent, heads that it was asked for too often and that nobody has seen, and
# models for false rounds.
SHOWN_LIES: Final = frozenset({"ReceiptInvalid", "SurplusBytes", "ModelInconsistency", "NotWitnessed"})
# Bytes that no message explains, since they were none: the coordinator's log says that they came.
SHOWN_ABUSE: Final = frozenset({"IngressSurplus"})
PERMITTED: Final = {"CounterCoverage"}  # a process that was restarted takes its kernel's count with it


class Round:
    """A federation with one party that fuzzes."""

    def __init__(self, folder: Path, sites: int, count: int, seed: int, verdict: Verdict) -> None:
        self.federation = NumberFederation(folder, sites=sites, rounds=100_000, words=WORDS, unwitnessed=2000, train=4)
        self.seed, self.verdict, self.count, self.said = seed, verdict, count, 0
        # Each costs a new connection: some dozens in a short run, some hundreds in a long one.
        self._burst = min(max(count // 100, 4), 60)  # a short run lasts for some rounds too
        self._damaged = min(max(DAMAGED / count, 0.002), 0.02)

    def fuzzing(self, name: str) -> Party:
        folders = self.federation.folders
        home = folders.coordinator if name == "coordinator" else folders.site(name)
        config = home / ("coordinator.toml" if name == "coordinator" else "site.toml")
        role = "coordinator" if name == "coordinator" else "site"
        words = [ENTRY, role, "--config", config, "--seed", self.seed, "--damaged", self._damaged]
        words += ["--burst", self._burst]
        return Party(name, words, folders.folder / "output" / f"{name}.log", home)

    def report(self, party: Party) -> dict[str, Any]:
        path = party.home / "fuzz.json"
        return json.loads(path.read_text()) if path.exists() else {"phases": {}, "kinds": {}, "lives": 0}

    def sent(self, party: Party) -> int:
        return sum(self.report(party)["phases"].values())

    def under_way(self, party: Party, end: float) -> bool:
        """Whether messages are left to send, and time; how many there are is said now and then."""
        time.sleep(0.5)
        sent = self.sent(party)
        if sent - self.said >= max(1000, self.count // 20):
            self.said = sent
            say(f"{sent} of {self.count} messages")
        return sent < self.count and time.monotonic() < end

    def calm(self, party: Party) -> None:
        (party.home / "calm").touch()

    def restart(self, party: Party) -> None:
        """One that has ended by its own rules comes back. It says why in one line; a traceback is found at the end."""
        if party.code is not None:
            self.verdict.expect(party.code == 1, f"{party.name} ended with {party.code}")
            party.start()


def attack_coordinator(folder: Path, count: int, seed: int, end: float, verdict: Verdict) -> None:
    """A listed site and raw sockets against the coordinator."""
    made = Round(folder, 5, count, seed, verdict)
    federation = made.federation
    coordinator, honest = federation.coordinator, [f"site{number}" for number in range(4)]
    fuzzer = federation.sites[LISTED] = made.fuzzing(LISTED)
    with federation.running():
        federation.wait_published(1)
        first, before = Reading.of(coordinator.pid), federation.published
        abused = abuse(federation, count, seed, lambda: time.monotonic() > end)
        while made.under_way(fuzzer, end):
            made.restart(fuzzer)
            if coordinator.code is not None:
                break
        verdict.expect(coordinator.code is None, "the coordinator has ended")
        during = federation.published - before
        made.calm(fuzzer)
        if coordinator.code is None:
            last = Reading.of(coordinator.pid)
            finish(made, during, first, last)
    states = {name: federation.sites[name].starts for name in honest} | {"coordinator": coordinator.starts}
    verdict.expect(set(states.values()) == {1}, f"an honest party ended: {states}")
    verdict.quiet(federation.parties)
    audit(federation, [LISTED], verdict, SHOWN_ABUSE)
    report = made.report(fuzzer)
    verdict.figures["to_coordinator"] = {
        "messages": sum(report["phases"].values()),
        "by_phase": dict(sorted(report["phases"].items())),
        "by_kind": dict(sorted(report["kinds"].items())),
        "lives_of_the_fuzzing_site": report["lives"],
        "http2": abused,
        "rounds_meanwhile": during,
    } | verdict.figures.get("to_coordinator", {})


def finish(made: Round, during: int, first: Reading, last: Reading) -> None:
    """Afterwards the honest sites are in one more sum, and nothing is left of it in the process."""
    federation, verdict = made.federation, made.verdict
    verdict.expect(during >= 1, "the honest sites finished no round meanwhile")
    try:
        federation.wait_published(federation.published + 2, seconds=120)
    except WaitFailed as error:
        verdict.faults.append(str(error))
    verdict.expect(last.memory - first.memory < MEMORY_GROWTH, f"memory grew from {first.memory} to {last.memory}")
    verdict.expect(
        last.descriptors - first.descriptors < DESCRIPTOR_GROWTH,
        f"descriptors grew from {first.descriptors} to {last.descriptors}",
    )
    verdict.figures["to_coordinator"] = {
        "memory_growth_mb": megabytes(last.memory - first.memory),
        "descriptors": [first.descriptors, last.descriptors],
        "threads": [first.threads, last.threads],
        "coordinator_processor_s": round(last.processor - first.processor, 1),
    }


def abuse(federation: NumberFederation, count: int, seed: int, over: Callable[[], bool]) -> dict[str, Any]:
    """With the certificate of a listed site, with one of another federation, and without any."""
    member = Identity(folder=federation.folders.site(LISTED) / "identity")
    folder = federation.folders.folder / "stranger"
    stranger = Identity(folder=NumberFederation(folder, sites=4, words=10).folders.site("site0") / "identity")
    done = {}
    for name, identity in {"listed": member, "stranger": stranger, "nobody": None}.items():
        rng = random.Random(f"{name} {seed}")
        attacker = http2_abuse.Attacker(HOST, federation.folders.port, member, identity, rng)
        done[name] = http2_abuse.storm(attacker, max(200, count // 20), over)
    return done


def attack_site(folder: Path, count: int, seed: int, end: float, verdict: Verdict) -> None:
    """A coordinator against one site. It may end the site's agent, which it could also do by silence; nothing else."""
    made = Round(folder, 4, count, seed, verdict)
    federation = made.federation
    fuzzer = federation.coordinator = made.fuzzing("coordinator")
    victim = federation.sites[VICTIM]
    first = last = None
    with federation.running():
        federation.wait_published(1)
        while made.under_way(fuzzer, end) and fuzzer.code is None:
            made.restart(victim)
            last = Reading.of(victim.pid)
            first = first or last
        verdict.expect(fuzzer.code is None, "the coordinator has ended")
        made.calm(fuzzer)
        time.sleep(1.0)
        made.restart(victim)
        try:
            victim.wait_for(f"round {federation.published + 1}: sum of", seconds=120)
        except WaitFailed as error:
            verdict.faults.append(f"the site does not come back: {error}")
    others = {name: party.starts for name, party in federation.sites.items() if name != VICTIM}
    verdict.expect(set(others.values()) == {1}, f"a site that was not attacked has ended: {others}")
    verdict.quiet(federation.parties)
    audit(federation, ["coordinator"], verdict, SHOWN_LIES)
    report = made.report(fuzzer)
    growth = last.memory - first.memory if first and last else 0
    verdict.expect(growth < MEMORY_GROWTH, f"the site's memory grew by {growth}")
    verdict.figures["to_site"] = {
        "messages": sum(report["phases"].values()),
        "by_phase": dict(sorted(report["phases"].items())),
        "by_kind": dict(sorted(report["kinds"].items())),
        "lives_of_the_site": victim.starts,
        "memory_growth_mb": megabytes(growth),
        "descriptors": [first.descriptors, last.descriptors] if first and last else None,
        "rounds_meanwhile": federation.published,
    }


def audit(
    federation: NumberFederation, liars: list[str], verdict: Verdict, shown: frozenset[str] = frozenset()
) -> None:
    """Every sum is exact, every site has the model of a published one, and each honest log is clean.

    :param shown: what honest logs say of the party that lies.
    """
    check_results(federation, verdict, without=liars)
    folders = federation.folders
    root = folders.consortium / "root.pem"
    named = dict(zip(["coordinator", *sorted(folders.sources)], folders.logs, strict=True))
    paths = [path for name, path in named.items() if name not in liars]
    crossed = cross(paths, keys_of(paths, root), lost=liars)
    found = weighty(crossed.findings) - PERMITTED - shown
    lines = [str(finding) for finding in crossed.findings if finding.code in found]
    verdict.expect(not found, f"the honest logs do not audit clean: {lines[:5]}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--messages", type=click.IntRange(100), default=100_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--seconds", type=click.IntRange(10), default=3600, show_default=True, help="At most this long.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(messages: int, seed: int, seconds: int, as_json: bool) -> None:
    """Send false messages, and see that nothing comes of them."""
    verdict = run(messages, seed, seconds)
    if as_json:
        emit(verdict.report)
    else:
        for name, value in verdict.report.items():
            click.echo(f"{name:<16} {value}")
    raise SystemExit(bool(verdict.faults))


def run(messages: int, seed: int, seconds: float, folder: Path | None = None) -> Verdict:
    verdict = Verdict(seed=seed)
    place = folder or Path(tempfile.mkdtemp(prefix="lazaret-fuzz-"))
    start = time.monotonic()
    try:
        say("a listed site, raw sockets")
        part = int(messages * TO_COORDINATOR)
        attack_coordinator(place / "coordinator", part, seed, start + TO_COORDINATOR * seconds, verdict)
        say("a coordinator")
        attack_site(place / "site", messages - part, seed, start + seconds, verdict)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    sent = [verdict.figures.get(name, {}).get("messages", 0) for name in ("to_coordinator", "to_site")]
    verdict.figures["messages"] = sum(sent)
    verdict.figures["seconds"] = round(time.monotonic() - start, 1)
    verdict.figures["complete"] = sum(sent) >= messages
    return verdict


if __name__ == "__main__":
    run_command(main, "fuzz")
