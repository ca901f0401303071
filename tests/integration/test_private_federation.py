"""Private rounds over the wire: what is booked, what is sent, where it stops, and what a damaged ledger does.

Real agents, ledgers, logs and training of a small network; the coordinator is the lab's hub, and every message goes
through its bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from lazaret.errors import LedgerError
from security.audit.cli import main as privacy_audit
from security.dp.accountant import Mechanism, merged, rdp_epsilon
from security.dp.ledger import Ledger
from security.dp.noise import NoiseSource
from security.identity.pinned_files import pinned_model
from security.secagg import messages
from security.secagg.certificates import Advert
from security.secagg.relay import Decline
from site_agent import budget as budgets
from site_agent import session as sessions
from site_agent.privacy import Limits, PrivatePlan, budget_status, ledger_files, planned_cost, status_line
from tests.support.consortium_world import DAY
from tests.support.private_world import HOSPITALS, PLAN, ROUNDS, STEPS, PrivateWorld

pytestmark = pytest.mark.timeout(300)
GRAZ, *OTHERS = HOSPITALS
THREE = HOSPITALS[:3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def world(tmp_path: Path) -> PrivateWorld:
    found = PrivateWorld(tmp_path, sites=THREE)
    found.create_ledgers()
    return found


@pytest.fixture
def four(tmp_path: Path) -> PrivateWorld:
    """One more than a sum needs."""
    found = PrivateWorld(tmp_path)
    found.create_ledgers()
    return found


def test_a_run_books_what_was_planned_and_its_logs_prove_it(world: PrivateWorld) -> None:
    said = planned_cost(world.config(GRAZ), world.manifest)
    world.start_all()
    _, before = pinned_model(world.model_path, world.manifest)
    for _ in range(ROUNDS):
        world.run_round()
    assert said is not None and world.book(GRAZ).epsilon == pytest.approx(said.epsilon, rel=1e-9)
    assert world.hub.round == ROUNDS and not np.array_equal(world.hub.model, before)
    for site in THREE:
        plan = PrivatePlan.of(world.config(site), world.manifest)
        state = world.book(site)
        assert plan is not None and state.history == plan.schedule.events()
        assert all(booking.committed for booking in state.bookings)
        assert world.vectors_of(site) == ROUNDS
        # The weight that counts is the noisy one, and no loss or hit of a patient is in the sum.
        assert world.trainers[site].samples == world.trainers[site]._private.rounds.counts.weight()
    commitments = [message.ledger_head for _, message in world.hub.seen if isinstance(message, Advert)]
    assert len(set(commitments)) == ROUNDS * len(THREE), "each advert commits to the ledger as it then is"
    _check_log(world, GRAZ)


def _check_log(world: PrivateWorld, site: str) -> None:
    """Reserved before training, committed before a vector leaves; and both epsilons come out of the log alone."""
    segments = sorted((world.agents[site].state_dir.log / "segments").glob("*.jsonl"))
    entries = [json.loads(line) for path in segments for line in path.read_text().splitlines()]
    for number in range(1, ROUNDS + 1):
        kinds = [entry["type"] for entry in entries if entry["round"] == number]
        order = [kinds.index(kind) for kind in ("dp.reserved", "dp.committed", "train.done", "egress")]
        assert order == sorted(order)
    log = str(world.agents[site].state_dir.log)
    told = CliRunner().invoke(privacy_audit, ["epsilon", log, "--recompute", "--json"])
    assert told.exit_code == 0, told.output
    history = world.book(site).history
    statement = json.loads(told.stdout)["epsilon"]
    assert statement["best_rdp"] == pytest.approx(rdp_epsilon(history, 1e-5)[0], abs=1e-3)
    cost = planned_cost(world.config(site), world.manifest)
    assert cost is not None and (cost.rounds, cost.fits) == (0, True)
    assert statement["pld"] == pytest.approx(cost.epsilon_pld, abs=1e-3)
    assert 0 < cost.epsilon_pld < cost.booked == cost.epsilon < 20


def said(world: PrivateWorld, site: str) -> str:
    """The line of `site-agent status` about privacy."""
    told = budget_status(world.config(site), world.manifest)
    assert told is not None
    return status_line(told)


def spend_all_but(world: PrivateWorld, site: str, rounds: int) -> None:
    """A cap that holds this many rounds of this site."""
    plan = PrivatePlan.of(world.config(site), world.manifest)
    assert plan is not None
    rule = plan.terms(world.config(site)).filter()
    events = [event for number in range(1, rounds + 1) for event in plan.schedule.round_events(number)]
    world.set_privacy(site, f"cap = {rule.epsilon(merged(events)) + 0.01:.3f}")


def test_a_site_stops_before_its_cap_and_the_others_go_on(four: PrivateWorld) -> None:
    world = four
    spend_all_but(world, GRAZ, 1)
    world.start_all()
    world.run_round()
    paid = world.book(GRAZ)
    world.run_round()
    assert world.hub.round == 2 and world.hub.check is not None, "three of four are enough"
    assert world.book(GRAZ) == paid, "nothing was booked for a round that was not trained"
    assert world.vectors_of(GRAZ) == 1 and [world.vectors_of(site) for site in OTHERS] == [2, 2, 2]
    assert [type(message) for sender, message in world.hub.seen if sender == GRAZ][-1] is not messages.Ready
    assert [message.round for message in world.hub.sent_by(GRAZ, Decline)] == [2]
    assert "budget" in world.entries(GRAZ, "round.declined")[0]["rule"]
    assert "no longer contributes" in said(world, GRAZ) and "more rounds fit" in said(world, "linz")


def order_after_the_end_of_all_certificates(world: PrivateWorld) -> int:
    """How many rounds a site books for a round that no cohort can end."""
    world.start_all()
    world.run_round()
    booked = len(world.book(GRAZ).bookings)
    world.clock.advance(400 * DAY)
    for _ in range(2):
        world.hub.order(THREE)
        for site in THREE:
            world.work(site)
    return len(world.book(GRAZ).bookings) - booked


def test_a_round_that_no_cohort_can_end_is_not_booked(world: PrivateWorld) -> None:
    assert order_after_the_end_of_all_certificates(world) == 0
    rule = world.entries(GRAZ, "round.declined")[-1]["rule"]
    assert "manifest version 1 has expired" in rule or "certificates must be valid" in rule


def test_a_round_that_no_cohort_can_end_is_not_booked_twin(
    world: PrivateWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: the order is enough, and the budget is spent on updates that nobody can add up."""
    monkeypatch.setattr(sessions, "check_standing", lambda *_, **__: None)
    assert order_after_the_end_of_all_certificates(world) == 2


def test_a_site_stops_before_its_cap_twin(world: PrivateWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "admit", lambda *_: None)
    spend_all_but(world, GRAZ, 1)
    world.start_all()
    world.run_round()
    world.run_round()
    assert world.vectors_of(GRAZ) == 2
    assert world.book(GRAZ).epsilon > float(world.config(GRAZ).privacy.cap)


def test_killed_between_reservation_and_training_the_charge_stands_and_nothing_is_sent(world: PrivateWorld) -> None:
    world.start_all()
    world.doom(GRAZ)
    order = world.hub.order(THREE)
    for site in THREE:
        world.work(site)
    assert GRAZ not in world.agents and not world.hub.sent_by(GRAZ, messages.Ready)
    assert [booking.committed for booking in world.book(GRAZ).bookings] == [False]
    world.start(GRAZ)
    world.hub.connect(GRAZ)
    world.hub.send(GRAZ, order)
    world.work(GRAZ)
    first, second = world.book(GRAZ).bookings
    assert (first.committed, second.committed) == (False, True), "training again is a reservation of its own"
    assert first.events == second.events, "what was released is lost with the process and is paid for again"
    logged = [entry["reservation"] for entry in world.entries(GRAZ, "dp.reserved")]
    assert logged == [budgets.ident(world.book(GRAZ), booking) for booking in (first, second)]
    world.tick(5000)
    world.hub.aggregate()
    assert world.vectors_of(GRAZ) == 1


def test_a_restarted_site_has_its_releases_and_does_not_pay_for_them_again(world: PrivateWorld) -> None:
    world.start_all()
    world.run_round()
    counts = world.trainers[GRAZ]._private.rounds.counts
    world.kill(GRAZ)
    world.start(GRAZ)
    world.hub.connect(GRAZ)
    world.run_round()
    assert world.trainers[GRAZ]._private.rounds.counts == counts
    booked = world.book(GRAZ).bookings[1].events
    assert [(event.kind, event.steps) for event in booked] == [(Mechanism.DP_SGD, STEPS)]


def test_a_new_run_inherits_what_these_patients_have_paid(world: PrivateWorld) -> None:
    """Its log begins with the bookings of the run before, so that epsilon can be recomputed from it alone."""
    plan = PrivatePlan.of(world.config(GRAZ), world.manifest)
    assert plan is not None
    with ledger_files(world.config(GRAZ)) as files:
        ledger = Ledger.open(files, population="patients", clock=world.clock)
        earlier = plan.schedule.round_events(1)
        ledger.reserve(run="lesions/run-0", round_number=7, events=earlier, noise=NoiseSource())
    world.start_all()
    world.run_round()
    first, second = world.entries(GRAZ, "dp.reserved")
    assert first["round"] == 7 and [event["kind"] for event in first["mechanisms"]] == [e.kind for e in earlier]
    assert float(second["epsilon_total"]) > float(first["epsilon_total"]) > 0
    told = CliRunner().invoke(privacy_audit, ["epsilon", str(world.agents[GRAZ].state_dir.log), "--json"])
    assert told.exit_code == 0, told.output
    assert world.book(GRAZ).epsilon == pytest.approx(float(second["epsilon_total"]), abs=1e-5)


def cut(world: PrivateWorld) -> None:
    path = world.config(GRAZ).ledger
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))


def lose(world: PrivateWorld) -> None:
    world.config(GRAZ).ledger.unlink()


def lose_both(world: PrivateWorld) -> None:
    lose(world)
    world.config(GRAZ).ledger_anchor.unlink()


def exchange(world: PrivateWorld) -> None:
    shutil.copy(world.config("linz").ledger, world.config(GRAZ).ledger)


@pytest.mark.parametrize("damage", [cut, lose, lose_both, exchange])
def test_a_damaged_ledger_starts_no_agent(world: PrivateWorld, damage: Callable[[PrivateWorld], None]) -> None:
    world.start(GRAZ)
    world.kill(GRAZ)
    world.start("linz")
    damage(world)
    sent = len(world.hub.seen)
    with pytest.raises(LedgerError):
        world.start(GRAZ)
    assert len(world.hub.seen) == sent


def rolled_back(world: PrivateWorld, tmp_path: Path) -> None:
    """After a round, ledger *and* anchor are what they were before it, as from one backup of the disk."""
    config = world.config(GRAZ)
    for path in (config.ledger, config.ledger_anchor):
        shutil.copy(path, tmp_path / path.name)
    world.start_all()
    world.run_round()
    world.kill(GRAZ)
    for path in (config.ledger, config.ledger_anchor):
        shutil.copy(tmp_path / path.name, path)


def test_a_ledger_rolled_back_with_its_anchor_is_caught_by_the_log(world: PrivateWorld, tmp_path: Path) -> None:
    rolled_back(world, tmp_path)
    with pytest.raises(LedgerError, match="reservation"):
        world.start(GRAZ)


def test_a_ledger_rolled_back_with_its_anchor_twin(
    world: PrivateWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "check_logged", lambda *_: None)
    rolled_back(world, tmp_path)
    world.start(GRAZ)
    world.hub.connect(GRAZ)
    world.run_round()
    assert world.vectors_of(GRAZ) == 2
    assert len(world.book(GRAZ).bookings) == 1, "two rounds were sent on one charge"


@pytest.mark.parametrize("share", ["0.5", "0.0"])
def test_local_validation_is_booked_with_the_round_and_noisy(tmp_path: Path, share: str) -> None:
    """Also where nobody is on the validation side: sides are drawn by a secret key, and an answer would tell."""
    world = PrivateWorld(tmp_path, sites=THREE, plan=PLAN.replace("epsilon = 20", "epsilon = 40"))
    world.set_privacy(GRAZ, "metrics_noise = 4.0")
    path = world.configs[GRAZ]
    path.write_text(path.read_text().replace("[data]\n", f"[data]\nvalidation = {share}\n"))
    world.create_ledgers()
    world.start_all()
    world.run_round()
    kinds = [event.kind for event in world.book(GRAZ).history]
    assert kinds.count(Mechanism.METRICS) == 1
    figures = world.agents[GRAZ].state_dir.read_metrics()
    assert [row["private"] for row in figures] == [True] and set(figures[0]) >= {"round", "validation"}
    assert (len(world.trainers[GRAZ].data.validation or ()) == 0) == (share == "0.0")
    assert world.agents["linz"].state_dir.read_metrics() == [], "without it, local validation is off"
    assert not list(world.agents["linz"].state_dir.models.iterdir())
