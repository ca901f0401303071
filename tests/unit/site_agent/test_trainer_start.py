"""What a trainer says of its isolation is written down, then judged by what site and manifest ask for."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazaret.errors import ConfigError
from security.rng import CountedRandomness
from site_agent import trainer_start
from site_agent.config import DataTable
from site_agent.state_dir import StateDir
from site_agent.trainer.channel import DataReady, IsolationReport
from tests.support.isolated import ISOLATED

CONNECTED = replace(ISOLATED, connection_possible=True)
READS_KEYS = replace(ISOLATED, keys_readable=True)
WITH_RANKS = replace(CONNECTED, exception="several processes")


LAYOUT = SimpleNamespace(state_words=5)


class Held:
    """A supervisor that starts nothing, and keeps what it would tell."""

    def __init__(self, launch: Any, setup: Any, *, isolated: Any, outdates: Any, opened: Any, **_: Any) -> None:
        del launch
        self.setup, self.isolated, self.outdates, self.opened = setup, isolated, outdates, opened

    def start(self) -> None:
        pass


def agreed(isolation: str, *, roster: tuple[str, ...] = ()) -> Any:
    """As much of a manifest as is looked at here."""
    return SimpleNamespace(
        model="model",
        training=SimpleNamespace(isolation=isolation, plugin=None),
        aggregation=SimpleNamespace(layout=LAYOUT),
        timing=SimpleNamespace(train=30),
        privacy=None,
        run="run-1",
        roster=roster,
        to_bytes=isolation.encode,
    )


def held(
    monkeypatch: pytest.MonkeyPatch, *, site: str, manifest: str, state: Path | None = None
) -> tuple[Any, list[Any]]:
    """What a trainer would be started with, and the entries of the log."""
    monkeypatch.setattr(trainer_start, "Supervisor", Held)
    config: Any = SimpleNamespace(
        site=SimpleNamespace(isolation=site, worker_wait=1), trainer_socket=None, data=DataTable(source="generated")
    )
    entries: list[Any] = []
    log: Any = SimpleNamespace(append=lambda event, **_: entries.append(event))
    identity: Any = SimpleNamespace(data_key=lambda: bytes(32))
    state_dir: Any = SimpleNamespace(best_score=None) if state is None else kept_in(state)
    unused: Any = None
    found, _ = trainer_start.start_trainer(config, agreed(manifest), unused, state_dir, identity, "graz", None, log)
    return found, entries


def judged(report: IsolationReport, monkeypatch: pytest.MonkeyPatch, *, site: str, manifest: str) -> list[Any]:
    """The entries that the log has afterwards."""
    supervisor, entries = held(monkeypatch, site=site, manifest=manifest)
    try:
        supervisor.isolated(report)
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


def test_a_manifest_that_begins_to_require_isolation_holds_for_the_next_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor, entries = held(monkeypatch, site="best", manifest="best")
    supervisor.isolated(CONNECTED)
    assert supervisor.setup()[1] == b"best"
    assert not supervisor.outdates(agreed("best", roster=("linz",))), "another member is nothing to a trainer"
    assert supervisor.outdates(agreed("required"))
    assert supervisor.setup()[1] == b"required", "it is told the manifest in force"
    with pytest.raises(ConfigError, match="isolation is required"):
        supervisor.isolated(CONNECTED)
    assert [entry.asked for entry in entries] == ["best", "required"]


def test_a_trainer_that_ran_another_file_than_pinned_is_written_down_and_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor, entries = held(monkeypatch, site="best", manifest="best")
    with pytest.raises(ConfigError, match=f"run the plugin {'ab' * 32}, the manifest pins none"):
        supervisor.opened(SimpleNamespace(plugin="ab" * 32))
    (entry,) = entries
    assert entry.type == "plugin.loaded" and entry.plugin == "ab" * 32
    pinned: Any = agreed("best")
    pinned.training.plugin = SimpleNamespace(sha256="cd" * 32)
    supervisor.outdates(pinned)
    with pytest.raises(ConfigError, match=f"run the plugin none, the manifest pins {'cd' * 32}"):
        supervisor.opened(SimpleNamespace(plugin=None))


def test_a_change_of_the_data_is_said_at_the_start_and_goes_into_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """And not once more at the next start; a class that vanished is named."""
    supervisor, entries = held(monkeypatch, site="best", manifest="best", state=tmp_path)
    first = ready("aa" * 32, (140, 3))
    with caplog.at_level(logging.INFO, logger="site-agent"):
        for opened in (first, first, ready("bb" * 32, (260, 0)), ready("bb" * 32, (260, 0))):
            supervisor.opened(opened)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    grown = "a new version: 200 to 499 training images, 100 to 199 before; no image any more of melanoma"
    assert told == [
        ("INFO", "data: opened for the first time: 100 to 199 training images"),
        ("INFO", "data: unchanged: 100 to 199 training images"),
        ("WARNING", f"data: {grown}"),
        ("INFO", "data: unchanged: 200 to 499 training images"),
    ]
    assert [f"data: {entry.change}" for entry in entries] == [text for _, text in told]


def test_under_privacy_a_change_is_said_here_and_not_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    state_dir = kept_in(tmp_path)
    trainer_start.note_data(state_dir, ready("aa" * 32, (140, 3)), private=True)
    trainer_start.note_data(state_dir, ready("bb" * 32, (260, 0)), private=True)
    assert "a new version" in caplog.text and "not written to the privacy log" in caplog.text


def ready(fingerprint: str, counts: tuple[int, ...]) -> DataReady:
    return DataReady(
        fingerprint=fingerprint,
        version="cd" * 32,
        subjects=99,
        class_names=("nevus", "melanoma"),
        counts={"train": counts},
    )


def kept_in(folder: Path) -> StateDir:
    return StateDir(folder, site="graz", sealing_key=bytes(32), randomness=CountedRandomness(b"start"))
