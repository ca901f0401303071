"""Methods and data sets of one's own: Python files that register them, loaded into `npr-lab` and into every worker.

A federation loads one only as a plugin that its manifest pins and each hospital's policy approves
(`site_agent.trainer.plugin`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lazaret.errors import ConfigError, LocalProtocolError
from npr.config import LabelsOfImage
from npr.data.catalogue import Catalogue
from npr.data.sources import open_catalogue
from npr.plugin import run_plugin
from security.identity.pinned_files import read_plugin

VARIABLE = "LAZARET_LAB_PLUGINS"
_loaded: set[Path] = set()

Opener = Callable[[str, int], Catalogue]
"""From what follows the colon of `--data NAME:REST`, and the size of the images, to a catalogue."""
_data: dict[str, Opener] = {}
BUILT_IN = ("generated", "ham10000", "npz", "csv", "folders", "dicom", "fed-isic")


def register_data(name: str) -> Callable[[Opener], Opener]:
    """Decorator: `--data NAME:REST` then opens what the function returns, with folds and sides like any other."""

    def add(opener: Opener) -> Opener:
        if name in (*BUILT_IN, *_data):
            raise LocalProtocolError(f"a data set named {name!r} is registered already")
        _data[name] = opener
        return opener

    return add


def data_names() -> tuple[str, ...]:
    return (*BUILT_IN, *_data)


def open_data(source: str, *, image_size: int, seed: int, labels: LabelsOfImage = "one") -> Catalogue:
    """The catalogue that `--data` names, from a plugin or from npr/data."""
    name, _, rest = source.partition(":")
    if name in _data:
        return _data[name](rest, image_size)
    return open_catalogue(source, image_size=image_size, seed=seed, labels=labels)


def announce(files: tuple[Path, ...]) -> None:
    """Let this process and those it starts load these files."""
    wanted = [str(file.resolve()) for file in files]
    if wanted:
        os.environ[VARIABLE] = os.pathsep.join(wanted)


def load_plugins() -> None:
    """Run every announced file once.

    :raises ConfigError: if one is missing, fails, or takes a name that is taken.
    """
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(name)
        if path not in _loaded:
            _run(path)
            _loaded.add(path)


def _run(path: Path) -> None:
    if not path.is_file():
        raise ConfigError("there is no such Python file", where=str(path), hint="--plugin FILE.py")
    run_plugin(read_plugin(path), path.name)
