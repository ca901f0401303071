"""Room on this machine: the disk for models, memories and the log, and the processor to train on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from security.preflight import machine
from security.preflight.lines import Line, ok, warning
from site_agent.checks.context import Context
from site_agent.vault import KEPT_STATES

# Weights and two moments of Adam; a new memory is written beside the old one before that goes.
MEMORY_COPIES: Final = 3
KEPT_MEMORIES: Final = 3
LOG_BYTES_PER_ROUND: Final = 200_000


def disk(context: Context) -> Iterator[Line]:
    """By the sizes in the layout: models, memories and a sealed update are replaced as rounds go by, the log grows."""
    layout, folder = context.manifest.aggregation.layout, context.config.state
    whole_model = context.initial.path.stat().st_size
    kept = KEPT_STATES * 4 * layout.state_words + KEPT_MEMORIES * MEMORY_COPIES * whole_model
    kept += 2 * layout.byte_length + 2 * whole_model
    missing = max(0, kept - machine.used_bytes(folder))
    least = missing + LOG_BYTES_PER_ROUND
    whole = missing + context.manifest.training.rounds * LOG_BYTES_PER_ROUND
    yield machine.disk(folder, free=context.free(folder), least=least, whole=whole)


def device(context: Context) -> Iterator[Line]:
    """What training will run on."""
    threads, there = context.config.site.threads, machine.processors()
    if threads is not None and threads > there:
        yield warning(f"[site] threads = {threads}, and {there} processors", "more threads than processors are slower")
        return
    yield ok(f"trains on the processor with {threads or there} of {there} threads; graphics cards are not used")
