"""Which numbers of a model make up the vector that is summed, with one digest over all of it; and who adds them.

Groups are what a method shares or keeps: "extractor", "norm" (scale and shift of layers with running statistics),
"statistics" (their running means and variances), "head", "constant" (buffers that never change; no method shares
them), and whatever a method adds under its own name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np
import rfc8785
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lazaret.errors import LocalProtocolError
from npr.device import to_host

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """One tensor. `kind` is "weight", "mean" or "variance": what a clip table needs to know about it."""

    name: str
    shape: tuple[int, ...]
    group: str
    kind: str

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ParameterManifest:
    """An ordered list of tensors of a model, as one float32 vector. Batch counters are in no manifest."""

    entries: tuple[ParameterEntry, ...]

    @classmethod
    def of(cls, model: nn.Module, groups: Collection[str] | None = None) -> ParameterManifest:
        """List the tensors of `model` in `groups`, or all of them, in the model's own order."""
        entries = _entries(model)
        unknown = set(groups or ()) - {entry.group for entry in entries} - {"norm", "statistics", "extractor"}
        if unknown:
            raise LocalProtocolError(f"the model has no parameter group {sorted(unknown)}")
        return cls(tuple(entry for entry in entries if groups is None or entry.group in groups))

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of all entries."""
        rows: Any = [[entry.name, list(entry.shape), entry.group, entry.kind] for entry in self.entries]
        return hashlib.sha256(rfc8785.dumps(rows)).hexdigest()

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(entry.group for entry in self.entries)

    def flatten(self, model: nn.Module) -> Vector:
        """Copy the tensors out, each in its logical (row-major) order whatever its memory layout."""
        state = model.state_dict()
        return flat_on_host([state[entry.name] for entry in self.entries])

    @torch.no_grad()
    def load(self, model: nn.Module, vector: Vector) -> None:
        """Copy `vector` into the model; whatever is not listed stays as it is."""
        if vector.shape != (self.size,) or vector.dtype != np.float32:
            raise LocalProtocolError(
                f"a vector of {vector.dtype} {vector.shape} does not fit {self.size} float32 parameters"
            )
        state = model.state_dict()
        offset = 0
        for entry in self.entries:
            part = torch.from_numpy(np.ascontiguousarray(vector[offset : offset + entry.size]))
            state[entry.name].copy_(part.view(entry.shape))
            offset += entry.size


def flat_on_host(tensors: Sequence[Tensor]) -> Vector:
    """All values one after the other: joined where they are, and brought to the host once."""
    if not tensors:
        return np.empty(0, dtype=np.float32)
    joined: Vector = to_host(torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])).numpy()
    return joined


def _entries(model: nn.Module) -> list[ParameterEntry]:
    normalised = {f"{name}." for name, module in model.named_modules() if isinstance(module, _NormBase)}
    learned = {name for name, _ in model.named_parameters()} - getattr(model, "constants", frozenset())
    entries = []
    for name, tensor in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        # What nobody trains and nothing updates is the same at every site already: frozen norms, for instance.
        group, kind = name.partition(".")[0] if name in learned else "constant", "weight"
        if f"{layer}." in normalised:
            if leaf == "num_batches_tracked":
                continue
            group = "statistics" if leaf.startswith("running_") else "norm"
            kind = {"running_mean": "mean", "running_var": "variance"}.get(leaf, "weight")
        entries.append(ParameterEntry(name=name, shape=tuple(tensor.shape), group=group, kind=kind))
    return entries


# Aggregators: the learning code only sees a sum of vectors and a sum of weights.

Sum = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one site puts into the round: a vector, the weight it counts with, and vectors that count once per site."""

    vector: Vector
    weight: int
    extras: Mapping[str, Vector] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight < 1:
            raise LocalProtocolError(f"a contribution must weigh 1 or more, not {self.weight}")
        if not np.isfinite(self.vector).all():
            raise LocalProtocolError("a contribution holds values that are not finite")


class Aggregator(Protocol):
    def sum(self, contributions: Sequence[Contribution]) -> tuple[Sum, int]:
        """Return the sum of weight x vector, and the sum of weights."""
        ...

    def sum_extra(self, name: str, vectors: Sequence[Vector]) -> Sum:
        """Return the sum of what the sites send beside the model, each counting once."""
        ...


class PlainAggregator:
    """Adds in double precision, in the open: for the lab, never for a wire."""

    def sum(self, contributions: Sequence[Contribution]) -> tuple[Sum, int]:
        total = np.zeros(len(contributions[0].vector), dtype=np.float64)
        for contribution in contributions:
            total += contribution.vector * np.float64(contribution.weight)
        return total, sum(contribution.weight for contribution in contributions)

    def sum_extra(self, name: str, vectors: Sequence[Vector]) -> Sum:
        del name
        total: Sum = np.sum(vectors, axis=0, dtype=np.float64)
        return total


def sum_extras(aggregator: Aggregator, contributions: Sequence[Contribution]) -> dict[str, Sum]:
    """Every extra vector summed by the same aggregator and so under the same protection."""
    names = contributions[0].extras
    return {name: aggregator.sum_extra(name, [c.extras[name] for c in contributions]) for name in names}
