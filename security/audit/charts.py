"""Charts as inline SVG: no script, no fonts from elsewhere, readable in black and white."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from security.audit.epsilon import Statement
from security.audit.text import when

# ----------------------------------------
# A dozen lines of HTML building in which forgetting to escape is not possible: text is text, only tags are markup.

_VOID: Final = frozenset({"meta", "br", "hr", "col"})


class Markup(str):
    """Text that is HTML already; only `tag` and `Markup` literals in our own code make it."""

    __slots__ = ()


Child = str | Markup | int | None | Iterable["Child"]


def text(child: Child) -> str:
    """A child as HTML: markup as it is, everything else escaped."""
    if child is None:
        return ""
    if isinstance(child, Markup):
        return str(child)
    if isinstance(child, str):
        return escape("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in child))
    if isinstance(child, int):
        return f"{child:,}"
    return "".join(text(item) for item in child)


def tag(name: str, /, *children: Child, **attributes: str | int | float | None) -> Markup:
    """An element. `cls` is the class; underscores in names become hyphens; None leaves an attribute out."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    inside = "".join(f' {"class" if key == "cls" else key}="{escape(str(value))}"' for key, value in pairs)
    if name in _VOID:
        return Markup(f"<{name}{inside}>")
    return Markup(f"<{name}{inside}>{''.join(text(child) for child in children)}</{name}>")


def table(
    head: Iterable[str], rows: Iterable[Iterable[Child]], *, numeric: Iterable[int] = (), many: bool = False
) -> Markup:
    """A table. On a narrow screen each row becomes a card; one with `many` rows scrolls sideways instead.

    :param numeric: columns that are right-aligned.
    """
    right, titles = frozenset(numeric), [str(title) for title in head]

    def cells(row: Iterable[Child]) -> list[Markup]:
        return [
            tag("td", tag("span", child), cls="n" if at in right else None, data_label=titles[at])
            for at, child in enumerate(row)
        ]

    top = [tag("th", title, cls="n" if at in right else None, scope="col") for at, title in enumerate(titles)]
    body = tag("tbody", [tag("tr", cells(row)) for row in rows])
    return tag("div", tag("table", tag("thead", tag("tr", top)), body), cls="scroll many" if many else "scroll")


def code(value: str, length: int | None = None) -> Markup:
    """A digest or name in fixed width, shortened for reading, whole on hover."""
    shown = value if length is None or len(value) <= length else value[:length] + "\N{HORIZONTAL ELLIPSIS}"
    return tag("code", shown, title=value if shown != value else None, cls="long" if len(shown) > 40 else None)


WIDTH: Final = 720
_DASHES: Final = ("", "7 4", "2 4", "10 3 2 3")


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps numbers to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)


def _svg(height: int, title: str, *children: Markup) -> Markup:
    return tag(
        "svg",
        tag("title", title),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        cls="chart",
    )


def _label(x: float, y: float, words: str, *, anchor: str = "start", cls: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor, cls=cls)


def _line(x1: float, y1: float, x2: float, y2: float, cls: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, cls=cls)


def _ticks(high: float, count: int = 4) -> list[float]:
    """Round numbers from zero to a little below `high`."""
    step = next(s * 10.0**e for e in range(-4, 7) for s in (1, 2, 2.5, 5) if s * 10.0**e * count >= high)
    return [index * step for index in range(count + 1) if index * step <= high * 1.001]


def epsilon_chart(statements: Sequence[Statement]) -> Markup:
    """Epsilon after each round for every site with a budget, under its cap."""
    height, left, bottom = 260, 48, 222
    cap = max(float(statement.cap) for statement in statements)
    top = max([cap, *(item.recomputed for statement in statements for item in statement.series)]) * 1.08
    longest = max(len(statement.series) for statement in statements)
    x, y = _Scale(0, longest, left, WIDTH - 92), _Scale(0, top, bottom, 16)
    parts = [
        part
        for value in _ticks(top)
        for part in (
            _line(left, y(value), WIDTH - 92, y(value), "grid"),
            _label(left - 8, y(value) + 4, f"{value:g}", anchor="end"),
        )
    ]
    parts += [
        _line(left, y(cap), WIDTH - 92, y(cap), "cap"),
        _label(WIDTH - 86, y(cap) + 4, f"cap {cap:g}", cls="strong"),
    ]
    for number, statement in enumerate(statements):
        points = [(x(0), y(0))]
        for index, item in enumerate(statement.series):
            # A round is paid at once, so the curve is a staircase.
            points += [(x(index), y(item.recomputed)), (x(index + 1), y(item.recomputed))]
        path = " ".join(f"{px},{py}" for px, py in points)
        parts.append(tag("polyline", points=path, cls="curve", stroke_dasharray=_DASHES[number % 4] or None))
    parts += _end_labels(statements, y)
    parts += _round_axis(statements, x, bottom)
    return _svg(height, "epsilon after each round, and the cap", *parts)


def _end_labels(statements: Sequence[Statement], y: _Scale) -> list[Markup]:
    """Names at the ends of the curves, pushed down where they would cover each other."""
    labels, lowest = [], 0.0
    for statement in sorted(statements, key=lambda item: -item.epsilon):
        at = max(y(statement.epsilon) + 4, lowest + 14)
        labels.append(_label(WIDTH - 86, at, f"{statement.site} {statement.epsilon:.2f}", cls="strong"))
        lowest = at
    return labels


def _round_axis(statements: Sequence[Statement], x: _Scale, bottom: int) -> list[Markup]:
    longest = max(statements, key=lambda statement: len(statement.series)).series
    every = max(1, len(longest) // 10)
    marks = [
        _label(x(index + 0.5), bottom + 16, str(item.round), anchor="middle")
        for index, item in enumerate(longest)
        if index % every == 0
    ]
    return [*marks, _label((x.start + x.end) / 2, bottom + 33, "round", anchor="middle")]


def cohort_chart(rounds: Sequence[str], sites: Sequence[str], took_part: Mapping[tuple[str, str], str]) -> Markup:
    """Which site was in which sum: filled for in, ring for invited and dropped, nothing for absent."""
    left, step_y = 110, 26
    height = 40 + step_y * len(sites)
    x = _Scale(0, len(rounds), left, WIDTH - 12)
    width = min(18.0, max(2.0, (x.end - x.start) / max(1, len(rounds)) * 0.7))
    parts = []
    for row, site in enumerate(sites):
        y = 14 + row * step_y
        parts += [_label(left - 12, y + 12, site, anchor="end"), _line(left, y + 8, WIDTH - 12, y + 8, "grid")]
        for column, name in enumerate(rounds):
            state = took_part.get((site, name))
            if state is not None:
                centre = x(column + 0.5)
                parts.append(
                    tag("rect", x=round(centre - width / 2, 1), y=y, width=round(width, 1), height=16, rx=2, cls=state)
                )
    every = max(1, len(rounds) // 12)
    parts += [
        _label(x(column + 0.5), height - 6, name, anchor="middle")
        for column, name in enumerate(rounds)
        if column % every == 0
    ]
    return _svg(height, "which site took part in which round", *parts)


def witness_chart(rows: Sequence[tuple[str, Sequence[tuple[int, str]]]]) -> Markup:
    """For each log, when a head of it was cosigned."""
    times = [time for _, seen in rows for time, _ in seen]
    left, step_y = 110, 26
    height = 44 + step_y * len(rows)
    x = _Scale(min(times), max(times), left + 6, WIDTH - 18)
    parts = []
    for row, (name, seen) in enumerate(rows):
        y = 22 + row * step_y
        parts += [_label(left - 12, y + 4, name, anchor="end"), _line(left, y, WIDTH - 12, y, "grid")]
        parts += [
            tag("circle", tag("title", f"{who} {when(time)}"), cx=x(time), cy=y, r=4, cls="dot") for time, who in seen
        ]
    parts += [
        _label(left, height - 6, when(min(times))),
        _label(WIDTH - 12, height - 6, when(max(times)), anchor="end"),
    ]
    return _svg(height, "when heads were cosigned", *parts)
