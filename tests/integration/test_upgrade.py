"""docs/releases.md, Upgrade: a study goes on in its run under a newer version; one that does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lazaret import software
from lazaret.control import PauseFile
from security.clock import SystemClock
from security.log.reader import LogReader
from security.secagg.relay import Open
from tests.integration.test_site_copies import audit_is_clean, begun
from tests.support.study import SITES, StudyFederation, small_study

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyFederation]:
    with small_study(tmp_path, SITES[:3]) as made:
        monkeypatch.setattr(SystemClock, "now_ms", lambda self: made.clock.now_ms())
        yield made


def test_a_paused_study_is_upgraded_party_by_party(study: StudyFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(study)
    pause = PauseFile(study.folder / "hub" / "state")
    pause.set("upgrade", now_ms=study.clock.now_ms())
    study.settle()
    old, before = software.version(), study.published
    monkeypatch.setattr(software, "version", lambda: "9.9.9")
    study.stop_hub()
    study.start_hub()
    study.until(lambda: len(study.streams) == len(study.agents))
    for name in list(study.agents):  # one by one, with the coordinator already on the new version
        study.stop(name)
        study.start(name)
    study.settle()
    assert study.published == before
    pause.clear()
    study.run_rounds(2)
    assert study.survivors()[-1] == set(study.manifest.sites)
    study.settle()
    names = ["hub", *study.agents]
    study.stop_all()
    logs = [study.folder / name / "state" / "log" for name in names]
    for log in logs:
        assert [record.body["version"] for record in LogReader(log).records("agent.start")] == [old, "9.9.9"]
    audit_is_clean(study, *logs)


def test_a_site_with_another_protocol_is_refused_before_it_trains(study: StudyFederation) -> None:
    begun(study)
    study.stop("graz")
    agent, trained = study.start("graz"), study.learners["graz"].trained
    greet = agent.session.opened

    def another_version(*words: object) -> object:
        for effect in greet(*words):
            message = getattr(effect, "message", None)
            if isinstance(message, Open):
                object.__setattr__(message, "protocol", message.protocol + 1)
            yield effect

    agent.session.opened = another_version  # type: ignore[assignment, method-assign]
    study.connect("graz")
    assert "graz" not in study.streams and not trained
    assert "version" in str(study.left["graz"])
