"""How cost grows with the number of sites: `python -m benchmarks.crowd --sites 10,25,50,100 --json`.

One coordinator and so many sites, several to a process and without torch, over mTLS on this machine; one round each.
Time, processor time, the coordinator's memory and bytes are told for each size. Per site they may grow with the number
of sites at most linearly, and the coordinator's peak must not grow.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import times
from benchmarks.federation import Load, _site_processes, lay_out, memory
from benchmarks.stress.verdict import Reading, Verdict, megabytes
from coordinator.database import FILE
from coordinator.round_history import ReadOnlyHistory
from lazaret.terminal import emit, run_command, say
from scripts.local_federation.federation import HOST, FederationFolders, Party, WaitFailed
from scripts.local_federation.known_updates import words_of
from scripts.local_federation.sums import is_exact, manifest_at, read_published
from security.crypto.ring import DEFAULT_BITS

PEAK_VECTORS: Final = 0.5  # how much more the largest crowd may need than the smallest, in vectors
NOISE_BYTES: Final = 8e6  # of a process of this size; vectors in earnest are larger
SLACK: Final = 1.3  # on a machine that does other things too
GROWING: Final = (
    "site_processor_s",
    "coordinator_processor_s_per_site",
    "uploaded_mb_per_site",
    "fetched_for_the_check_mb_per_site",
)


def one_crowd(folder: Path, sites: int, params: int, seconds: float) -> dict[str, Any]:
    """One round of so many sites, from the first connection to the certificate of its sum."""
    begun = time.monotonic()
    folders = lay_out(folder, sites, Load(params, 1, DEFAULT_BITS), HOST)
    prepared = time.monotonic() - begun
    config = folders.coordinator / "coordinator.toml"
    words = ["benchmarks.secure", "coordinator", config]
    first = Party("coordinator", words, folder / "output" / "first", folders.coordinator)
    crowd = _site_processes(folders, ())
    try:
        first.start()
        first.wait_for("listening", seconds=120)
        for party in crowd:
            party.start()
        first.wait_for(" connected", seconds=seconds, times=sites)
        idle, before = memory(first.pid, "VmRSS"), [Reading.of(party.pid) for party in (first, *crowd)]
        first.wait_for("the sum of round 1 is checked", seconds=seconds)
        after, peak = [Reading.of(party.pid) for party in (first, *crowd)], memory(first.pid, "VmHWM")
    finally:
        for party in (*crowd, first):
            party.stop()
    cost = [late.processor - early.processor for early, late in zip(before, after, strict=True)]
    layout = manifest_at(folders.coordinator / "identity").aggregation.layout
    with ReadOnlyHistory(folders.coordinator / "state" / FILE) as history:
        received = history.round_figures(after=0)[0].bytes_in or 0
    checked = times.last_value(folders.coordinator / "times", "checked")
    plan = times.read(folders.coordinator / "times", "plan")[1]
    ends = [times.read(folders.site(name) / "times", "result")[1] for name in folders.sources]
    return {
        "sites": sites,
        "exact": exact(folders),
        "burst_s": round(max(ends) - plan, 2),
        "site_processor_s": round(sum(cost[1:]) / sites, 3),
        "coordinator_processor_s": round(cost[0], 2),
        "coordinator_processor_s_per_site": round(cost[0] / sites, 4),
        "coordinator_peak_mb": megabytes(peak - idle),
        "coordinator_peak_over_vector": round((peak - idle) / layout.memory_bytes, 2),
        "uploaded_mb_per_site": megabytes(received / sites),
        "fetched_for_the_check_mb_per_site": megabytes(checked / sites),
        "vector_mb": megabytes(layout.memory_bytes),
        "prepared_s": round(prepared, 1),
    }


def exact(folders: FederationFolders) -> bool:
    """Whether the published sum is that of all sites."""
    layout = manifest_at(folders.coordinator / "identity").aggregation.layout
    (result,) = read_published(folders.coordinator)
    words = {site: words_of(layout, site, 1) for site in result.survivors}
    return set(result.survivors) == set(folders.sources) and is_exact(result, words, layout)


def check(rows: list[dict[str, Any]], verdict: Verdict) -> None:
    vector = 1e6 * rows[0]["vector_mb"]
    verdict.expect(all(row["exact"] for row in rows), "a sum is not that of all sites")
    least, most = rows[0], rows[-1]
    larger = most["sites"] / least["sites"]
    for name in GROWING:
        growth = most[name] / max(least[name], 1e-3)
        verdict.figures[f"{name}_growth"] = round(growth, 2)
        verdict.expect(growth <= larger * SLACK, f"{name} grew {growth:.1f} times, the crowd {larger:.1f} times")
    difference = 1e6 * (most["coordinator_peak_mb"] - least["coordinator_peak_mb"])
    verdict.figures["coordinator_peak_difference"] = round(difference / vector, 2)
    verdict.expect(difference < max(PEAK_VECTORS * vector, NOISE_BYTES), f"the coordinator's peak grew by {difference}")


def run(sizes: list[int], params: int, seconds: float, folder: Path | None = None) -> Verdict:
    verdict = Verdict(params=params)
    place = folder or Path(tempfile.mkdtemp(prefix="lazaret-crowd-"))
    start, rows = time.monotonic(), []
    try:
        for sites in sizes:
            left = start + seconds - time.monotonic()
            if left <= 0:
                verdict.faults.append(f"no time was left for {sites} sites")
                break
            say(f"{sites} sites")
            try:
                rows.append(one_crowd(place / str(sites), sites, params, left))
            except WaitFailed as error:
                verdict.faults.append(f"{sites} sites: {error}")
            if folder is None:
                shutil.rmtree(place / str(sites), ignore_errors=True)
        verdict.figures["crowds"] = rows
        if rows:
            check(rows, verdict)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    verdict.figures["seconds"] = round(time.monotonic() - start, 1)
    return verdict


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sites", default="10,25,50,100", show_default=True, help="Sizes, smallest first.")
@click.option("--params", type=click.IntRange(100), default=4_007_548, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="The same numbers in every run: not used.")
@click.option("--seconds", type=click.IntRange(10), default=3600, show_default=True, help="At most this long.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(sites: str, params: int, seed: int, seconds: int, as_json: bool) -> None:
    """Measure crowds of growing size."""
    del seed  # what sites put in follows from their names and the round
    report = run([int(word) for word in sites.split(",")], params, seconds).report
    if as_json:
        emit(report)
    else:
        for name, value in report.items():
            click.echo(f"{name:<34} {value}")
    raise SystemExit(not report["ok"])


if __name__ == "__main__":
    run_command(main, "crowd")
