"""The coordinator: can it be reached, is it the right one, does it know us, and do our clocks agree?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from security.consortium.rules import CLOCK_SKEW_MS
from security.preflight.lines import Line, Unchecked, ok, problem, warning
from security.preflight.papers import clock_by_papers
from site_agent.checks.context import Context

SLIGHT_MS: Final = 120_000


def coordinator(context: Context) -> Iterator[Line]:
    """As far as TLS with anybody, then as ourselves."""
    yield from context.served
    context.answer  # noqa: B018  # its error is the finding
    yield ok("the coordinator lets this site in")


def clock(context: Context) -> Iterator[Line]:
    """By the dates of our papers, and by the coordinator's clock."""
    yield from clock_by_papers(context.papers)
    theirs = context.answer.time_ms
    if theirs is None:
        raise Unchecked("the coordinator does not tell its time")
    yield compared(context.papers.now_ms, theirs)


def compared(ours_ms: int, theirs_ms: int) -> Line:
    """Signed dates allow for an hour; beyond that certificates and manifests are refused when they are good."""
    apart = abs(ours_ms - theirs_ms)
    told = f"{_span(apart)} {'ahead of' if ours_ms > theirs_ms else 'behind'} the coordinator's"
    if apart >= CLOCK_SKEW_MS:
        return problem(f"this machine's clock is {told}", "set the clock, and keep it right with NTP")
    if apart >= SLIGHT_MS:
        return warning(f"this machine's clock is {told}", "one of the two should be set; keep both right with NTP")
    return ok("agrees with the coordinator's")


def _span(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
