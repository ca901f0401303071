"""One site trained by two processes: the cases, and the second process (`python -m tests.support.two_processes`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import FileStore

from npr.config import TrainConfig
from npr.distributed import Group, gathered
from npr.methods import registry
from npr.methods.base import Method
from npr.methods.site import Site
from npr.model import normalisation
from npr.training import LocalReport
from tests.unit.npr.conftest import SPEC, make_samples

SECONDS = 60.0
# 29 images in batches of 8: the last batch has five, which two processes share unevenly.
COUNTS = (7, 12, 5, 5)

CASES: dict[str, dict[str, Any]] = {
    "fednpr-per": {},
    "fednpr-per by gradient descent": {"optimizer": "sgd", "learning_rate": 0.05},
    "fednpr from the epoch's features": {"prototype_source": "epoch", "augmentation": "paper", "optimizer": "sgd"},
    "moon+npr": {"optimizer": "sgd"},
    "fedrep": {"optimizer": "sgd"},
}

# MOON pushes from the model of the round before.
ROUNDS = {case: 2 if case == "moon+npr" else 1 for case in CASES}


class Careless(Group):
    """A group that normalises each slice by itself."""

    def as_one(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Alone(Group):
    """A group whose processes keep their gradients to themselves."""

    def sum_gradients(self, parameters: object) -> None:
        return None


def make_site(case: str, counts: tuple[int, ...] = COUNTS, **more: Any) -> tuple[Method, Site]:
    config = TrainConfig(method=case.split()[0], batch_size=8, **(CASES[case] | more))
    method, (mean, std) = registry.build(config), normalisation(SPEC)
    site = Site(
        name="a",
        train=make_samples(counts, 0),
        model=method.build_model(SPEC),
        config=config,
        seed=1,
        mean=mean,
        std=std,
    )
    return method, site


def train(store: FileStore, case: str, rank: int, group_type: type[Group] = Group) -> tuple[Site, LocalReport]:
    """The rounds of a case; both processes call this in the same order."""
    method, site = make_site(case)
    name = f"{case} {group_type.__name__}"
    with gathered(store, name, rank=rank, size=2, seconds=SECONDS) as group:
        site.group = group_type(rank=group.rank, size=group.size)
        reports = [method.local_round(site, number) for number in range(1, ROUNDS[case] + 1)]
    return site, reports[-1]


def everything(store: FileStore, rank: int, keep: Callable[[str, tuple[Site, LocalReport]], object]) -> None:
    for case in CASES:
        keep(case, train(store, case, rank))
    for careless in (Careless, Alone):
        keep(careless.__name__, train(store, "fednpr-per by gradient descent", rank, careless))


if __name__ == "__main__":
    torch.set_num_threads(1)
    everything(FileStore(sys.argv[1], 2), 1, lambda *_: None)
