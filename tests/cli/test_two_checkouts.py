"""What the comparison of two checkouts makes of what the demo says."""

from __future__ import annotations

from benchmarks.two_checkouts import middle, phases


def test_phases_are_told_apart_by_what_the_demo_says() -> None:
    told = [
        (9.5, "[   9 s] coordinator: round 1 waits: 0 sites can take part"),
        (12.0, "[  12 s] coordinator: round 1: training"),
        (20.0, "[  20 s] coordinator: round 2: training"),
        (51.0, "[  51 s] coordinator: round 5: training"),
        (55.5, "[  55 s] coordinator: round 5: published"),
        (60.0, "[  60 s] 5 rounds are done; now each hospital alone, with the same number of steps"),
        (80.5, "[  80 s] checking the sums, the logs and the figures"),
    ]
    expected = {"start": 12.0, "rounds": 48.0, "alone": 20.5, "checks": 2.5, "first_round": 8.0}
    expected["last_round"] = 4.5
    assert phases(told, 83.0) == expected


def test_the_middle_is_the_median_and_of_hospitals_the_mean() -> None:
    runs = [
        {"seconds": 90.0, "peak_pss_mb": {"a": 100, "b": 200}},
        {"seconds": 110.0, "peak_pss_mb": {"a": 300, "b": 200}},
    ]
    assert middle(runs) == {"seconds": 100.0, "peak_pss_mb": 200.0}
