"""Methods of one's own: Python files that register them, loaded by name into `npr-lab` and into every worker of a run.

A real federation never loads any: there the manifest pins the learning code, and code that no digest covers would be
code that no hospital has agreed to.
"""

from __future__ import annotations

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from lazaret.errors import ConfigError, LocalProtocolError
from npr.methods import registry

VARIABLE = "LAZARET_LAB_PLUGINS"
_loaded: set[Path] = set()


def announce(files: tuple[Path, ...]) -> None:
    """Let this process and those it starts load these files."""
    wanted = [str(file.resolve()) for file in files]
    if wanted:
        os.environ[VARIABLE] = os.pathsep.join(wanted)


def load_plugins() -> None:
    """Run every announced file once.

    :raises ConfigError: if one is missing, fails, or takes a name that is taken.
    """
    registry.names()  # ours first, so that a name taken twice is the plugin's mistake
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(name)
        if path not in _loaded:
            _run(path)
            _loaded.add(path)


def _run(path: Path) -> None:
    spec = spec_from_file_location(f"lazaret_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError("there is no such Python file", where=str(path), hint="--plugin FILE.py")
    try:
        spec.loader.exec_module(module_from_spec(spec))
    except LocalProtocolError as error:
        raise ConfigError(str(error), where=path.name, hint="choose another name for the method") from error
    except Exception as error:
        raise ConfigError(f"fails to load: {type(error).__name__}: {error}", where=path.name) from error
