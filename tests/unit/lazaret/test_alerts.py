"""Alerts: told once when they begin and once when they end, by a command or a web address, beside the work."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from lazaret.alerts import DAY_MS, Alerts, AlertsTable, certificate_alerts, disk_alert, manifest_alerts, tell_once
from lazaret.errors import ConfigError
from security.audit.cli import main as privacy_audit

NOW = 1_800_000_000_000


def until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_a_condition_is_told_when_it_begins_and_when_it_ends() -> None:
    told: list[dict[str, object]] = []
    alerts = Alerts("coordinator", AlertsTable(), told.append)
    for found in ({}, {"disk": "full"}, {"disk": "fuller"}, {}, {}):
        alerts.look(found, now_ms=NOW)
    assert [(one["alert"], one["state"], one["text"]) for one in told] == [
        ("disk", "began", "full"), ("disk", "ended", "fuller"),
    ]  # fmt: skip


def test_a_command_gets_one_object_and_a_broken_one_stops_nothing(tmp_path: Path) -> None:
    target = tmp_path / "told"
    script = f"import sys; open({str(target)!r}, 'a').write(sys.stdin.read())"
    for command in (("/no/such/program",), (sys.executable, "-c", script)):
        Alerts("site-agent", AlertsTable(command=command)).look({"disk": "full"}, now_ms=NOW)
    until(lambda: target.exists() and target.read_text().endswith("\n"))
    assert json.loads(target.read_text()) == {
        "party": "site-agent", "alert": "disk", "state": "began", "text": "full", "at_ms": NOW,
    }  # fmt: skip


def test_the_last_word_of_a_process_is_told_before_it_ends(tmp_path: Path) -> None:
    target = tmp_path / "told"
    script = f"import sys; open({str(target)!r}, 'a').write(sys.stdin.read())"
    alerts = Alerts("site-agent", AlertsTable(command=(sys.executable, "-c", script)))
    alerts.look({"disk": "full"}, now_ms=NOW)
    alerts.end("the sum is wrong", now_ms=NOW)
    told = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(one["alert"], one["state"], one["text"]) for one in told] == [
        ("disk", "began", "full"), ("stopped", "began", "the sum is wrong"),
    ]  # fmt: skip


def test_a_webhook_gets_the_same_object() -> None:
    heard: list[bytes] = []

    class Hears(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hears)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        table = AlertsTable(webhook=f"http://127.0.0.1:{server.server_port}/hook")
        Alerts("coordinator", table).look({"stalled": "round 3 waits"}, now_ms=NOW)
        until(lambda: bool(heard))
    finally:
        server.shutdown()
    assert json.loads(heard[0])["text"] == "round 3 waits"


def test_only_web_addresses_are_webhooks() -> None:
    with pytest.raises(ValidationError):
        AlertsTable(webhook="file:///etc/passwd")


def test_a_certificate_is_told_at_30_7_and_1_days() -> None:
    told: list[dict[str, object]] = []
    alerts = Alerts("coordinator", AlertsTable(), told.append)
    for days in range(40, -3, -1):
        alerts.look(certificate_alerts({"graz": NOW + days * DAY_MS}, NOW), now_ms=NOW)
    began = [str(one["alert"]) for one in told if one["state"] == "began"]
    assert began == ["certificate-30:graz", "certificate-7:graz", "certificate-1:graz"]
    assert "has ended" in certificate_alerts({"graz": NOW - 1}, NOW)["certificate-1:graz"]
    assert [*manifest_alerts(2, NOW + 7 * DAY_MS, NOW)] == ["manifest-7:2"]
    assert manifest_alerts(2, NOW + 31 * DAY_MS, NOW) == {}


def test_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    assert disk_alert(tmp_path, least=0) == {} and "disk" in disk_alert(tmp_path, least=2**62)


def test_an_audit_at_night_tells_the_hooks_of_a_configuration(tmp_path: Path) -> None:
    target, log, config = tmp_path / "told", tmp_path / "log", tmp_path / "site.toml"
    script = f"import sys; open({str(target)!r}, 'a').write(sys.stdin.read())"
    config.write_text(f"[site]\nother = 1\n[alerts]\ncommand = {json.dumps([sys.executable, '-c', script])}\n")
    log.mkdir()
    done = CliRunner().invoke(privacy_audit, ["--alerts", str(config), "verify", str(log)])
    assert done.exit_code == 3, done.output
    told = json.loads(target.read_text())
    assert (told["alert"], told["party"]) == ("audit-finding", "privacy-audit") and str(tmp_path) not in told["text"]
    config.write_text("[site]\n")
    with pytest.raises(ConfigError, match="neither a command nor a webhook"):
        tell_once(config, "audit-finding", "x")
