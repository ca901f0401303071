"""Files that a manifest pins by their SHA-256: the model everybody starts from, and a method's own file.

The initial model is a safetensors file, read with numpy; the layout follows from it. Tensors are laid out by name, or
in the order that the file's metadata gives. Running statistics of batch normalisation become statistic blocks in units
of their initial variance; counters have no place in a sum; tensors that match `personal` stay at every site.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from lazaret.errors import ConfigError, VerificationFailed
from security.identity.manifest import Manifest, PluginFile
from security.secagg.clips import Clips
from security.secagg.layout import Block, Layout
from security.secagg.state import State, canonical, flatten, state_hash

_MEAN: Final = "running_mean"
_VARIANCE: Final = "running_var"
_COUNTER: Final = "num_batches_tracked"
_FETCH: Final = "the consortium makes it with `npr-lab model` and sends it out; the configuration says where it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialModel:
    """Named tensors, and what their exporter wrote about them into the file's metadata."""

    path: Path
    digest: str
    tensors: Mapping[str, npt.NDArray[np.float32]]
    metadata: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> InitialModel:
        try:
            with open(path, "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            with safe_open(path, framework="np") as file:
                metadata: dict[str, str] = dict(file.metadata() or {})
                tensors: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
        except FileNotFoundError as error:
            raise ConfigError("initial model not found", where=str(path), hint=_FETCH) from error
        except OSError as error:
            reason = f"initial model cannot be read: {(error.strerror or 'the disk reports an error').lower()}"
            raise ConfigError(reason, where=str(path), hint="is the path right, and may this user read it?") from error
        except SafetensorError as error:
            raise ConfigError("not a safetensors file", where=str(path), hint=f"is it complete? {_FETCH}") from error
        floats = {name: tensor for name, tensor in tensors.items() if not name.endswith(_COUNTER)}
        for name, tensor in floats.items():
            if tensor.dtype != np.float32:
                raise ConfigError(f"tensor {name} is {tensor.dtype}, not float32", where=str(path))
        return cls(path=path, digest=digest, tensors=floats, metadata=metadata)

    def shared(self, personal: Sequence[str], *, local_statistics: bool) -> dict[str, npt.NDArray[np.float32]]:
        """The tensors that travel: neither the plan's personal ones nor those that the exporter calls personal.

        A pattern that matches nothing is a mistake, and would let a personal part out.
        """
        personal = [*personal, *self.metadata.get("personal", "").split()]
        for pattern in personal:
            if not any(fnmatchcase(name, pattern) for name in self.tensors):
                raise ConfigError(
                    f"no tensor matches {pattern!r}", where=f"{self.path} [model] personal", hint="check the spelling"
                )
        kept = {
            name: self.tensors[name]
            for name in self._order()
            if not any(fnmatchcase(name, pattern) for pattern in personal)
            and not (local_statistics and name.endswith((_MEAN, _VARIANCE)))
        }
        if not kept:
            raise ConfigError("no tensor is left to share", where=str(self.path))
        return kept

    def _order(self) -> list[str]:
        """By name; or as the exporter says, so that its own flat vector is the layout's."""
        names = sorted(self.tensors, key=str.encode)
        order = self.metadata.get("order", "").split()
        if order and sorted(order, key=str.encode) != names:
            raise ConfigError("the order in the metadata does not list the file's tensors", where=str(self.path))
        return order or names


def blocks_of(shared: Mapping[str, npt.NDArray[np.float32]], clips: Clips, where: str) -> list[Block]:
    """One block for each tensor, with clips from the schedule and units from the initial statistics."""
    blocks = []
    for name, tensor in shared.items():
        if name.endswith((_MEAN, _VARIANCE)):
            variance = shared.get(name.removesuffix(_MEAN) + _VARIANCE if name.endswith(_MEAN) else name)
            if variance is None or variance.shape != tensor.shape or not (variance >= 0).all():
                raise ConfigError(f"statistic {name} has no variance to measure it by", where=where)
            make = clips.running_mean if name.endswith(_MEAN) else clips.running_variance
            blocks.append(make(name, variance))
        else:
            blocks.append(clips.weights(name, tensor.shape))
    return blocks


def initial_state_hash(layout: Layout, shared: Mapping[str, npt.NDArray[np.float32]]) -> str:
    return state_hash(canonical(flatten(layout, shared))).hex()


def pinned_model(path: Path, manifest: Manifest) -> tuple[InitialModel, State]:
    """The initial model of a federation and the state it starts from, if the file is the one that the manifest pins.

    :raises VerificationFailed: for any other file.
    """
    model, pinned = InitialModel.read(path), manifest.model
    if model.digest != pinned.initial_file:
        raise VerificationFailed(
            f"is not the initial model of manifest version {manifest.version}",
            where=str(path),
            hint=f"ask the consortium for the file with SHA-256 {pinned.initial_file}",
        )
    layout = manifest.aggregation.layout
    missing = [block.name for block in layout.state_blocks if block.name not in model.tensors]
    if missing:
        raise VerificationFailed(f"does not have the tensor {missing[0]} of the layout", where=str(path))
    state = canonical(flatten(layout, {block.name: model.tensors[block.name] for block in layout.state_blocks}))
    if state_hash(state).hex() != pinned.initial_state:
        raise VerificationFailed("does not hold the state that the manifest starts from", where=str(path))
    return model, state


# The file of a method of one's own. A run may be trained by a method that no release has (docs/methods.md). The
# manifest pins the name and the SHA-256 of its file, each hospital's policy approves the same digest, and the process
# that trains asks for the bytes here. They are read once, and what was read is what is hashed, and then what runs: a
# file that is swapped after the check has no effect.

MAX_PLUGIN_BYTES: Final = 1024 * 1024


def read_plugin(path: Path) -> bytes:
    """The bytes of a plugin.

    :raises ConfigError: if there is no such file, or it is none that could be one.
    """
    try:
        # A pipe of this name would wait for its other end for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            source = file.read(MAX_PLUGIN_BYTES + 1) if regular else b""
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"the plugin cannot be read: {reason}", where=str(path)) from error
    if not regular or len(source) > MAX_PLUGIN_BYTES:
        raise ConfigError(f"is no Python file of up to {MAX_PLUGIN_BYTES} bytes", where=str(path))
    return source


def pinned_plugin(folder: Path, pinned: PluginFile) -> bytes:
    """The bytes of the plugin that a manifest pins, from the hospital's folder.

    :raises ConfigError: if it is not there, or is another file. Names both digests.
    """
    path = folder / pinned.name
    try:
        source = read_plugin(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error.message}; the manifest pins the plugin {pinned.name} with SHA-256 {pinned.sha256}, here is none",
            where=str(path),
            hint="ask the consortium for the file, read it, and put it into the folder [site] plugins",
        ) from error
    if (found := plugin_digest(source)) != pinned.sha256:
        raise ConfigError(
            f"the plugin {pinned.name} has SHA-256 {found}, the manifest pins {pinned.sha256}",
            where=str(path),
            hint="ask the consortium for the file that it has signed for",
        )
    return source


def plugin_digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()
