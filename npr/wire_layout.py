"""Between a model and the network: which tensors are sent, states and updates, the initial model.

The site agent, the lab's secure aggregation and the exporter of initial models all go through this file, so that the
same round gives the same vector everywhere. A state is a flat float32 vector in the order of the consortium's layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import nn

from lazaret import files
from lazaret.errors import ConfigError, LocalProtocolError
from npr.methods import registry
from npr.methods.base import Method
from npr.model import ModelSpec, SplitModel
from npr.params import ParameterEntry, ParameterManifest, Vector, flat_on_host
from npr.plugin import plugin_of
from npr.recipe import Recipe, code_digest
from security.secagg.layout import Layout


def ever_shared(method: Method, rounds: int) -> frozenset[str]:
    """The groups that some round of a run shares; the layout holds these and never changes."""
    if not method.wire:
        raise ConfigError(
            f"{method.name} needs more of its server than a mean, so that sites could not check its models",
            where="method",
            hint="it runs in the lab only; choose another method for a federation",
        )
    return all_shares(method, rounds)


def all_shares(method: Method, rounds: int) -> frozenset[str]:
    """The same of any method, for the lab, which is its own server."""
    return frozenset().union(*(method.shares(number) for number in range(1, rounds + 1)))


def personal_tensors(method: Method, model: nn.Module, rounds: int) -> tuple[str, ...]:
    """Names of the tensors that no round shares."""
    shared = ever_shared(method, rounds)
    return tuple(entry.name for entry in ParameterManifest.of(model).entries if entry.group not in shared)


def groups_to_load(method: Method, last_round: int, round_number: int) -> frozenset[str]:
    """What a site takes over from the state before a round, if it last trained in `last_round` (0: never).

    After every round, what that round shared. A site that was away takes over what any round since has shared; a head
    that has become personal meanwhile is thus loaded once more, in its last shared form.
    """
    rounds = range(max(1, last_round), max(1, round_number - 1) + 1)
    return frozenset().union(*(method.shares(number) for number in rounds))


class WireModel:
    """A model's tensors at their places in the layout."""

    def __init__(self, layout: Layout, model: nn.Module) -> None:
        entries = {entry.name: entry for entry in ParameterManifest.of(model).entries}
        self._places: list[tuple[ParameterEntry, slice]] = []
        for block, place in layout.placed():
            entry = entries.get(block.name)
            if entry is None or entry.shape != block.shape:
                raise ConfigError(
                    f"the model has no tensor {block.name} of shape {block.shape}",
                    where="manifest [layout]",
                    hint="the architecture of this package is not the one that the layout was made for",
                )
            self._places.append((entry, place))
        self.size = layout.state_words

    def state(self, model: nn.Module) -> Vector:
        """The model's own values in layout order; not yet canonical."""
        flat = np.empty(self.size, dtype="<f4")
        for place, values in self._on_host(model, self._places):
            flat[place] = values
        return flat

    @staticmethod
    def _on_host(
        model: nn.Module, places: Sequence[tuple[ParameterEntry, slice]]
    ) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The model's values at their places; they leave its device once, together."""
        tensors = model.state_dict()
        values = flat_on_host([tensors[entry.name] for entry, _ in places])
        parts = np.split(values, np.cumsum([entry.size for entry, _ in places])[:-1]) if places else []
        yield from zip((place for _, place in places), parts, strict=True)

    @torch.no_grad()
    def load(self, model: nn.Module, state: Vector, groups: Collection[str]) -> None:
        """Copy the groups named out of the state; everything else of the model stays as it is."""
        self._check(state)
        tensors = model.state_dict()
        for entry, place in self._places:
            if entry.group in groups:
                part = torch.from_numpy(np.array(state[place], dtype=np.float32))
                tensors[entry.name].copy_(part.view(entry.shape))

    def update(self, model: nn.Module, state: Vector, groups: Collection[str]) -> Vector:
        """What the model has moved by since `state`, in float32; exactly zero outside the groups named."""
        self._check(state)
        flat = np.zeros(self.size, dtype="<f4")
        chosen = [(entry, place) for entry, place in self._places if entry.group in groups]
        for place, values in self._on_host(model, chosen):
            np.subtract(values, state[place], out=flat[place])
        return flat

    def units(self, model: nn.Module, flat: NDArray[np.int64]) -> NDArray[np.int32]:
        """Whole numbers for each trained parameter, from the model's order to the layout's."""
        trained = [(name, parameter.numel()) for name, parameter in model.named_parameters() if parameter.requires_grad]
        starts = np.cumsum([0, *(size for _, size in trained)])
        found = {name: slice(start, start + size) for (name, size), start in zip(trained, starts, strict=False)}
        if flat.shape != (self.size,) or set(found) != {entry.name for entry, _ in self._places}:
            raise LocalProtocolError("with shared noise, exactly what is trained is sent")
        arranged = np.zeros(self.size, dtype="<i4")
        for entry, place in self._places:
            arranged[place] = flat[found[entry.name]]
        return arranged

    def _check(self, state: Vector) -> None:
        if state.shape != (self.size,) or state.dtype != np.float32:
            raise LocalProtocolError(f"a state of {state.dtype} {state.shape} does not fit a layout of {self.size}")


# The initial model of a federation: exported once for the consortium, loaded and checked at every site.


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, for people."""

    path: Path
    sha256: str
    tensors: int
    shared_values: int
    personal: tuple[str, ...]
    config_hash: str


def with_engine(recipe: Recipe, model: nn.Module) -> Recipe:
    """The recipe with the engine that `auto` means for this model, after its gradients were compared with autograd.

    :raises PolicyViolation: if no record of this model can be clipped exactly; nothing is written then.
    """
    if recipe.privacy is None:
        return recipe
    from npr.dp.engine import check_exact

    # The whole numbers of shared noise are made of the rows of each record, which Opacus has.
    wanted = "opacus" if recipe.privacy.noise == "shared" else recipe.privacy.engine
    engine = check_exact(model, wanted, channels=recipe.in_channels, image_size=recipe.image_size)
    return replace(recipe, privacy=replace(recipe.privacy, engine=engine))


def export(path: Path, spec: ModelSpec, recipe: Recipe, *, rounds: int, classes: Sequence[str]) -> Exported:
    """Write the one model that everybody starts from, with all that `consortium publish` asks about it.

    :param classes: their names, in the order of the model's outputs.
    """
    if len(classes) != spec.num_classes:
        raise ConfigError(f"{len(classes)} class names for {spec.num_classes} outputs")
    method = registry.build(recipe.config)
    model = method.build_model(spec)
    recipe = with_engine(recipe, model)
    personal = personal_tensors(method, model, rounds)
    entries = ParameterManifest.of(model).entries
    metadata = {
        "architecture": spec.architecture,
        "code_digest": code_digest(),
        "classes": json.dumps(list(classes), ensure_ascii=False),
        "method": recipe.config.method,
        "config_hashes": recipe.config.config_hash,
        "settings": json.dumps(recipe.settings(), sort_keys=True),
        "personal": " ".join(personal),
        # Weights first, then statistics: neighbours with one clip are encoded in one go.
        "order": " ".join(entry.name for entry in sorted(entries, key=lambda entry: entry.kind != "weight")),
        "weights": spec.weights.split("#")[0].split(":")[0],
    }
    if (plugin := plugin_of(recipe.config.method)) is not None:
        metadata["plugin"] = plugin.sha256
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in model.state_dict().items()}
    content = save(tensors, metadata)
    files.write_atomically(path, content)
    return Exported(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        tensors=len(entries),
        shared_values=sum(entry.size for entry in entries if entry.name not in personal),
        personal=personal,
        config_hash=recipe.config.config_hash,
    )


def spec_of(architecture: str, classes: int, recipe: Recipe) -> ModelSpec:
    """The model to build at a site; its weights come from the pinned file."""
    return ModelSpec(
        architecture=architecture,
        num_classes=classes,
        in_channels=recipe.in_channels,
        image_size=recipe.image_size,
        drop_rate=recipe.drop_rate,
        weights="none",
        seed=recipe.seed,
        norm=recipe.norm,
        trainable="all" if recipe.privacy is None else recipe.privacy.trainable,
        projection=0 if recipe.privacy is None else recipe.privacy.projection,
    )


def build_initial(method: Method, spec: ModelSpec, tensors: Mapping[str, NDArray[Any]]) -> SplitModel:
    """The method's model with the tensors of the pinned file in it. Batch counters start at zero everywhere."""
    model = method.build_model(spec)
    state = model.state_dict()
    for entry in ParameterManifest.of(model).entries:
        values = tensors.get(entry.name)
        if values is None or tuple(values.shape) != entry.shape:
            raise ConfigError(
                f"the initial model has no tensor {entry.name} of shape {entry.shape}",
                hint="it was made for another architecture, method or number of classes",
            )
        state[entry.name].copy_(torch.from_numpy(values))
    return model
