"""The charts of the report: where lines, curves, boxes and words go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from security.audit.epsilon import EpsilonStatement
from security.audit.pages import DASHES, WIDTH, Box, Curve, Dot, Drawing, GridLine, Label, Scale, ticks
from security.audit.text import when


def epsilon_chart(statements: Sequence[EpsilonStatement]) -> Drawing:
    """Epsilon after each round for every site with a budget, under its cap."""
    left, right, bottom = 48, WIDTH - 92, 222
    cap = max(float(statement.cap) for statement in statements)
    top = max([cap, *(item.recomputed for statement in statements for item in statement.series)]) * 1.08
    longest = max(len(statement.series) for statement in statements)
    x, y = Scale(0, longest, left, right), Scale(0, top, bottom, 16)
    drawing = Drawing(title="epsilon after each round, and the cap", height=260)
    for value in ticks(top):
        drawing.lines.append(GridLine(left, right, y(value)))
        drawing.labels.append(Label(left - 8, y(value) + 4, f"{value:g}", "end"))
    drawing.lines.append(GridLine(left, right, y(cap), "cap"))
    drawing.labels.append(Label(right + 6, y(cap) + 4, f"cap {cap:g}", strong=True))
    for number, statement in enumerate(statements):
        drawing.curves.append(Curve(_staircase(statement, x, y), DASHES[number % 4]))
    drawing.labels.extend([*_end_labels(statements, y, right + 6), *_round_labels(statements, x, bottom)])
    return drawing


def _staircase(statement: EpsilonStatement, x: Scale, y: Scale) -> str:
    """A round is paid at once, so the curve goes up in steps."""
    points = [(x(0), y(0))]
    for index, item in enumerate(statement.series):
        points += [(x(index), y(item.recomputed)), (x(index + 1), y(item.recomputed))]
    return " ".join(f"{px},{py}" for px, py in points)


def _end_labels(statements: Sequence[EpsilonStatement], y: Scale, left: float) -> list[Label]:
    """Names at the ends of the curves, pushed down where they would cover each other."""
    labels, lowest = [], 0.0
    for statement in sorted(statements, key=lambda item: -item.epsilon):
        at = max(y(statement.epsilon) + 4, lowest + 14)
        labels.append(Label(left, at, f"{statement.site} {statement.epsilon:.2f}", strong=True))
        lowest = at
    return labels


def _round_labels(statements: Sequence[EpsilonStatement], x: Scale, bottom: int) -> list[Label]:
    longest = max(statements, key=lambda statement: len(statement.series)).series
    every = max(1, len(longest) // 10)
    marks = [
        Label(x(index + 0.5), bottom + 16, str(item.round), "middle")
        for index, item in enumerate(longest)
        if index % every == 0
    ]
    return [*marks, Label((x.start + x.end) / 2, bottom + 33, "round", "middle")]


def cohort_chart(rounds: Sequence[str], sites: Sequence[str], took_part: Mapping[tuple[str, str], str]) -> Drawing:
    """Which site was in which sum: filled for in, ring for invited and dropped, nothing for absent."""
    left, step_y = 110, 26
    height = 40 + step_y * len(sites)
    x = Scale(0, len(rounds), left, WIDTH - 12)
    width = min(18.0, max(2.0, (x.end - x.start) / max(1, len(rounds)) * 0.7))
    drawing = Drawing(title="which site took part in which round", height=height)
    for row, site in enumerate(sites):
        y = 14 + row * step_y
        drawing.labels.append(Label(left - 12, y + 12, site, "end"))
        drawing.lines.append(GridLine(left, WIDTH - 12, y + 8))
        for column, name in enumerate(rounds):
            state = took_part.get((site, name))
            if state is not None:
                drawing.boxes.append(Box(round(x(column + 0.5) - width / 2, 1), y, round(width, 1), state))
    every = max(1, len(rounds) // 12)
    drawing.labels.extend(
        Label(x(column + 0.5), height - 6, name, "middle") for column, name in enumerate(rounds) if column % every == 0
    )
    return drawing


def witness_chart(rows: Sequence[tuple[str, Sequence[tuple[int, str]]]]) -> Drawing:
    """For each log, when a checkpoint of it was cosigned."""
    times = [time for _, seen in rows for time, _ in seen]
    left, step_y = 110, 26
    height = 44 + step_y * len(rows)
    x = Scale(min(times), max(times), left + 6, WIDTH - 18)
    drawing = Drawing(title="when checkpoints were cosigned", height=height)
    for row, (name, seen) in enumerate(rows):
        y = 22 + row * step_y
        drawing.labels.append(Label(left - 12, y + 4, name, "end"))
        drawing.lines.append(GridLine(left, WIDTH - 12, y))
        drawing.dots.extend(Dot(x(time), y, f"{who} {when(time)}") for time, who in seen)
    drawing.labels.append(Label(left, height - 6, when(min(times))))
    drawing.labels.append(Label(WIDTH - 12, height - 6, when(max(times)), "end"))
    return drawing
