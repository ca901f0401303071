"""A dozen lines of HTML building in which forgetting to escape is not possible: text is text, only tags are markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

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
