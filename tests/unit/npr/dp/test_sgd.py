"""DP-SGD does what was booked: its noise, its rate, its steps, its parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lazaret.errors import BudgetExhausted, ConfigError, LocalProtocolError
from npr.dp.sgd import DpSgd
from security.dp.accountant import RATE_ONE, dp_sgd_event, rate_at_least
from security.dp.ledger import Reservation
from security.dp.noise import NoiseSource, Units, grid_step


class Silent(NoiseSource):
    """Noise switched off, for the arithmetic around it."""

    def gaussian(self, out: np.ndarray) -> np.ndarray:
        out[:] = 0.0
        return out


def reservation(
    *,
    steps: int = 1,
    clip: float = 0.5,
    multiplier: float = 1.0,
    rate: int = RATE_ONE,
    noise: NoiseSource | None = None,
) -> Reservation:
    event = dp_sgd_event(multiplier=multiplier, clip=clip, rate=rate, steps=steps)
    return Reservation(seq=1, events=[event], noise=noise or NoiseSource())


def problem(records: int = 40) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(10, 300), nn.ReLU(), nn.Linear(300, 3)),
        torch.randn(records, 10),
        torch.arange(records) % 3,
    )


def losses_of(model: nn.Module, x: Tensor, y: Tensor):  # type: ignore[no-untyped-def]
    return lambda indices: functional.cross_entropy(model(x[indices]), y[indices], reduction="none")


def sgd(model: nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_the_step_is_the_clipped_sum_over_a_public_divisor() -> None:
    model, x, y = problem()
    before = flat(model)
    trainer = DpSgd(
        model, sgd(model), reservation=reservation(noise=Silent()), units=Units(range(40)), divisor=8.0, micro_batch=16
    )
    report = trainer.step(losses_of(model, x, y))
    assert (report.drawn, report.dropped) == (40, 0)
    moved = before - flat(model)
    torch.testing.assert_close(moved, gradient(model), rtol=1e-4, atol=1e-6)
    assert 0 < float(moved.norm()) <= 40 * 0.5 / 8


@pytest.mark.parametrize("records", [0, 40])
def test_noise_has_the_booked_size_also_on_an_empty_batch(records: int) -> None:
    model, x, y = problem()
    trainer = DpSgd(
        model,
        sgd(model, 0.0),
        reservation=reservation(clip=0.5, multiplier=40.0),
        units=Units(range(records)),
        divisor=8.0,
    )
    assert trainer.step(losses_of(model, x, y)).drawn == records
    assert float(gradient(model).std()) == pytest.approx(0.5 * 40 / 8, rel=0.06)


def test_every_output_lies_on_the_public_grid() -> None:
    model, x, y = problem()
    trainer = DpSgd(model, sgd(model), reservation=reservation(), units=Units(range(40)), divisor=1.0)
    trainer.step(losses_of(model, x, y))
    steps = gradient(model).double() / grid_step(0.5)
    assert torch.equal(steps, steps.round())
    assert steps.unique().numel() > 100


def test_two_runs_with_one_torch_seed_differ() -> None:
    results = []
    for _ in range(2):
        model, x, y = problem()
        torch.manual_seed(7)
        DpSgd(model, sgd(model), reservation=reservation(), units=Units(range(40)), divisor=8.0).step(
            losses_of(model, x, y)
        )
        results.append(flat(model))
    assert not torch.allclose(*results)


def test_no_more_steps_than_booked_and_an_event_trains_once() -> None:
    model, x, y = problem()
    paid = reservation(steps=2, rate=rate_at_least(0.2))
    trainer = DpSgd(model, sgd(model), reservation=paid, units=Units(range(40)), divisor=8.0)
    assert len(trainer.run(losses_of(model, x, y))) == 2
    before = flat(model)
    with pytest.raises(BudgetExhausted, match="all booked steps"):
        trainer.step(losses_of(model, x, y))
    with pytest.raises(BudgetExhausted):
        DpSgd(model, sgd(model), reservation=paid, units=Units(range(40)), divisor=8.0)
    assert torch.equal(before, flat(model))


def test_a_record_that_is_not_finite_is_dropped_and_the_step_goes_on() -> None:
    model, x, y = problem()
    x[3] = float("nan")
    trainer = DpSgd(model, sgd(model), reservation=reservation(), units=Units(range(40)), divisor=8.0)
    assert trainer.step(losses_of(model, x, y)).dropped == 1
    assert flat(model).isfinite().all()


def test_a_noisy_sum_that_is_not_finite_ends_the_run() -> None:
    class Broken(NoiseSource):
        def gaussian(self, out: np.ndarray) -> np.ndarray:
            out[:] = np.nan
            return out

    model, x, y = problem()
    trainer = DpSgd(model, sgd(model), reservation=reservation(noise=Broken()), units=Units(range(40)), divisor=8.0)
    with pytest.raises(LocalProtocolError, match="cost stays booked"):
        trainer.step(losses_of(model, x, y))


def test_an_optimizer_that_moves_more_or_less_than_is_clipped_is_refused() -> None:
    model, _, _ = problem()
    personal = nn.Linear(3, 3)
    for parameters in ([*model.parameters(), *personal.parameters()], list(model[0].parameters())):
        with pytest.raises(ConfigError, match="clipped"):
            DpSgd(
                model,
                torch.optim.SGD(parameters, lr=0.1),
                reservation=reservation(),
                units=Units(range(40)),
                divisor=8.0,
            )


@pytest.mark.parametrize(("divisor", "micro_batch"), [(0.0, 8), (-1.0, 8), (float("nan"), 8), (1.0, 0)])
def test_impossible_settings_are_refused(divisor: float, micro_batch: int) -> None:
    model, _, _ = problem()
    with pytest.raises(ConfigError):
        DpSgd(
            model,
            sgd(model),
            reservation=reservation(),
            units=Units(range(40)),
            divisor=divisor,
            micro_batch=micro_batch,
        )


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_any_torch_optimizer_learns_from_it(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 10)
    y = (x[:, 0] > 0).long()
    model = nn.Linear(10, 2)
    paid = reservation(steps=60, clip=1.0, multiplier=0.5, rate=rate_at_least(0.25))
    optimizer = kind(model.parameters(), lr=1.0 if kind is torch.optim.SGD else 0.1)
    trainer = DpSgd(model, optimizer, reservation=paid, units=Units(range(400)), divisor=100.0)
    trainer.run(losses_of(model, x, y))
    assert float((model(x).argmax(1) == y).float().mean()) > 0.9


def test_a_patient_with_many_images_moves_the_sum_no_further_than_one_with_one() -> None:
    model, x, y = problem()
    for units in (Units([0] * 40), Units([0] + [1] * 39)):
        trainer = DpSgd(model, sgd(model, 0.0), reservation=reservation(noise=Silent()), units=units, divisor=1.0)
        assert trainer.step(losses_of(model, x, y)).drawn == len(units)
        # Half a grid step for each coordinate is what rounding adds.
        slack = 0.5 * grid_step(0.5) * gradient(model).numel() ** 0.5
        assert float(gradient(model).norm()) <= 0.5 * len(units) + slack


@pytest.mark.parametrize("fused", [True, False])
def test_a_channels_last_model_moves_like_any_other(fused: bool) -> None:
    """Fused optimizers walk parameter and gradient with one index, whatever their layouts."""
    moved = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3)
        model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(memory_format=layout)
        x, y = torch.randn(5, 3, 8, 8), torch.arange(5) % 4
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        paid = reservation(noise=Silent())
        DpSgd(model, optimizer, reservation=paid, units=Units(range(5)), divisor=1.0).step(losses_of(model, x, y))
        moved.append(conv.weight.detach().contiguous())
    torch.testing.assert_close(*moved, rtol=1e-3, atol=2 * grid_step(0.5))


def test_a_patient_with_several_views_is_clipped_once() -> None:
    """The mean over a patient's images is one gradient: removing the patient moves the sum by the clip at most, and the
    twin that clips each image moves it by more."""
    torch.manual_seed(1)
    head = nn.Linear(10, 3)
    features, labels = 20 * torch.randn(12, 10), torch.arange(12) % 3
    owners = [0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 5]

    def per_patient(indices: np.ndarray) -> Tensor:
        chosen = torch.from_numpy(indices)
        losses = functional.cross_entropy(
            head(features[chosen]).flatten(0, 1), labels[chosen].flatten(), reduction="none"
        )
        return losses.view(indices.shape).mean(1)

    def released(patients: list[int]) -> Tensor:
        kept = [row for row, owner in enumerate(owners) if owner in patients]
        units = Units([owners[row] for row in kept])
        rows = np.array(kept)
        steps = DpSgd(
            head,
            sgd(head, 0.0),
            reservation=reservation(clip=0.5, noise=Silent()),
            units=units,
            divisor=1.0,
            # Every number of images here divides it, so that each patient's mean is the same in both worlds.
            views=12,
        )
        steps.step(lambda indices: per_patient(rows[indices]))
        return gradient(head)

    everybody = released([0, 1, 2, 3, 4, 5])
    for patient in range(6):
        without = released([other for other in range(6) if other != patient])
        assert float((everybody - without).norm()) <= 0.5 + 0.01, "the clip, and the rounding of two releases"
    clip_each = [0.5 * g / g.norm() for g in _gradients(head, features[:4], labels[:4])]
    assert float(torch.stack(clip_each).sum(0).norm()) > 0.5, "a clip for each image would bound nothing"


def _gradients(head: nn.Module, features: Tensor, labels: Tensor) -> list[Tensor]:
    losses = functional.cross_entropy(head(features), labels, reduction="none")
    parameters = list(head.parameters())
    return [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]) for loss in losses
    ]
