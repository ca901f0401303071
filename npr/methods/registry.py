"""Names of methods, those of plugins among them. A name is taken once; an unknown one is answered with the nearest
known.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import TypeVar

from lazaret.errors import ConfigError, LocalProtocolError
from npr.config import TrainConfig
from npr.methods.base import Method, Prediction
from security.identity.plugin_file import digest

# In the order in which they are listed.
_MODULES = (
    "local",
    "fedavg",
    "fedprox",
    "moon",
    "creff",
    "fedrs",
    "fedlc",
    "balancefl",
    "fedrep",
    "fedrod",
    "fedbabu",
    "fedper",
    "fednpr",
)
_entries: dict[str, RegisteredMethod] = {}
M = TypeVar("M", bound=type[Method])


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredMethod:
    """One name: the class behind it, whether NPR is added to its loss, and the name it is another word for.

    :ivar predict: what `predict = "auto"` means for it.
    """

    name: str
    method: type[Method]
    summary: str
    npr: bool = False
    predict: Prediction = "head"
    alias_of: str | None = None

    @property
    def original(self) -> str:
        return self.alias_of or self.name


def register(
    name: str, summary: str, *, npr: bool = False, predict: Prediction = "head", aliases: tuple[str, ...] = ()
) -> Callable[[M], M]:
    """Class decorator. Applied twice with other names, one class has both."""

    def add(method: M) -> M:
        for title, original in ((name, None), *((alias, name) for alias in aliases)):
            if title in _entries:
                raise LocalProtocolError(f"a method named {title!r} is registered already")
            _entries[title] = RegisteredMethod(
                name=title, method=method, summary=summary, npr=npr, predict=predict, alias_of=original
            )
        return method

    return add


def _load() -> dict[str, RegisteredMethod]:
    """All entries in the order of the list above, whichever module somebody has imported first; plugins come last."""
    for module in _MODULES:
        import_module(f"npr.methods.{module}")
    return dict(sorted(_entries.items(), key=_place))


def _place(item: tuple[str, RegisteredMethod]) -> int:
    module = item[1].method.__module__.rpartition(".")[2]
    return _MODULES.index(module) if module in _MODULES else len(_MODULES)


def get(name: str) -> RegisteredMethod:
    """The entry of `name`, or an error that lists the names it may have been."""
    known = _load()
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
        raise ConfigError(f"unknown method {name!r}", hint=f"did you mean {', '.join(near)}?")
    return known[name]


def names() -> tuple[str, ...]:
    return tuple(_load())


def rows() -> list[RegisteredMethod]:
    """Every name in the order of registration, aliases as rows of their own."""
    return list(_load().values())


def build(config: TrainConfig) -> Method:
    """The method that `config` names, ready to run."""
    entry = get(config.method)
    return entry.method(config, name=entry.original, npr=entry.npr, predict=entry.predict)


# Methods of one's own: the bytes of a Python file that registers them, run in this process.
#
# The laboratory runs any file that its user names. In a federation the caller has compared the bytes with what manifest
# and hospital approve (`security.identity.plugin_file`); they are given to the interpreter from memory, so that nothing
# on disk is read again.


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
    found = digest(source)
    if found not in _loaded:
        before = set(names())  # ours first, so that a name taken twice is the plugin's mistake
        _run(source, name, f"lazaret_plugin_{found[:16]}")
        _loaded[found] = LoadedPlugin(name=name, sha256=found, methods=frozenset(set(names()) - before))
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
