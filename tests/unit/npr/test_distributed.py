"""Two processes that share every batch end where one process ends (docs/site-agent.md, several processes)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import FileStore

from lazaret.errors import ConfigError
from npr.data.loader import Augmentation, Batches
from npr.distributed import Group
from npr.methods.site import Site
from npr.training import LocalReport
from tests.support.two_processes import CASES, COUNTS, ROUNDS, everything, make_site
from tests.unit.npr.conftest import make_samples

Outcome = tuple[Site, LocalReport]
# Of the way that a model has come. Sums in another order differ in their last bits, and Adam divides by the size of a
# gradient: where that is all but zero, a last bit becomes a full step.
TOLERANCE = {"sgd": 2e-4, "adam": 5e-3}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    """Every case as the first of two processes sees it; this process is the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("meeting") / "store"
    command = [sys.executable, "-m", "tests.support.two_processes", str(path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as second:
        found: dict[str, Outcome] = {}
        try:
            everything(FileStore(str(path), 2), 0, found.__setitem__)
            assert second.wait(timeout=60) == 0
        finally:
            second.kill()
    yield found
    torch.set_num_threads(before)


def alone(case: str) -> tuple[Outcome, dict[str, Tensor]]:
    method, site = make_site(case)
    start = {name: tensor.clone() for name, tensor in weights(site).items()}
    reports = [method.local_round(site, number) for number in range(1, ROUNDS[case] + 1)]
    return (site, reports[-1]), start


def weights(site: Site) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in site.model.state_dict().items() if tensor.is_floating_point()}


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return float(torch.stack([(one[name] - two[name]).double().norm() for name in one]).norm())


def apart(case: str, outcome: Outcome) -> float:
    """How far two processes end from one, as a share of the way that one has come."""
    (site, _), start = alone(case)
    return distance(weights(site), weights(outcome[0])) / distance(weights(site), start)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_where_one_ends(case: str, shared: dict[str, Outcome]) -> None:
    site, report = shared[case]
    (one, told), _ = alone(case)
    assert apart(case, shared[case]) < TOLERANCE[site.config.optimizer]
    assert (report.samples, report.steps) == (told.samples, told.steps) == (sum(COUNTS), 4)
    assert report.loss_sum == pytest.approx(told.loss_sum, rel=1e-3) and abs(report.hits - told.hits) <= 1
    assert site.memory().keys() == one.memory().keys()
    if one.prototypes is not None:
        assert site.prototypes is not None and torch.equal(site.prototypes.owners, one.prototypes.owners)
        torch.testing.assert_close(site.prototypes.vectors, one.prototypes.vectors, rtol=0, atol=2e-3)


@pytest.mark.parametrize("fault", ["Careless", "Alone"])
def test_it_does_not_without_common_statistics_or_gradients_twin(fault: str, shared: dict[str, Outcome]) -> None:
    assert apart("fednpr-per by gradient descent", shared[fault]) > 100 * TOLERANCE["sgd"]


def test_one_process_in_a_group_computes_the_same_bits() -> None:
    """Nothing of this may change what a single process does: `as_one` of a group of one is not even entered."""
    batches = make_site("fednpr-per")[1].epoch(1)
    assert not any(batch.shared for batch in batches) and batches.group.size == 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("augmentation", [None, Augmentation(), Augmentation.paper()])
def test_parts_of_a_batch_make_up_the_batch(size: int, augmentation: Augmentation | None) -> None:
    """Every image is there once, and meets the same flips, blur and angle as in one process."""
    samples = make_samples(COUNTS, 3)
    settings = {"batch_size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3, "augment": augmentation, "shuffle": True}

    def passes(group: Group) -> list[tuple[Tensor, Tensor, bool]]:
        return [(b.images, b.indices, b.shared) for b in Batches(samples, **settings, group=group)]  # type: ignore[arg-type]

    whole = passes(Group())
    parts = [passes(Group(rank=rank, size=size)) for rank in range(size)]
    for number, (images, rows, _) in enumerate(whole):
        mine = [part[number] for part in parts]
        if not mine[0][2]:
            assert len(rows) < size and all(torch.equal(part[1], rows) for part in mine)
            continue
        assert torch.equal(torch.cat([part[1] for part in mine]), rows)
        torch.testing.assert_close(torch.cat([part[0] for part in mine]), images)
    assert np.array_equal(np.sort(torch.cat([rows for _, rows, _ in whole]).numpy()), np.arange(len(samples)))


def test_the_gradient_of_whole_batch_norm_is_the_librarys() -> None:
    """In a group whose other process is the same one again: moments are those of the batch, sums are twice as large."""

    class Twice(Group):
        def sum(self, tensor: Tensor) -> Tensor:
            return tensor.mul_(2.0)

    layer, twin = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
    images = torch.randn(6, 5, 4, 4, generator=torch.Generator().manual_seed(1)) * 3 + 7
    one, two = images.clone().requires_grad_(), images.clone().requires_grad_()
    probe = torch.randn_like(images)
    (layer(one) * probe).sum().backward()
    with Twice(size=2).as_one():
        normalised = twin(two)
    (normalised * probe).sum().backward()
    assert one.grad is not None and two.grad is not None
    torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(twin.get_parameter(name).grad, parameter.grad)
    torch.testing.assert_close(twin.running_mean, layer.running_mean)
    # The unbiased variance knows how many values there are: twice as many here.
    count = images.numel() // 5
    wanted = 0.9 + (layer.running_var - 0.9) * (2 * count / (2 * count - 1)) / (count / (count - 1))
    torch.testing.assert_close(twin.running_var, wanted)


def test_what_processes_cannot_share_is_refused() -> None:
    CASES["balancefl"] = {}
    try:
        method, site = make_site("balancefl")
    finally:
        del CASES["balancefl"]
    site.group = Group(rank=0, size=2)
    with pytest.raises(ConfigError, match="balancefl draws random numbers and sums over whole batches"):
        method.local_round(site, 1)
    method, site = make_site("fednpr-per")
    site.group, site.model.drop_rate = Group(rank=0, size=2), 0.2
    with pytest.raises(ConfigError, match="dropout"):
        method.local_round(site, 1)
