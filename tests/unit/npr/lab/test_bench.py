"""The benchmark measures what it says: right plans, rounds in turns, honest ratios. Running it checks the limits."""

import pytest

from npr.lab import bench


def test_the_solver_is_right_and_faster_than_pot():
    pytest.importorskip("ot")
    report = bench.sinkhorn_ratio(repeats=3)
    found = report["sinkhorn"]
    assert found["features"] == 10_000 and found["classes"] == 8 and found["clusters"] == 4
    assert found["plan_gap"] <= bench.PLAN_TOLERANCE
    assert 0 < report["sinkhorn_over_pot"] <= bench.LIMITS["sinkhorn_over_pot"]


def test_a_wrong_plan_shows_in_the_gap(monkeypatch):
    pytest.importorskip("ot")
    right = bench.balanced_plan

    def one_iteration(*arguments, **options):
        return right(*arguments, **options | {"max_iterations": 1})

    monkeypatch.setattr(bench, "balanced_plan", one_iteration)
    assert bench.sinkhorn_ratio(repeats=1)["sinkhorn"]["plan_gap"] > bench.PLAN_TOLERANCE


def test_rounds_are_measured_without_their_first():
    report = bench.round_ratios(repeats=2, scale=0.001, architecture="test_efficientnet")
    for name in ("npr_round_over_bsm_round", "npr_epoch_round_over_bsm_round", "input_pipeline_share"):
        assert name in bench.LIMITS and report[name] > 0
    assert set(report["rounds"]["median_cpu_seconds"]) == {"bsm", "npr", "npr_epoch"}


def test_tasks_alternate_and_the_warm_up_is_not_counted():
    order = []
    tasks = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    seconds = bench.alternate(tasks, repeats=3, warm_up=1)
    assert "".join(order) == "abbaabba" and {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_a_burst_of_load_on_one_pair_does_not_move_the_ratio():
    ours, theirs = ([bench.Seconds(cpu, 3 * cpu) for cpu in times] for times in ([1.0, 9.0, 1.1], [2.0, 18.0, 2.2]))
    assert bench.paired_ratio(ours, theirs) == pytest.approx(0.5) == bench.paired_ratio(ours, theirs, of="wall")
