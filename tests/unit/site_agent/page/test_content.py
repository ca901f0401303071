"""The hospital's page: what left, from the real log of a real agent, and what stays, from the files it keeps."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from lazaret.control import STALE_MS
from lazaret.errors import ConfigError
from lazaret.web.server import exposition
from security.audit.facts import read_history
from security.dp.accountant import dp_sgd_event, rate_at_least
from security.dp.ledger import Ledger, Terms, Unit
from security.dp.noise import NoiseSource
from security.rng import SystemRandomness
from site_agent.config import SiteConfig
from site_agent.metrics import AgentCollector, open_metrics
from site_agent.page import content as learnt
from site_agent.page.content import Content, EgressTotals, judge, open_page
from site_agent.privacy import ledger_files
from site_agent.status import AgentPresence
from tests.support.site_world import SiteWorld

SITE = "graz"
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SiteWorld:
    made = SiteWorld(tmp_path_factory.mktemp("page"))
    made.start_all()
    made.run_round()
    return made


def config_of(world: SiteWorld) -> SiteConfig:
    return SiteConfig.read(world.configs[SITE])


def content(world: SiteWorld) -> dict[str, Any]:
    return json.loads(Content(config_of(world), world.clock).state().body)


def test_what_left_is_what_the_log_says(world: SiteWorld) -> None:
    log = world.agents[SITE].state_dir.log
    records = list(read_history(log, origin="", name="", role="").of("egress"))
    told = content(world)["egress"]
    by_class = {name: size for name, _, size in told["today"]}
    assert told["total"] == sum(record.body["bytes"] for record in records) == sum(by_class.values())
    assert by_class["masked-vector"] == sum(
        record.body["bytes"] for record in records if record.body["data_class"] == "masked-vector"
    )
    assert told["entries"] == world.agents[SITE].log.size
    assert dict(map(tuple, told["rounds"]))[1] > by_class["masked-vector"]
    assert told["blocked"] == 0


def test_a_log_is_read_on_from_where_it_was_and_a_torn_line_waits(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    segment = tmp_path / "segments" / "00000000.jsonl"
    lines = [
        json.dumps(
            {
                "body": {"bytes": size, "data_class": "control"},
                "round": 1,
                "ts": 1_800_000_000_000,
                "type": "egress",
                "v": 1,
            },
            separators=(",", ":"),
        )
        for size in (10, 20, 30)
    ]
    segment.write_text(lines[0] + "\n" + lines[1][:40])
    outflow = EgressTotals(tmp_path)
    outflow.catch_up()
    assert outflow.to_json(0)["total"] == 10
    segment.write_text("".join(f"{line}\n" for line in lines[:2]))
    (tmp_path / "segments" / "00000001.jsonl").write_text(f"{lines[2]}\n")
    for _ in range(2):
        outflow.catch_up()
        assert (outflow.to_json(0)["total"], outflow.entries) == (60, 3)
    assert outflow.to_json(0)["today"] == []  # another day


def test_who_we_are_and_how_far(world: SiteWorld) -> None:
    about = content(world)["about"]
    assert (about["site"], about["federation"], about["run"], about["round"]) == (SITE, "lesions", "run-1", 1)


def test_the_page_is_made_anew_only_when_something_has_changed(world: SiteWorld) -> None:
    page = Content(config_of(world), world.clock)
    first = page.state()
    assert page.state() is first
    world.agents[SITE].state_dir.note_metrics({"round": 1, "test": {"bacc": 0.25, "bauc": None, "images": 4}})
    second = page.state()
    assert second.etag != first.etag
    assert json.loads(second.body)["curves"][-1]["test"] == {"bacc": 0.25, "bauc": None}


def test_the_newest_matrix_of_the_test_images_is_shown() -> None:
    rows = [
        {"round": 1, "test": {"bacc": 0.1, "bauc": 0.1, "confusion": [[1, 0], [0, 1]]}},
        {"round": 2, "validation": {"bacc": 0.2, "confusion": [[2]]}, "test": {"bacc": 0.3, "confusion": [[3]]}},
        {"round": 3, "kind": "nothing evaluated"},
    ]
    assert learnt.confusion(rows) == {"round": 2, "side": "test", "matrix": [[3]]}
    assert learnt.confusion(rows[2:]) is None


def test_prototypes_lie_on_the_plane_in_which_they_differ_most(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    axes = np.linalg.qr(rng.normal(size=(16, 2)))[0].T
    flat = rng.normal(size=(9, 2)) * (5.0, 1.0)
    vectors = (flat @ axes).astype(np.float32)
    path = tmp_path / "7.safetensors"
    path.write_bytes(save({learnt.VECTORS: vectors, learnt.OWNERS: np.arange(9) // 3, "model/x": np.zeros(3)}))
    told = learnt.prototypes(path)
    assert told is not None
    assert (told["round"], told["owners"]) == (7, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert sum(told["shares"]) == pytest.approx(1, abs=1e-3)
    points = np.array(told["points"])
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    wanted = np.linalg.norm(vectors[:, None] - vectors[None], axis=2)
    np.testing.assert_allclose(distances, wanted, atol=2e-3)


@pytest.mark.parametrize("vectors", [np.ones((1, 4)), np.ones((3, 4)), np.ones((2, 1))])
def test_a_plane_for_the_few_and_the_equal(vectors: np.ndarray) -> None:
    points, shares = learnt.on_a_plane(vectors)
    assert points.shape == (len(vectors), 2)
    assert np.isfinite(points).all()
    assert np.isfinite(shares).all()


def test_memory_without_prototypes_has_no_picture(tmp_path: Path) -> None:
    (tmp_path / "2.safetensors").write_bytes(save({"model/x": np.zeros(3)}))
    (tmp_path / "10.safetensors").write_bytes(b"half of a fi")
    (tmp_path / "other.safetensors").write_bytes(b"")
    newest = learnt.newest_memory(tmp_path)
    assert newest == tmp_path / "10.safetensors"
    assert learnt.prototypes(newest) is None
    assert learnt.prototypes(tmp_path / "2.safetensors") is None


QUIET = {"blocked": 0, "blocked_today": 0, "declined_today": 0, "declined_by": ""}
CALM: dict[str, Any] = {"today": [["control", 1, 10]], **QUIET}
NOTHING: dict[str, Any] = {"about": {}, "privacy": None}


def test_sentences() -> None:
    assert judge(NOTHING, CALM)["level"] == "good"
    assert judge(NOTHING, CALM | {"today": []})["sentence"] == "Nothing was sent today"
    assert judge(NOTHING, CALM | {"blocked": 2, "blocked_today": 1})["level"] == "bad"
    assert judge(NOTHING, CALM | {"blocked": 2})["level"] == "look"
    assert judge(NOTHING | {"about": {"remarks": [{"level": "bad", "text": "stopped"}]}}, CALM)["level"] == "bad"


def test_a_decline_is_looked_after_while_it_lasts_and_told_once() -> None:
    """A hospital that trains at night has declined by day: its page is green again when it trains."""
    hours = "[policy] hours: 12:00 is outside of 20:00-06:00"
    declined = CALM | {"declined_today": 3, "declined_by": hours}
    over = judge(NOTHING, declined)
    assert over["level"] == "good" and "orders declined earlier today: 3" in over["remarks"][0]["text"]
    now = {"about": {"remarks": [{"level": "look", "text": f"declined round 5: {hours}"}]}}
    lasting = judge(NOTHING | now, declined)
    assert lasting["level"] == "look" and len(lasting["remarks"]) == 1


def test_a_dead_agent_is_noticed(world: SiteWorld) -> None:
    """Nothing writes any more: only that `now.json` grows old shows it."""
    config, clock = config_of(world), world.clock
    page, seen = Content(config, clock), AgentPresence(config, world.agents[SITE])
    seen.look()
    told = json.loads(page.state().body)
    assert told["about"]["running"] and "not running" not in told["health"]["sentence"]
    clock.advance(STALE_MS)
    try:
        told = json.loads(page.state().body)
        assert told["health"]["level"] == "bad" and "The agent is not running" in told["health"]["sentence"]
        assert "it was killed, or hangs" in told["health"]["remarks"][0]["text"]
    finally:
        clock.advance(-STALE_MS)
    seen.stop("stopped by a signal")
    assert "stopped by a signal" in json.loads(page.state().body)["health"]["remarks"][0]["text"]


def test_epsilon_is_the_ledgers(world: SiteWorld) -> None:
    config, page = config_of(world), Content(config_of(world), world.clock)
    assert json.loads(page.state().body)["privacy"] is None
    assert b"epsilon" not in exposition(AgentCollector(world.agents[SITE], config)).body
    terms = Terms(population=config.privacy.population, unit=Unit.PATIENT, delta=1e-5, cap=3.0, order=8.0)
    event = dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.02), steps=50)
    try:
        with ledger_files(config) as store:
            ledger = Ledger.create(store, terms, version="v1")
            for number in (1, 2):
                ledger.reserve(run="run-1", round_number=number, events=(event,), noise=NoiseSource())
            told = json.loads(page.state().body)["privacy"]
            assert told["epsilon"] == ledger.state.epsilon > 0
            assert (told["cap"], told["unit"]) == (3.0, "patient")
            assert [row[:2] for row in told["series"]] == [["run-1", 1], ["run-1", 2]]
            assert told["series"][-1][2] == pytest.approx(told["epsilon"], abs=1e-3)
            text = exposition(AgentCollector(world.agents[SITE], config)).body.decode()
            assert f"lazaret_agent_epsilon {ledger.state.epsilon}" in text
        config.ledger_anchor.unlink()
        config.ledger.write_bytes(config.ledger.read_bytes() + b"{}\n")
        assert json.loads(page.state().body)["health"]["level"] == "bad"
    finally:
        config.ledger.unlink()
        config.ledger_anchor.unlink(missing_ok=True)


# For the hospital's eyes only.


def fetch(url: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
    connection.request("GET", parts.path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_without_the_whole_address_there_is_nothing(world: SiteWorld) -> None:
    server, url = open_page(config_of(world), "127.0.0.1:0", clock=world.clock, rng=SystemRandomness())
    other, second = open_page(config_of(world), "127.0.0.1:0", clock=world.clock, rng=SystemRandomness())
    try:
        assert fetch(f"{url}state.json")[0] == 200
        token = url.rstrip("/").rpartition("/")[2]
        assert len(token) >= 32
        assert token not in second
        for stranger in (server.url, f"{server.url}state.json", url.replace(token, token[:-1]), second.replace(
            str(other.port), str(server.port)
        )):  # fmt: skip
            status, body = fetch(stranger)
            assert status == 404
            assert SITE.encode() not in body
    finally:
        server.stop()
        other.stop()


def test_the_command_shows_it_until_it_is_interrupted(world: SiteWorld) -> None:
    command = [sys.executable, "-m", "site_agent", "--config", str(world.configs[SITE]), "status", "--web"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/[A-Za-z0-9_-]{32}/", url)
        assert b"Lazaret" in fetch(url)[1]
        assert fetch(f"{url}state.json")[0] == 200
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 0
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.7:80", "hospital.example:80"])
def test_no_other_machine_reaches_page_or_metrics(world: SiteWorld, listen: str) -> None:
    with pytest.raises(ConfigError, match="for the machine it runs on"):
        open_page(config_of(world), listen, clock=world.clock, rng=SystemRandomness())
    config = config_of(world)
    told = config.model_copy(update={"metrics": config.metrics.model_copy(update={"listen": listen})})
    with pytest.raises(ConfigError, match="for the machine it runs on"), open_metrics(told, world.agents[SITE]):
        pass


def test_metrics_are_served_while_the_agent_runs(world: SiteWorld, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(world)
    told = config.model_copy(update={"metrics": config.metrics.model_copy(update={"listen": "127.0.0.1:0"})})
    with caplog.at_level("INFO", "site-agent"), open_metrics(told, world.agents[SITE]):
        url = caplog.messages[-1].removeprefix("metrics on ")
        assert b"lazaret_agent_log_entries" in fetch(url)[1]
    with open_metrics(config, world.agents[SITE]):
        pass  # off unless asked for
