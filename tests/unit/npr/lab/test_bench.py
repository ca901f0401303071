"""The benchmark measures what it says: right plans, rounds in turns, honest ratios. Running it checks the limits."""

import pytest
import torch

from npr.lab import bench
from npr.model import ModelSpec, build_model


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


def test_a_round_is_measured_against_a_plain_loop_and_its_bare_convolutions():
    report = bench.loop_ratios(repeats=1, scale=0.001, architecture="test_efficientnet", image_size=32)
    assert {"round_over_plain_loop", "evaluate_over_forward"} <= set(bench.LIMITS)
    assert all(report[name] > 0 for name in ("round_over_floor", "round_over_plain_loop", "evaluate_over_forward"))
    assert set(report["loops"]["median_cpu_seconds"]) == {"round", "plain", "floor", "evaluate", "forward"}


def test_the_floor_is_every_convolution_and_matrix_product_of_a_step(monkeypatch):
    model = build_model(ModelSpec(num_classes=4, architecture="test_efficientnet", image_size=32))
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)]
    floor = bench.Floor(model, 8, 32)
    done, grad = [], torch.autograd.grad

    def counted(output, wanted, gradient):
        done.append((len(output), sum(tensor.numel() for tensor in wanted)))
        return grad(output, wanted, gradient)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    floor.run([8, 3])
    assert [images for images, _ in done] == [8] * len(layers) + [3] * len(layers)
    weights = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    assert sum(numbers for _, numbers in done[: len(layers)]) > weights, "gradients of inputs too"


def test_tasks_alternate_and_the_warm_up_is_not_counted():
    order = []
    tasks = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    seconds = bench.alternate(tasks, repeats=3, warm_up=1)
    assert "".join(order) == "abbaabba" and {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_a_burst_of_load_on_one_pair_does_not_move_the_ratio():
    ours, theirs = ([bench.Seconds(cpu, 3 * cpu) for cpu in times] for times in ([1.0, 9.0, 1.1], [2.0, 18.0, 2.2]))
    assert bench.paired_ratio(ours, theirs) == pytest.approx(0.5) == bench.paired_ratio(ours, theirs, of="wall")
