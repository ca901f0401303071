"""A coordinator whose database refuses one record: `python -m tests.support.sick_coordinator --config FILE`.

The record is named in a file `refuse` beside the configuration, which is taken away when the order is obeyed.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import click

from coordinator.config import CoordinatorConfig
from coordinator.effects import Stored
from coordinator.service import run_until_stopped
from coordinator.storage import Storage
from lazaret.terminal import run_command
from scripts.local_federation.party import KillableService, KillableShell, log_to_stderr
from security.secagg.effects import Persist


def refuse(order: Path) -> None:
    """From inside the transaction, as a full disk does."""
    real = Storage._write

    def write(self: Storage, db: sqlite3.Connection, effect: Stored, now_ms: int) -> None:
        if isinstance(effect, Persist) and order.exists() and order.read_text() == type(effect.record).__name__:
            order.unlink()
            raise sqlite3.OperationalError("database or disk is full")
        real(self, db, effect, now_ms)

    Storage._write = write  # type: ignore[method-assign]


@click.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True)
def coordinator(path: Path) -> None:
    """The coordinator, with its order beside its configuration."""
    log_to_stderr()
    refuse(path.parent / "refuse")
    run_until_stopped(*CoordinatorConfig.read(path), shell_type=KillableShell, service_type=KillableService)


if __name__ == "__main__":
    run_command(coordinator, "coordinator")
