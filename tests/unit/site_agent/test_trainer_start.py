"""What a trainer says of its isolation is written down, then judged by what site and manifest ask for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lazaret.errors import ConfigError
from site_agent import trainer_start
from site_agent.trainer.channel import IsolationReport
from tests.support.isolated import ISOLATED

CONNECTED = replace(ISOLATED, connection_possible=True)
READS_KEYS = replace(ISOLATED, keys_readable=True)
WITH_RANKS = replace(CONNECTED, exception="several processes")


class Held:
    """A supervisor that starts nothing, and keeps what it would tell."""

    def __init__(self, *_: Any, isolated: Any, **__: Any) -> None:
        self.isolated = isolated

    def start(self) -> None:
        pass


def judged(report: IsolationReport, monkeypatch: pytest.MonkeyPatch, *, site: str, manifest: str) -> list[Any]:
    """The entries that the log has afterwards."""
    monkeypatch.setattr(trainer_start, "Supervisor", Held)
    config: Any = SimpleNamespace(site=SimpleNamespace(isolation=site), trainer_socket=None)
    agreed: Any = SimpleNamespace(
        training=SimpleNamespace(isolation=manifest),
        aggregation=SimpleNamespace(layout=SimpleNamespace(state_words=5)),
        timing=SimpleNamespace(train=30),
        privacy=None,
        run="run-1",
    )
    entries: list[Any] = []
    log: Any = SimpleNamespace(append=lambda event, **_: entries.append(event))
    unused: Any = None
    held, _ = trainer_start.start_trainer(config, agreed, unused, unused, unused, "graz", None, log)
    try:
        held.isolated(report)  # type: ignore[attr-defined]
    except ConfigError as error:
        entries.append(error)
    return entries


@pytest.mark.parametrize("report", [CONNECTED, READS_KEYS, replace(WITH_RANKS, keys_readable=True)])
@pytest.mark.parametrize(("site", "manifest"), [("required", "best"), ("best", "required")])
def test_a_trainer_that_is_not_isolated_as_asked_gets_nothing(
    report: IsolationReport, site: str, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, error = judged(report, monkeypatch, site=site, manifest=manifest)
    assert isinstance(error, ConfigError) and "isolation is required" in str(error)
    assert entry.asked == "required" and (entry.connection, entry.keys) == (
        report.connection_possible,
        report.keys_readable,
    ), "the start that was refused is in the log"


def test_what_nobody_forbids_is_written_down_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for report in (CONNECTED, READS_KEYS):
        (entry,) = judged(report, monkeypatch, site="best", manifest="best")
        assert entry.asked == "best"
    for report in (ISOLATED, WITH_RANKS):
        (entry,) = judged(report, monkeypatch, site="required", manifest="required")
        assert entry.ranks is bool(report.exception)
