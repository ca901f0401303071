"""A lying coordinator over real gRPC and TLS, against site agents in processes of their own.

Each lie is signed with the coordinator's real key and told to one site; the honest message follows it. The site must
refuse the lie by its own rule, and the federation must go on: the sums stay exact, the lie has cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.local_federation.federation import Party, wait_until
from tests.support.federation import WAIT, NumberFederation
from tests.support.lying_coordinator import AGAIN, LIES, TIMES, VICTIM

pytestmark = pytest.mark.timeout(240)
ENTRY = "tests.support.lying_coordinator"
# What the victim says when it is lied to.
REFUSALS = {
    "A4": "survivors: this site has agreed to another set",
    "A7": "neither an abort certificate nor an exact repeat",
    "A8": "plan is for another model than this site trained on",
    "A9": "the announced model does not follow from the sum",
    "A11": "sum does not have the announced root",
    "A11-twice": "a site acknowledges twice",
    "A25": "round number is out of the window",
}


def with_liar(federation: NumberFederation, *victim: str) -> NumberFederation:
    folders = federation.folders
    config = folders.coordinator / "coordinator.toml"
    output = folders.folder / "output"
    federation.coordinator = Party(
        "coordinator", [ENTRY, "liar", "--config", config], output / "coordinator.log", folders.coordinator
    )
    if victim:
        home = folders.site(VICTIM)
        words = [ENTRY, "careless", "--config", home / "site.toml", "--without", *victim]
        federation.sites[VICTIM] = Party(VICTIM, words, output / f"{VICTIM}.log", home)
    return federation


def tell_lie(federation: NumberFederation, name: str) -> None:
    """Have it told, wait for the refusal, and then for rounds that go as if nothing had been."""
    victim = federation.sites[VICTIM]
    before = len(victim.text())
    order = federation.folders.coordinator / "lie"
    (order.parent / "lie.new").write_text(name)
    (order.parent / "lie.new").rename(order)
    wait_until(lambda: not order.exists(), f"lie {name}", seconds=WAIT, output=federation.coordinator.output)
    refused = f"refusal of {name}"
    wait_until(lambda: REFUSALS[name] in victim.text()[before:], refused, seconds=WAIT, output=victim.output)
    # Where it has not got what it was owed, it asks for it on a new stream.
    federation.wait_published(federation.published + 2)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumberFederation]:
    made = with_liar(NumberFederation(tmp_path_factory.mktemp("liar"), rounds=80))
    with made.running():
        made.wait_published(1)
        yield made


@pytest.mark.parametrize("name", LIES)
def test_the_lie_is_refused_and_costs_nothing(federation: NumberFederation, name: str) -> None:
    tell_lie(federation, name)


def test_every_sum_is_exact_after_all_lies(federation: NumberFederation) -> None:
    before = federation.published
    federation.wait_published(before + 2)
    federation.stop()
    # Some sites stop before others, who may still finish a round without the victim.
    after = federation.check_sums()[before:]
    assert any(VICTIM in survivors for _, survivors in after)
    for party in federation.parties:
        assert party.code == 0


def test_a_site_that_does_not_recompute_follows_the_coordinators_result_twin(tmp_path: Path) -> None:
    """A9 without the recomputation: the victim takes the false result for the next link of its chain."""
    federation = with_liar(NumberFederation(tmp_path / "twin", rounds=80), "site.result_checks.check_next_state")
    victim = federation.sites[VICTIM]
    with federation.running():
        federation.wait_published(1)
        before = len(victim.text())
        (federation.folders.coordinator / "lie").write_text("A9")
        # Whatever it is told of the true result next, it is another one than it has.
        signs = ("order is for a result that is not under audit", "acknowledgements are of another result")
        own_chain = "the victim's own chain"
        wait_until(lambda: any(sign in victim.text()[before:] for sign in signs), own_chain, seconds=WAIT)
        assert "sum of 4 sites accepted" in victim.text()[before:]
    assert REFUSALS["A9"] not in victim.text()


@pytest.mark.long
def test_one_acknowledgement_counted_often_is_a_certificate_twin(tmp_path: Path) -> None:
    """A11 without the check that sites are distinct: one site's word alone verifies the sum for the victim."""
    federation = with_liar(NumberFederation(tmp_path / "twin", rounds=80), "certificate_checks.check_distinct_acks")
    victim = federation.sites[VICTIM]
    with federation.running():
        federation.wait_published(1)
        before = len(victim.text())
        order = federation.folders.coordinator / "lie"
        order.write_text("A11-twice")
        wait_until(lambda: not order.exists(), "the lie", seconds=WAIT, output=federation.coordinator.output)
        federation.wait_published(federation.published + 2)
    said = victim.text()[before:]
    assert "is verified" in said and REFUSALS["A11-twice"] not in said and "do not cover" not in said


def test_a_result_that_is_shown_again_draws_no_other_chunk(tmp_path: Path) -> None:
    """A11 with a sampled audit: however often its pieces are held back, the victim asks for the chunk it drew."""
    federation = with_liar(NumberFederation(tmp_path / "again", rounds=40, audit="sampled"))
    with federation.running():
        federation.wait_published(1)
        # Of three sites none can be spared: without the victim's acknowledgement there is no next round.
        federation.sites["site3"].stop()
        federation.wait_published(federation.published + 2)
        order = federation.folders.coordinator / "lie"
        order.write_text(AGAIN)
        wait_until(lambda: not order.exists(), "the lie", seconds=WAIT, output=federation.coordinator.output)
        federation.wait_published(federation.published + 2)
    asked = (order.parent / "asked").read_text().splitlines()
    assert len(asked) == TIMES * 3
    assert len({tuple(line.split()[:2]) for line in asked}) == 1, "one result, one chunk"
    federation.check_sums()
