"""What security costs on the network: `python -m benchmarks.federation --sites 10 --params 4007548 --json`.

Coordinator and sites are processes that talk mTLS over loopback, or over links of 100 Mbit/s. The time from
Plan to the last site's result is compared with a plaintext float32 exchange of the same vector among as many processes.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks import links, times
from benchmarks.flower import deployment
from lazaret.terminal import emit, run_command, say
from scripts.local_federation.federation import HOST, FederationFolders, Party, free_port, wait_until
from scripts.local_federation.known_updates import number_plan, write_numbers
from scripts.local_federation.sums import manifest_at
from security.crypto.ring import BITS, DEFAULT_BITS

LIMITS = {
    "secure_cpu_over_plain_cpu": 2.0,  # holds on a busy machine, too
    "secure_over_plain": 3.0,
    "secure_over_plain_100mbit": 0.9,
    "audit_bytes_over_vector": 4.5,
    "coordinator_peak_difference": 0.5,
    "flower_over_ours": 30.0,  # at least; all others are at most
}
SITES_IN_A_PROCESS = 25


@dataclass(frozen=True, slots=True)
class Load:
    """What travels: this many numbers, in so many rounds, masked in this ring."""

    params: int
    rounds: int
    ring_bits: int


def lay_out(folder: Path, sites: int, load: Load, host: str) -> FederationFolders:
    folder.mkdir()
    initial = folder / "initial.safetensors"
    write_numbers(initial, load.params)
    folders = FederationFolders(
        folder=folder,
        plan=number_plan(load.rounds, train=600, message=120, upload=300, ring_bits=load.ring_bits),
        sources={f"site{number:02}": "generated" for number in range(sites)},
        initial=initial,
        coordinator_settings={"grace": 300.0, "audit": 60.0, "ping": 30.0},
        site_settings={"site": "threads = 1\nready_slot = 0.5", "coordinator": "least_wait = 0.2\nmost_wait = 1"},
        host=host,
    )
    folders.prepare()
    return folders


def secure_run(folders: FederationFolders, rounds: int, prefixes: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Aggregations in seconds, bytes that one site fetched to check one sum, and the coordinator's memory in a round.

    :param prefixes: a process for each site, behind its link; none: sites share processes, and only memory is measured.
    """
    output = folders.folder / "output"
    config = folders.coordinator / "coordinator.toml"
    first = Party("coordinator", ["benchmarks.secure", "coordinator", config], output / "first", folders.coordinator)
    sites = _site_processes(folders, prefixes)
    try:
        first.start()
        first.wait_for("listening", seconds=120)
        listening = memory(first.pid, "VmRSS")
        for site in sites:
            site.start()
        first.wait_for(" connected", seconds=300, times=len(folders.sources))
        idle = memory(first.pid, "VmRSS")
        first.wait_for("the sum of round 1 is checked", seconds=900)
        peak = memory(first.pid, "VmHWM")
        first.wait_for(f"the sum of round {rounds} is checked", seconds=900)
    finally:
        for party in (*sites, first):
            party.stop()
    begun = times.read(folders.coordinator / "times", "plan")
    ended = [times.read(folders.site(name) / "times", "result") for name in folders.sources]
    layout = manifest_at(folders.coordinator / "identity").aggregation.layout
    checked = times.last_value(folders.coordinator / "times", "checked")
    return {
        "cpu": _processor_seconds(folders, rounds, "burst over"),
        "cpu_with_check": _processor_seconds(folders, rounds, "check over"),
        "aggregations": [max(moments[number] for moments in ended) - begun[number] for number in range(1, rounds + 1)],
        "upload_bytes_over_float32": layout.byte_length / (4 * layout.state_words),
        "audit_bytes_over_vector": checked / rounds / len(folders.sources) / layout.byte_length,
        "connections_over_vector": (idle - listening) / layout.memory_bytes,
        "peak_over_vector": (peak - idle) / layout.memory_bytes,
    }


def _processor_seconds(folders: FederationFolders, rounds: int, end: str) -> list[float]:
    """Of all parties, round by round, from the plan on."""
    spent = [times.spent(folders.site(name) / "times", "burst", end) for name in folders.sources]
    spent.append(times.spent(folders.coordinator / "times", "plan", end))
    return [sum(found.get(number, 0.0) for found in spent) for number in range(1, rounds + 1)]


def _site_processes(folders: FederationFolders, prefixes: Sequence[Sequence[str]]) -> list[Party]:
    names, size = list(folders.sources), 1 if prefixes else SITES_IN_A_PROCESS
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    found = []
    for group, prefix in zip(groups, prefixes or [()] * len(groups), strict=True):
        words = ["benchmarks.secure", "site", *(folders.site(name) / "site.toml" for name in group)]
        output = folders.folder / "output" / group[0]
        found.append(Party(group[0], words, output, folders.site(group[0]), prefix=prefix))
    return found


def plain_run(
    folders: FederationFolders, params: int, rounds: int, prefixes: Sequence[Sequence[str]]
) -> tuple[list[float], list[float]]:
    """Seconds from go to the last site's mean, and processor seconds of all parties, round by round."""
    output, port = folders.folder / "plain", free_port()
    module = "benchmarks.plain.parties"
    moments = folders.folder / "plain-times"
    words = ["server", folders.coordinator / "identity", port, len(folders.sources), params, rounds, moments]
    server = Party("server", [module, *words], output / "server", folders.coordinator)
    sites = []
    for name, prefix in zip(folders.sources, prefixes, strict=True):
        words = ["site", folders.site(name) / "identity", f"{folders.host}:{port}", params, rounds]
        words.append(folders.site(name) / "plain-times")
        sites.append(Party(name, [module, *words], output / name, folders.site(name), prefix=prefix))
    try:
        for party in (server, *sites):
            party.start()
        wait_until(lambda: all(site.code is not None for site in sites), "plain exchange", seconds=600)
    finally:
        for party in (*sites, server):
            party.stop()
    begun = times.read(moments, "go")
    ended = [times.read(folders.site(name) / "plain-times", "mean") for name in folders.sources]
    bursts = [times.spent(folders.site(name) / "plain-times", "burst", "mean") for name in folders.sources]
    bursts.append(times.spent(moments, "go", "burst over"))
    seconds = [max(found[number] for found in ended) - begun[number] for number in range(rounds)]
    return seconds, [sum(found[number] for found in bursts) for number in range(rounds)]


def memory(pid: int, what: str) -> int:
    """Bytes, from the kernel."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{what} is not told")


def compare(folder: Path, sites: int, load: Load, megabits: int | None) -> dict[str, Any]:
    """Secure and plain, one after the other, on the same folders."""
    if megabits is None:
        return _both(lay_out(folder, sites, load, HOST), load, [()] * sites)
    with links.slow_links(sites, megabits) as prefixes:
        return _both(lay_out(folder, sites, load, links.ADDRESS), load, prefixes)


def _both(folders: FederationFolders, load: Load, prefixes: Sequence[Sequence[str]]) -> dict[str, Any]:
    plain, plain_cpu = plain_run(folders, load.params, load.rounds, prefixes)
    secure = secure_run(folders, load.rounds, prefixes)
    return secure | {
        "plain": plain,
        "plain_cpu": plain_cpu,
        "ratio": statistics.median(secure["aggregations"]) / statistics.median(plain),
        "cpu_ratio": statistics.median(secure["cpu"]) / statistics.median(plain_cpu),
        "cpu_ratio_with_check": statistics.median(secure["cpu_with_check"]) / statistics.median(plain_cpu),
    }


class Report:
    """All figures of one run, in the order in which they are found."""

    def __init__(self, folder: Path, sites: int, load: Load) -> None:
        self.folder, self.sites, self.load = folder, sites, load
        self.figures: dict[str, Any] = {"sites": sites, "params": load.params, "ring_bits": load.ring_bits}
        self.figures["limits"] = LIMITS

    def _times(self, suffix: str, found: dict[str, Any]) -> None:
        self.figures[f"secure_over_plain{suffix}"] = round(found["ratio"], 3)
        self.figures[f"secure_seconds{suffix}"] = [round(value, 3) for value in found["aggregations"]]
        self.figures[f"plain_seconds{suffix}"] = [round(value, 3) for value in found["plain"]]
        self.figures[f"secure_cpu_over_plain_cpu{suffix}"] = round(found["cpu_ratio"], 3)
        self.figures[f"secure_cpu_with_check_over_plain_cpu{suffix}"] = round(found["cpu_ratio_with_check"], 3)
        self.figures[f"secure_cpu_seconds{suffix}"] = [round(value, 3) for value in found["cpu"]]
        self.figures[f"plain_cpu_seconds{suffix}"] = [round(value, 3) for value in found["plain_cpu"]]

    def _memory(self, sites: int, found: dict[str, Any]) -> None:
        """Above the coordinator with all sites connected and nothing to do; what the connections need is told apart."""
        self.figures[f"coordinator_peak_over_vector_{sites}"] = round(found["peak_over_vector"], 2)
        self.figures[f"coordinator_connections_over_vector_{sites}"] = round(found["connections_over_vector"], 2)

    def loopback(self) -> None:
        say(f"loopback, {self.sites} sites")
        here = compare(self.folder / "loopback", self.sites, self.load, None)
        self._times("", here)

        self.figures["upload_bytes_over_float32"] = round(here["upload_bytes_over_float32"], 4)
        self.figures["audit_bytes_over_vector"] = round(here["audit_bytes_over_vector"], 3)
        self._memory(self.sites, here)

    def slow_links(self) -> None:
        reason = links.why_not()
        if reason is not None:
            self.figures |= {"secure_over_plain_100mbit": None, "skipped": f"links of 100 Mbit/s: {reason}"}
            return
        say("links of 100 Mbit/s")
        self._times("_100mbit", compare(self.folder / "slow", self.sites, self.load, 100))

    def memory(self, large: int) -> None:
        say(f"memory with {large} sites")
        many = secure_run(lay_out(self.folder / "large", large, replace(self.load, rounds=1), HOST), 1, ())
        self._memory(large, many)
        peaks = [self.figures[f"coordinator_peak_over_vector_{count}"] for count in (self.sites, large)]
        self.figures["coordinator_peak_difference"] = round(abs(peaks[1] - peaks[0]), 2)

    def flower(self, sites: int) -> None:
        """Both with as many sites, one after the other."""
        say(f"{sites} sites, and Flower with as many")
        folders = lay_out(self.folder / "peer", sites, self.load, HOST)
        ours = statistics.median(secure_run(folders, self.load.rounds, [()] * sites)["aggregations"])
        theirs = deployment.one_round(sites, self.load.params)
        self.figures |= {"peer_sites": sites, "flower_seconds": round(theirs, 3), "our_seconds": round(ours, 3)}
        self.figures["flower_over_ours"] = round(theirs / ours, 2)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sites", type=click.IntRange(4, 100), default=10, show_default=True)
@click.option("--params", type=click.IntRange(1), default=4_007_548, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--ring-bits", type=click.Choice(list(map(str, BITS))), default=str(DEFAULT_BITS), show_default=True)
@click.option("--large", type=click.IntRange(0, 200), default=50, show_default=True, help="Sites for memory; 0: skip.")
@click.option("--peer", type=click.Choice(["flower"]), help="Run another toolkit on the same vector and compare.")
@click.option("--peer-sites", type=click.IntRange(4, 100), default=5, show_default=True, help="Sites for --peer.")
@click.option("--only", type=click.Choice(["loopback", "slow_links", "flower"]), help="One part, to look closer at it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    sites: int,
    params: int,
    rounds: int,
    ring_bits: str,
    large: int,
    peer: str | None,
    peer_sites: int,
    only: str | None,
    as_json: bool,
) -> None:
    """Measure; figures are ratios within one run, so that they hold on other machines too."""
    folder = Path(tempfile.mkdtemp(prefix="lazaret-bench-"))
    report = Report(folder, sites, Load(params, rounds, int(ring_bits)))
    try:
        if only == "flower":
            report.flower(peer_sites)
        elif only:
            getattr(report, only)()
        else:
            report.loopback()
            report.slow_links()
            if large:
                report.memory(large)
            if peer:
                report.flower(peer_sites)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        emit(report.figures)
        return
    for name, value in report.figures.items():
        if name != "limits":
            click.echo(f"{name:<34} {value}" + (f"  (limit {LIMITS[name]})" if name in LIMITS else ""))


if __name__ == "__main__":
    run_command(main, "federation")
