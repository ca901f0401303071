"""Which numbers of a model make up the vector that is summed: names, shapes, order, and one digest over all of it.

Groups are what a method shares or keeps: "extractor", "norm" (scale and shift of layers with running statistics),
"statistics" (their running means and variances), "head", "constant" (buffers that never change; no method shares
them), and whatever a method adds under its own name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import rfc8785
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from security.errors import LocalProtocolError

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
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

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, model: nn.Module, groups: Collection[str] | None = None) -> ParameterManifest:
        """List the tensors of `model` in `groups`, or all of them, in the model's own order."""
        entries = _entries(model)
        unknown = set(groups or ()) - {entry.group for entry in entries} - {"norm", "statistics"}
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
        vector = np.empty(self.size, dtype=np.float32)
        offset = 0
        for entry in self.entries:
            vector[offset : offset + entry.size] = state[entry.name].detach().reshape(-1).numpy()
            offset += entry.size
        return vector

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


def _entries(model: nn.Module) -> list[Entry]:
    normalised = {f"{name}." for name, module in model.named_modules() if isinstance(module, _NormBase)}
    learned = {name for name, _ in model.named_parameters()}
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
        entries.append(Entry(name=name, shape=tuple(tensor.shape), group=group, kind=kind))
    return entries
