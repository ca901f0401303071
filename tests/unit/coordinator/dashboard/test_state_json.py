"""The operator's page: what it says of a real database, a real log and a real engine; and how fast it says it."""

from __future__ import annotations

import http.client
import json
import ssl
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coordinator.checks import look
from coordinator.dashboard import state_json
from coordinator.dashboard.live import AggregationProgress
from coordinator.dashboard.server import admission, open_dashboard, pages
from coordinator.dashboard.state_json import COLUMNS
from coordinator.effects import CloseRound
from coordinator.phases import RunPhase
from coordinator.round_history import Figures
from lazaret.errors import ConfigError
from lazaret.web.access import Address, Guard
from lazaret.web.server import WebServer
from security.secagg import records
from security.secagg.effects import Persist
from tests.support.hub_world import Hub, Sample

SITES = tuple(f"site{number}" for number in range(4))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample.of(tmp_path_factory.mktemp("engine"), 4)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub.make(tmp_path, SITES)
    yield made
    made.close()


def content(hub: Hub) -> dict[str, Any]:
    return json.loads(hub.page.json().body)


def rounds(hub: Hub) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in content(hub)["rounds"]]


def test_a_run_that_has_just_begun(hub: Hub) -> None:
    told = content(hub)
    assert told["about"]["federation"] == "lesions"
    assert told["now"] | {"deadline": 0} == {
        "phase": "waiting", "round": 1, "completed": 0, "planned": 5, "least": 3, "deadline": 0, "checking": None,
        "attempt": None, "end": None,
    }  # fmt: skip
    assert [(site["name"], site["state"], site["seen"]) for site in told["sites"]] == [(s, "away", None) for s in SITES]
    assert told["health"]["level"] == "bad"
    assert "0 sites are connected; a round needs 3" in told["health"]["remarks"][0]["text"]
    assert told["logs"][0]["log"] == "hub"
    assert told["logs"][0]["size"] > 0


def test_nothing_new_is_the_same_answer_and_something_new_another(hub: Hub, sample: Sample) -> None:
    first = hub.page.json()
    hub.look()
    assert hub.page.json() is first
    sample.write(hub.storage, 1, now_ms=hub.world.now, open_round=False)
    second = hub.page.json()
    assert second.etag != first.etag
    hub.ready.shell.traffic.received["Hello"] += 5
    assert hub.page.json() is second  # the engine's loop has not looked yet
    hub.look()
    assert hub.page.json().etag != second.etag


def test_a_published_round_with_what_came_out_of_its_sum(hub: Hub, sample: Sample) -> None:
    sample.write(hub.storage, 1, now_ms=hub.world.now, open_round=False)
    hub.storage.note_figures(1, Figures(weight=400, loss=100.0, hits=300))
    hub.storage.note_traffic(1, 1000, 2000)
    (row,) = rounds(hub)
    assert (row["outcome"], row["attempts"], row["members"], row["survivors"], row["checked"]) == (
        "published", 1, 4, 4, True,
    )  # fmt: skip
    assert row["model"] == (1).to_bytes(32, "big").hex()
    assert (row["weight"], row["loss"], row["hits"], row["bytes_in"], row["bytes_out"]) == (400, 100.0, 300, 1000, 2000)
    assert content(hub)["members"] == [{"round": 1, "in": list(SITES), "out": [], "planned": []}]


def test_an_attempt_that_failed_says_why_and_who_was_missing(hub: Hub, sample: Sample) -> None:
    context = replace(sample.planned.plan.context, round=1)
    planned = records.Planned(plan=replace(sample.planned.plan, context=context))
    closed = records.AttemptClosed(ctx=context.ctx(), state="dead", reason=b"sites missing at S2")
    hub.storage.keep([Persist(planned, 1)], now_ms=5)
    assert content(hub)["members"] == [{"round": 1, "in": [], "out": [], "planned": list(SITES)}]
    hub.storage.keep([Persist(closed, 1)], now_ms=9)
    hub.storage.note_missing("site2")
    hub.storage.note_missing("site3")
    told = content(hub)
    assert told["aborts"] == [
        {"at": 9, "round": 1, "attempt": 1, "reason": "sites missing at S2", "missing": ["site2", "site3"]}
    ]
    assert {"level": "look", "text": "an attempt of round 1 failed: sites missing at S2 (site2, site3)"} in (
        told["health"]["remarks"]
    )
    hub.storage.keep([CloseRound(1, "3 attempts failed")], now_ms=10)
    assert content(hub)["aborts"][0] == {
        "at": 10, "round": 1, "attempt": None, "reason": "3 attempts failed", "missing": [],
    }  # fmt: skip


def test_sentences_for_every_phase(hub: Hub) -> None:
    live, told = hub.page.live, hub.page.page_history()
    there = tuple(replace(site, state="ready", heard=1) for site in live.sites)
    waits = replace(live, sites=there, hindrance="round 1 waits: declined: graz")
    assert state_json.judge(waits, told).sentence == "Round 1: waiting for enough sites"
    assert state_json.judge(waits, told).remarks == (("look", "round 1 waits: declined: graz"),)
    paused = state_json.judge(replace(live, paused=True, hindrance="paused: by hand"), told)
    assert paused.sentence == "Round 1: paused" and ("look", "paused: by hand") in paused.remarks
    calm = replace(live, sites=there, hindrance=None, phase=RunPhase.TRAINING)
    assert state_json.judge(calm, told).level == "good"
    assert state_json.judge(calm, told).sentence == "Round 1: training, 4 of 4 connected sites are ready"
    under_way = AggregationProgress(attempt=2, step="uploading", members=4, threshold=3)
    aggregation = replace(calm, phase=RunPhase.AGGREGATION, aggregation=under_way)
    assert state_json.judge(aggregation, told).sentence == "Round 1: summing over 4 sites, uploading"
    assert "asking 4 sites" in state_json.judge(replace(calm, phase=RunPhase.PINGING), told).sentence
    done = state_json.judge(replace(live, phase=RunPhase.DONE), told)
    assert (done.level, done.sentence) == ("look", "All 5 rounds are published")  # the sites have gone home
    one_away = replace(calm, sites=(replace(there[0], state="away", heard=0), *there[1:]))
    assert state_json.judge(one_away, told).remarks == (("look", "not connected: site0"),)
    lied = replace(told, excluded={"site1": "two answers"})
    assert state_json.judge(calm, lied).remarks == (("bad", "site1 is excluded: two answers"),)


def test_the_page_never_writes(hub: Hub) -> None:
    content(hub)
    connection = hub.page.history._connection
    with pytest.raises(Exception, match="readonly"):
        connection.execute("DELETE FROM rounds")


# Who may look.


def test_an_address_that_others_reach_needs_a_token_or_certificates(tmp_path: Path, hub: Hub) -> None:
    wide = Address(host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match="needs a token or client certificates"):
        admission(hub.config.dashboard, tmp_path, wide, hub.ready.identity)
    (tmp_path / "token").write_text("t" * 30)
    (tmp_path / "token").chmod(0o600)
    told = hub.config.dashboard.model_copy(update={"token": "token"})
    guard, tls = admission(told, tmp_path, wide, hub.ready.identity)
    assert guard.token == "t" * 30
    assert tls is not None, "a token never travels in the clear"
    assert "localhost" in guard.names
    here, none = admission(hub.config.dashboard, tmp_path, Address(host="127.0.0.1", port=0), hub.ready.identity)
    assert (here.token, none) == (None, None)


def test_the_check_before_the_start_notices_it(tmp_path: Path) -> None:
    Hub.make(tmp_path, SITES, more='[dashboard]\nlisten = "0.0.0.0:7480"\n').close()
    faults = [line.what for line in look(tmp_path / "coordinator.toml") if line.verdict == "problem"]
    assert any("needs a token or client certificates" in fault for fault in faults)


def _issue(folder: Path, name: str, issuer: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """A certificate authority of the operators' own, or a browser's certificate under it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
    (folder / f"{name}.key").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    return certificate, key


def test_with_client_certificates_a_stranger_gets_no_answer(tmp_path: Path, hub: Hub) -> None:
    """The last part is the twin: without `client_ca` the same stranger is answered."""
    authority = _issue(tmp_path, "operators")
    _issue(tmp_path, "ann", authority)
    _issue(tmp_path, "mallory")
    wide = Address(host="0.0.0.0", port=0)
    told = hub.config.dashboard.model_copy(update={"client_ca": "operators.pem"})
    guard, tls = admission(told, tmp_path, wide, hub.ready.identity)
    with _serving(hub, guard, tls) as port:
        for stranger in (None, "mallory"):
            with pytest.raises((OSError, http.client.HTTPException)):
                _get(port, tmp_path, stranger)
        assert _get(port, tmp_path, "ann") == 200
    (tmp_path / "token").write_text("t" * 30)
    (tmp_path / "token").chmod(0o600)
    told = told.model_copy(update={"client_ca": None, "token": "token"})
    guard, tls = admission(told, tmp_path, wide, hub.ready.identity)
    with _serving(hub, guard, tls) as port:
        assert _get(port, tmp_path, None) == 401
        assert _get(port, tmp_path, None, "t" * 30) == 200


@contextmanager
def _serving(hub: Hub, guard: Guard, tls: Any) -> Iterator[int]:
    server = WebServer(pages(hub.page, hub.phases, guard).answer, Address(host="127.0.0.1", port=0), tls=tls)
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def _get(port: int, folder: Path, who: str | None, token: str | None = None) -> int:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The coordinator's certificate is of a federation whose clock is not today's; who is asking is the question here.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if who is not None:
        context.load_cert_chain(folder / f"{who}.pem", folder / f"{who}.key")
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=5)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
    return connection.getresponse().status


def test_a_taken_port_is_a_warning_and_no_page(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    with hub.serving() as server:
        told = hub.config.dashboard.model_copy(update={"listen": f"127.0.0.1:{server.port}"})
        config = hub.config.model_copy(update={"dashboard": told})
        with open_dashboard(config, tmp_path, hub.ready) as watch:
            watch()
    assert "no dashboard: " in caplog.text


# How fast.

MANY_SITES, MANY_ROUNDS = 50, 1000
MOST_SECONDS, MOST_BYTES = 0.1, 1_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Fifty sites and a thousand rounds, through the storage code of the coordinator."""
    names = tuple(f"site{number}" for number in range(MANY_SITES))
    sample = Sample.of(tmp_path_factory.mktemp("fifty"), MANY_SITES)
    hub = Hub.make(tmp_path_factory.mktemp("large"), names)
    hub.storage._db.execute("PRAGMA synchronous = OFF")
    for number in range(1, MANY_ROUNDS + 1):
        sample.write(hub.storage, number, now_ms=hub.world.now + 100_000 * number, open_round=number > 1)
        hub.storage.note_figures(number, Figures(weight=40_000, loss=50_000.0 / number, hits=20_000 + 10 * number))
        hub.storage.note_traffic(number, 700_000_000, 900_000_000)
    for name in names:
        hub.storage.note_session(name, 1, now_ms=hub.world.now)
    hub.look()
    yield hub
    hub.close()


def fetch(port: int, path: str) -> tuple[float, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    started = time.perf_counter()
    connection.request("GET", path)
    body = connection.getresponse().read()
    return time.perf_counter() - started, body


def test_a_thousand_rounds_of_fifty_sites_answer_in_a_tenth_of_a_second(large: Hub) -> None:
    """Each answer is to a change: something has been written since the one before, so that nothing is kept."""
    with large.serving() as server:
        cold, body = fetch(server.port, "/state.json")
        taken = []
        for step in range(9):
            large.storage.note_traffic(MANY_ROUNDS, 700_000_000 + step, 900_000_000)
            seconds, body = fetch(server.port, "/state.json")
            taken.append(seconds)
        parts = [fetch(server.port, path)[1] for path in ("/", "/app.js", "/style.css", "/kit.js", "/base.css")]
        metrics = statistics.median(fetch(server.port, "/metrics")[0] for _ in range(5))
    told = json.loads(body)
    assert len(told["rounds"]) == MANY_ROUNDS
    assert len(told["sites"]) == MANY_SITES
    assert all(row[COLUMNS.index("survivors")] == MANY_SITES for row in told["rounds"])
    size = len(body) + sum(map(len, parts))
    middle = statistics.median(taken)
    print(f"first {cold * 1e3:.0f} ms, then {middle * 1e3:.0f} ms, metrics {metrics * 1e3:.0f} ms, {size:,} bytes")
    assert middle < MOST_SECONDS
    assert metrics < MOST_SECONDS
    assert size < MOST_BYTES
