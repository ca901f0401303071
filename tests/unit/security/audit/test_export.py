"""What left, as events of OCSF. Tables are in test_cli, published tiles in tests/vectors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from security.audit.cli import main
from security.audit.verify import verify
from tests.support.audit_logs import Federation, small_federation


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return small_federation(tmp_path / "federation")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_ocsf_events_add_up_by_round_and_class(federation: Federation, tmp_path: Path) -> None:
    sites = [path for path in federation.folders if path.name != "hub"]
    events = [json.loads(line) for line in _run("export", *sites, "--format", "ocsf").stdout.splitlines()]
    logs = [verify(path, federation.pinned) for path in sites]
    assert sum(event["unmapped"]["bytes"] for event in events) == sum(log.ledger.total for log in logs)
    assert sum(event["count"] for event in events) == sum(log.ledger.count for log in logs)
    keys = [
        (event["src_endpoint"]["name"], event["unmapped"]["round"], event["unmapped"]["data_class"]) for event in events
    ]
    assert len(keys) == len(set(keys)), "one event for each site, round and class"
    for event in events:
        assert (event["class_uid"], event["category_uid"], event["type_uid"]) == (6003, 6, 600399)
        assert event["type_uid"] == 100 * event["class_uid"] + event["activity_id"]
        assert {"actor", "api", "metadata", "severity_id", "src_endpoint", "time"} <= event.keys()
        assert event["start_time"] <= event["end_time"]
    assert len({event["metadata"]["uid"] for event in events}) == len(events)
    target = tmp_path / "events.jsonl"
    assert f"{len(events)} events" in _run("export", *sites, "--format", "ocsf", "-o", target).output
