"""The benchmark runs, and its figures mean what their names say. The figures themselves are taken at full size."""

from __future__ import annotations

from npr.lab.dp_bench import bench


def test_a_small_run_has_every_figure() -> None:
    figures = bench(batch=4, size=32, repeats=1, opacus_batch=1)
    assert figures["dp_step_over_plain_step"] == figures["dp_step_seconds"] / figures["plain_step_seconds"]
    assert figures["dp_peak_over_plain_peak"] == figures["dp_peak_bytes"] / figures["plain_peak_bytes"]
    assert figures["norm_relative_error"] < 1e-4
    assert figures["plain_peak_bytes"] > 0
    # Opacus expands depthwise convolutions to dense ones; that it costs many plain steps is the reason for our own.
    assert figures["opacus_default_step_over_plain_step"] > 2
