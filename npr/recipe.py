"""How a run learns, as a manifest has it: its settings, their hash, and the digest of the code that computes them.

Without torch: `site-agent check` compares settings and code in a fraction of a second.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lazaret.errors import ConfigError, LocalProtocolError
from npr.config import Norm, TrainConfig
from security.dp.planner import PREFIX, PrivateSettings
from security.identity.manifest import Manifest

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
        settings: dict[str, Setting] = {"seed": self.seed}
        settings |= {f"{_MODEL}{name}": getattr(self, name) for name in ("image_size", "in_channels", "drop_rate")}
        for name, value in self.config.model_dump().items():
            if name == "method_options":
                settings |= {f"{_OPTION}{option}": chosen for option, chosen in value.items()}
            elif name == "milestones":
                settings[name] = ",".join(map(str, value))
            elif name != "method" and value is not None:
                settings[name] = value
        return settings if self.privacy is None else settings | self.privacy.to_settings()

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
            raise ConfigError("a model setting is unknown to this version", where=where) from error


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


def recipe_of(manifest: Manifest) -> Recipe:
    """The signed settings, if their hash is one that the consortium lists."""
    recipe = Recipe.of(manifest.training.method, manifest.training.settings)
    check_config_hash(recipe, manifest.training.config_hashes)
    return recipe


# What decides the numbers of a round; commands, tables and plots do not.
_CODE = (
    "backbones.py",
    "config.py",
    "depthwise.py",
    "device.py",
    "distributed.py",
    "losses.py",
    "model.py",
    "params.py",
    "plugin.py",
    "prototypes.py",
    "recipe.py",
    "seeds.py",
    "task.py",
    "training.py",
    "wire_layout.py",
    "data/loader.py",
    "dp/clipping.py",
    "dp/engine.py",
    "dp/private_site.py",
    "dp/releases.py",
    "dp/sgd.py",
    "methods/*.py",
)


def code_digest() -> str:
    """SHA-256 over the files of this package that decide what a round computes."""
    folder = Path(__file__).parent
    found = {pattern: sorted(folder.glob(pattern)) for pattern in _CODE}
    if missing := [pattern for pattern, paths in found.items() if not paths]:
        # A name that matches nothing would leave code out of what the consortium signs for, without a word.
        raise LocalProtocolError(f"no file of the learning code is called {', '.join(missing)}")
    digest = hashlib.sha256()
    for path in sorted(path for paths in found.values() for path in paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def check_code(expected: str) -> None:
    """:raises ConfigError: if this package would compute something else than the consortium has signed for."""
    if code_digest() != expected:
        raise ConfigError(
            "this package's learning code is not the one that the manifest names",
            where="manifest [model] code_digest",
            hint="install the version that the consortium used; `pip show lazaret` prints the version installed here",
        )
