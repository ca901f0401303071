"""What `check` says: lines with a verdict and what to do. A check is a function from a context to lines.

Checks do not stop each other. One that cannot run raises `Unchecked`, which is shown and never counts as good; an error
that a check meets is its finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar, overload

from security.errors import ToolkitError

Context = TypeVar("Context")
Value = TypeVar("Value")


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One finding.

    :param check: the name of the check that it comes from; `run` fills it in.
    """

    verdict: Verdict
    what: str
    hint: str = ""
    check: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Unchecked(Exception):
    """A check that cannot be made here and now; the text says why."""


class Shared(Generic[Value]):
    """A property that several checks need, made once.

    Who asks first gets the error if it cannot be made: that is the finding. Who asks later is told `why` instead, so
    that one fault is one line.
    """

    def __init__(self, why: str, make: Callable[[Any], Value]) -> None:
        self._why = why
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_shared_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Value | Self:
        if instance is None:
            return self
        held = vars(instance)
        if self._name not in held:
            held[self._name] = None
            held[self._name] = (self._make(instance),)
        if held[self._name] is None:
            raise Unchecked(self._why)
        made: Value = held[self._name][0]
        return made


def shared(why: str) -> Callable[[Callable[[Any], Value]], Shared[Value]]:
    """Make a method such a property."""
    return lambda make: Shared(why, make)


def ok(what: str) -> Line:
    return Line(verdict=Verdict.OK, what=what)


def warning(what: str, hint: str) -> Line:
    return Line(verdict=Verdict.WARNING, what=what, hint=hint)


def problem(what: str, hint: str) -> Line:
    return Line(verdict=Verdict.PROBLEM, what=what, hint=hint)


def unchecked(why: str) -> Line:
    return Line(verdict=Verdict.UNCHECKED, what=f"not checked: {why}")


def found(error: ToolkitError) -> Line:
    """An error as a line. Every problem says what to do, so there is a last resort."""
    return problem(str(error), error.hint or "correct what the line names, and check again")


def tried(what: str, attempt: Callable[[], object]) -> Line:
    """`what` is so, unless trying it raises."""
    try:
        attempt()
    except ToolkitError as error:
        return found(error)
    return ok(what)


Check = Callable[[Context], Iterator[Line]]


def run(checks: Mapping[str, Check[Context]], context: Context, *, skip: Collection[str] = ()) -> Iterator[Line]:
    """All lines of all checks, in order, as they come."""
    for name, check in checks.items():
        made = _of(name, check, context) if name not in skip else iter([unchecked("skipped as asked")])
        yield from (replace(line, check=name) for line in made)


def _of(name: str, check: Check[Context], context: Context) -> Iterator[Line]:
    try:
        yield from check(context)
    except Unchecked as why:
        yield unchecked(str(why))
    except ToolkitError as error:
        yield found(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        yield problem(
            f"{where}{(error.strerror or str(error)).lower()}", "is the path right, and may this user read it?"
        )
    except Exception as error:
        # Its text is not ours and might name anything, a patient's file for instance.
        yield problem(
            f"ended with {type(error).__name__}",
            f"too little memory, or a bug: report it; --skip {name} leaves this out",
        )


def counts(lines: Iterable[Line]) -> dict[str, int]:
    """How many lines of each verdict there are; all four, in the order of the enum."""
    told = dict.fromkeys((verdict.value for verdict in Verdict), 0)
    for line in lines:
        told[line.verdict.value] += 1
    return told
