"""Between a model and the wire: which tensors travel, settings as a manifest carries them, states and updates by name.

The site agent, the lab's secure aggregation and the exporter of initial models all go through this file, so that the
same round gives the same vector everywhere. A state is a flat float32 vector in the order of the consortium's layout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from npr.config import TrainConfig
from npr.methods.base import Method
from npr.model import Norm
from npr.params import Entry, ParameterManifest, Vector
from security.dp.settings import PREFIX, PrivateSettings
from security.errors import ConfigError, LocalProtocolError
from security.secagg.layout import Layout

Setting = bool | int | float | str
_OPTION: Final = "method_options."
_MODEL: Final = "model."
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides a run's numbers beside the data: the training configuration, the seed and the model's input.

    :param privacy: how private rounds go; None without differential privacy.
    """

    config: TrainConfig
    seed: int = 0
    image_size: int = 224
    in_channels: int = 3
    drop_rate: float = 0.0
    privacy: PrivateSettings | None = None

    @property
    def norm(self) -> Norm:
        """Of the model: BatchNorm mixes records, so that it has no place under differential privacy."""
        return "batch" if self.privacy is None else self.privacy.norm

    def settings(self) -> dict[str, Setting]:
        """As a plan's [training.settings] and a manifest hold it: one flat table. Every key, so that no default of a
        later version can change a run; the method has a place of its own.
        """
        told: dict[str, Setting] = {"seed": self.seed}
        told |= {f"{_MODEL}{name}": getattr(self, name) for name in ("image_size", "in_channels", "drop_rate")}
        for name, value in self.config.model_dump().items():
            if name == "method_options":
                told |= {f"{_OPTION}{option}": chosen for option, chosen in value.items()}
            elif name == "milestones":
                told[name] = ",".join(map(str, value))
            elif name != "method" and value is not None:
                told[name] = value
        return told if self.privacy is None else told | self.privacy.to_settings()

    @classmethod
    def of(cls, method: str, settings: Mapping[str, Setting], *, where: str = "manifest [training]") -> Recipe:
        """Read a manifest's settings, where decimals are text."""
        values: dict[str, Any] = {"method": method}
        options: dict[str, Any] = {}
        model: dict[str, Any] = {}
        for name, value in settings.items():
            if name.startswith(_OPTION):
                options[name.removeprefix(_OPTION)] = _plain(value)
            elif name.startswith(_MODEL):
                model[name.removeprefix(_MODEL)] = _plain(value)
            elif name == "milestones":
                values[name] = tuple(int(part) for part in str(value).split(",") if part)
            elif name == "seed":
                model[name] = value
            elif not name.startswith(PREFIX):
                values[name] = value
        config = TrainConfig.parse(values | {"method_options": options}, where=where)
        try:
            return cls(config=config, privacy=PrivateSettings.of(settings, where=where), **model)
        except TypeError as error:
            raise ConfigError("a model setting that this version does not know", where=where) from error


def _plain(value: Setting) -> Setting:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def check_config_hash(recipe: Recipe, allowed: Collection[str]) -> str:
    """The hash of the configuration in force, if it is one that the consortium has signed."""
    found = recipe.config.config_hash
    if found not in allowed:
        raise ConfigError(
            "the settings do not have one of the listed hashes",
            where="manifest [training] config_hashes",
            hint="this package may be of another version than the one that exported the initial model",
        )
    return found


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
        self._places: list[tuple[Entry, slice]] = []
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
        tensors = model.state_dict()
        flat = np.empty(self.size, dtype="<f4")
        for entry, place in self._places:
            flat[place] = tensors[entry.name].detach().reshape(-1).numpy()
        return flat

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
        tensors = model.state_dict()
        flat = np.zeros(self.size, dtype="<f4")
        for entry, place in self._places:
            if entry.group in groups:
                np.subtract(tensors[entry.name].detach().reshape(-1).numpy(), state[place], out=flat[place])
        return flat

    def _check(self, state: Vector) -> None:
        if state.shape != (self.size,) or state.dtype != np.float32:
            raise LocalProtocolError(f"a state of {state.dtype} {state.shape} does not fit a layout of {self.size}")
