"""What printed pages are made of: templates that escape everything, and charts as geometry.

`templates/parts.html` draws a chart as inline SVG. The auditor's report uses this, and so does a hospital's evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(*packages: str) -> Environment:
    """Templates in which forgetting to escape is not possible, and a name without a value is an error.

    :param packages: others whose templates use ours.
    """
    # Only here: few commands need templates.
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "security.audit")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["thousands"] = "{:,}".format
    return made


def _printable(value: object) -> object:
    """What a template is about to print; only markup that templates themselves have made goes through as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value)


# Charts.

WIDTH: Final = 720
DASHES: Final = ("", "7 4", "2 4", "10 3 2 3")


@dataclass(frozen=True, slots=True)
class GridLine:
    """A horizontal line."""

    left: float
    right: float
    y: float
    style: str = "grid"


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points, written as SVG writes them."""

    points: str
    dashes: str


@dataclass(frozen=True, slots=True)
class Box:
    """A site's place in one round."""

    x: float
    y: float
    width: float
    style: str


@dataclass(frozen=True, slots=True)
class Dot:
    """A moment, with words for who points at it."""

    x: float
    y: float
    words: str


@dataclass(frozen=True, slots=True)
class Label:
    """Words at a point."""

    x: float
    y: float
    words: str
    anchor: str = "start"
    strong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """All parts of a chart, drawn in this order."""

    title: str
    height: int
    width: int = WIDTH
    lines: list[GridLine] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps numbers to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)


def ticks(high: float, count: int = 4) -> list[float]:
    """Round numbers from zero to a little below `high`."""
    step = next(s * 10.0**e for e in range(-4, 7) for s in (1, 2, 2.5, 5) if s * 10.0**e * count >= high)
    return [index * step for index in range(count + 1) if index * step <= high * 1.001]
