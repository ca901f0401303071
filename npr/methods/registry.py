"""Names of methods. A name is taken once; an unknown one is answered with the nearest known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TypeVar

from lazaret.errors import ConfigError, LocalProtocolError
from npr.config import TrainConfig
from npr.methods.base import Method, Prediction

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
