"""What security costs on the network: `python -m benchmarks.federation --sites 10 --params 4007548 --json`.

Coordinator and sites are processes that talk mTLS over loopback, or over links of 100 Mbit/s. The burst from Plan to
the last site's result is compared with a plaintext float32 exchange of the same vector among as many processes.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from safetensors.numpy import save_file

from benchmarks import links, times
from scripts.one_machine.grounds import HOST, Grounds, free_port
from scripts.one_machine.processes import Party, wait_until
from scripts.one_machine.sums import manifest_at
from security.terminal import emit, run_command, say

LIMITS = {"secure_over_plain": 3.0, "secure_over_plain_100mbit": 1.2, "audit_bytes_over_vector": 4.5}
PLAN = f"""
run = "bench"
[model]
initial = "initial.safetensors"
architecture = "numbers"
code_digest = "{"ab" * 32}"
classes = 2
[training]
method = "fedavg"
rounds = {{rounds}}
steps = 50
config_hashes = ["{"cd" * 32}"]
[training.settings]
learning_rate = 0.001
[timing]
train = 600
message = 120
upload = 300
"""


def lay_out(folder: Path, sites: int, params: int, rounds: int, host: str) -> Grounds:
    folder.mkdir()
    initial = folder / "initial.safetensors"
    save_file({"layer.weight": np.linspace(-1, 1, params, dtype=np.float32)}, initial)
    grounds = Grounds(
        folder=folder,
        plan=PLAN.format(rounds=rounds),
        sources={f"site{number:02}": "generated" for number in range(sites)},
        initial=initial,
        coordinator_settings={"grace": 300.0, "audit": 60.0, "ping": 30.0},
        site_settings={"site": "threads = 1\nready_slot = 0.5", "coordinator": "least_wait = 0.2\nmost_wait = 1"},
        host=host,
    )
    grounds.prepare()
    return grounds


def secure_run(grounds: Grounds, rounds: int, prefixes: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Bursts in seconds, bytes that one site fetched to check one sum, and the coordinator's memory."""
    output = grounds.folder / "output"
    config = grounds.coordinator / "coordinator.toml"
    first = Party("coordinator", ["benchmarks.secure", "coordinator", config], output / "first", grounds.coordinator)
    sites = [
        Party(
            name,
            ["benchmarks.secure", "site", grounds.site(name) / "site.toml"],
            output / name,
            grounds.site(name),
            prefix=prefix,
        )
        for name, prefix in zip(grounds.sources, prefixes, strict=True)
    ]
    try:
        first.start()
        first.wait_for("listening", seconds=120)
        before = memory(first.pid, "VmRSS")
        for site in sites:
            site.start()
        first.wait_for(f"the sum of round {rounds} is checked", seconds=900)
        peak = memory(first.pid, "VmHWM")
    finally:
        for party in (*sites, first):
            party.stop()
    begun = times.read(grounds.coordinator / "times", "plan")
    ended = [times.read(grounds.site(name) / "times", "result") for name in grounds.sources]
    layout = manifest_at(grounds.coordinator / "identity").aggregation.layout
    checked = times.last_value(grounds.coordinator / "times", "checked")
    return {
        "bursts": [max(moments[number] for moments in ended) - begun[number] for number in range(1, rounds + 1)],
        "audit_bytes_over_vector": checked / rounds / len(sites) / layout.byte_length,
        "peak_over_vector": (peak - before) / layout.byte_length,
    }


def plain_run(grounds: Grounds, params: int, rounds: int, prefixes: Sequence[Sequence[str]]) -> list[float]:
    """Seconds from go to the last site's mean, round by round."""
    output, port = grounds.folder / "plain", free_port()
    module = "benchmarks.plain.parties"
    moments = grounds.folder / "plain-times"
    words = ["server", grounds.coordinator / "identity", port, len(grounds.sources), params, rounds, moments]
    server = Party("server", [module, *words], output / "server", grounds.coordinator)
    sites = []
    for name, prefix in zip(grounds.sources, prefixes, strict=True):
        words = ["site", grounds.site(name) / "identity", f"{grounds.host}:{port}", params, rounds]
        words.append(grounds.site(name) / "plain-times")
        sites.append(Party(name, [module, *words], output / name, grounds.site(name), prefix=prefix))
    try:
        for party in (server, *sites):
            party.start()
        wait_until(lambda: all(site.code is not None for site in sites), "plain exchange", seconds=600)
    finally:
        for party in (*sites, server):
            party.stop()
    begun = times.read(moments, "go")
    ended = [times.read(grounds.site(name) / "plain-times", "mean") for name in grounds.sources]
    return [max(found[number] for found in ended) - begun[number] for number in range(rounds)]


def memory(pid: int, what: str) -> int:
    """Bytes, from the kernel."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{what} is not told")


def compare(folder: Path, sites: int, params: int, rounds: int, megabits: int | None) -> dict[str, Any]:
    """Secure and plain, one after the other, on the same grounds."""
    if megabits is None:
        grounds = lay_out(folder, sites, params, rounds, HOST)
        return _both(grounds, params, rounds, [()] * sites)
    with links.slow_links(sites, megabits) as prefixes:
        grounds = lay_out(folder, sites, params, rounds, links.ADDRESS)
        return _both(grounds, params, rounds, prefixes)


def _both(grounds: Grounds, params: int, rounds: int, prefixes: Sequence[Sequence[str]]) -> dict[str, Any]:
    plain = plain_run(grounds, params, rounds, prefixes)
    secure = secure_run(grounds, rounds, prefixes)
    return secure | {"plain": plain, "ratio": statistics.median(secure["bursts"]) / statistics.median(plain)}


def report(sites: int, params: int, rounds: int, large: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="lazaret-bench-"))
    told: dict[str, Any] = {"sites": sites, "params": params, "limits": LIMITS}
    try:
        say(f"loopback, {sites} sites")
        here = compare(folder / "loopback", sites, params, rounds, None)
        told["secure_over_plain"] = round(here["ratio"], 3)
        told["secure_seconds"] = [round(value, 3) for value in here["bursts"]]
        told["plain_seconds"] = [round(value, 3) for value in here["plain"]]
        told["audit_bytes_over_vector"] = round(here["audit_bytes_over_vector"], 3)
        told[f"coordinator_peak_over_vector_{sites}"] = round(here["peak_over_vector"], 2)
        reason = links.why_not()
        if reason is None:
            say("links of 100 Mbit/s")
            slow = compare(folder / "slow", sites, params, rounds, 100)
            told["secure_over_plain_100mbit"] = round(slow["ratio"], 3)
            told["secure_seconds_100mbit"] = [round(value, 3) for value in slow["bursts"]]
            told["plain_seconds_100mbit"] = [round(value, 3) for value in slow["plain"]]
        else:
            told |= {"secure_over_plain_100mbit": None, "skipped": f"links of 100 Mbit/s: {reason}"}
        if large:
            say(f"memory with {large} sites")
            grounds = lay_out(folder / "large", large, params, 1, HOST)
            many = secure_run(grounds, 1, [()] * large)
            told[f"coordinator_peak_over_vector_{large}"] = round(many["peak_over_vector"], 2)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return told


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sites", type=click.IntRange(4, 100), default=10, show_default=True)
@click.option("--params", type=click.IntRange(1), default=4_007_548, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True)
@click.option("--large", type=click.IntRange(0, 200), default=50, show_default=True, help="Sites for memory; 0: skip.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(sites: int, params: int, rounds: int, large: int, as_json: bool) -> None:
    """Measure; figures are ratios within one run, so that they hold on other machines too."""
    told = report(sites, params, rounds, large)
    if as_json:
        emit(told)
        return
    for name, value in told.items():
        if name != "limits":
            click.echo(f"{name:<34} {value}" + (f"  (limit {LIMITS[name]})" if name in LIMITS else ""))


if __name__ == "__main__":
    run_command(main, "federation")
