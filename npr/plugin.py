"""Methods of one's own: the bytes of a Python file that registers them, run in this process.

The laboratory runs any file that its user names. In a federation the caller has compared the bytes with what manifest
and hospital approve (`security.identity.pinned_files`); they are given to the interpreter from memory, so that nothing
on disk is read again.
"""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from types import ModuleType

from lazaret.errors import ConfigError, LocalProtocolError
from npr.methods import registry
from security.identity.pinned_files import plugin_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlugin:
    """A plugin that was run in this process, and the methods that it has registered."""

    name: str
    sha256: str
    methods: frozenset[str]


_loaded: dict[str, LoadedPlugin] = {}


def run_plugin(source: bytes, name: str) -> LoadedPlugin:
    """Run a plugin, once in a process.

    :param name: of its file, for errors and for the manifest.
    :raises ConfigError: if it fails, or takes a name that is taken.
    """
    found = plugin_digest(source)
    if found not in _loaded:
        before = set(registry.names())  # ours first, so that a name taken twice is the plugin's mistake
        _run(source, name, f"lazaret_plugin_{found[:16]}")
        _loaded[found] = LoadedPlugin(name=name, sha256=found, methods=frozenset(set(registry.names()) - before))
    return _loaded[found]


def plugin_of(method: str) -> LoadedPlugin | None:
    """The plugin that has registered a method; None for one of this package."""
    return next((one for one in _loaded.values() if method in one.methods), None)


def _run(source: bytes, name: str, title: str) -> None:
    module = sys.modules[title] = ModuleType(title)  # dataclasses look their own module up there
    module.__file__ = name
    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)  # a traceback shows what ran, not what is on disk
    try:
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    except LocalProtocolError as error:
        raise ConfigError(str(error), where=name, hint="choose another name") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"fails to load: {type(error).__name__}: {error}", where=name) from error
