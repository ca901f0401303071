"""Votes on models, over loopback TLS: what the sites do not accept does not follow, with kills in between."""

from __future__ import annotations

import signal

import pytest

from coordinator.effects import VOTED_DOWN
from scripts.local_federation.sums import read_published
from tests.support.federation import WAIT, NumberFederation

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> NumberFederation:
    """Two of four sites find the second model worse. A site and the coordinator are killed afterwards."""
    made = NumberFederation(tmp_path_factory.mktemp("votes"), rounds=30, words=400, votes=True)
    for name in ("site1", "site2"):
        (made.folders.site(name) / "doubts").write_text("2")
    with made.running():
        made.coordinator.wait_for("round 2: the sites voted against the model", seconds=WAIT)
        made.sites["site3"].kill_at("before-state")
        assert made.sites["site3"].wait_dead(seconds=WAIT) == -signal.SIGKILL
        made.sites["site3"].start()
        made.wait_published(made.published + 1)
        made.coordinator.kill_at("after-C5")
        assert made.coordinator.wait_dead(seconds=WAIT) == -signal.SIGKILL
        made.coordinator.start()
        made.wait_published(made.published + 2)
    return made


def test_the_model_before_it_stands(federation: NumberFederation) -> None:
    federation.check_sums()
    results = {result.round: result for result in read_published(federation.folders.coordinator)}
    assert not results[2].stands and all(result.stands for number, result in results.items() if number != 2)
    following = results[min(number for number in results if number > 2)]  # a killed site may cost a round its sum
    assert following.before == results[2].before != results[2].after
    assert federation.rounds[1]["outcome"] == VOTED_DOWN
    for site in federation.sites.values():
        assert site.says("round 2: the sites voted against the model")


def test_every_site_has_computed_the_same_model(federation: NumberFederation) -> None:
    federation.check_models()


def test_all_logs_together_are_clean(federation: NumberFederation) -> None:
    crossed = federation.check_logs()
    assert all(len(list(history.of("result.voted"))) > 2 for history in crossed.histories)
