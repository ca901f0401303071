"""A wire that loses and repeats messages and sites that restart at any time: promises are kept, sums are exact.

When the storm is over, every site comes back once and the next rounds succeed: nothing is stuck for ever. There is one
exception. If shares of a sum were released and the sum never came, another set of sites on the same model could show
one site's update (section 10, differences of sums): then the operators decide, and the round after that succeeds.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from protos.loopback import COORDINATOR
from security.secagg import messages
from security.secagg.certificates import Ack
from security.secagg.fields import Wire
from security.secagg.records import UpdatesPermitted
from security.secagg.transitions import CoordinatorState
from tests.support.secagg_world import RecordedFederation, federation, random_updates, reference_sum

# Frames follow each other on one stream, which loses its end and never its middle.
STREAMED = messages.UploadFrame | messages.SumFrame | messages.ChunkPiece


def storm(run: RecordedFederation, seed: int, *, loss: float, repeat: float, restart: float) -> None:
    chance = random.Random(seed)
    restarting: list[str] = []

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        if isinstance(message, STREAMED):
            return [message]
        site = receiver if sender == COORDINATOR else sender
        if chance.random() < restart and not restarting:
            restarting.append(site)
            run.restart_site(site)
            restarting.clear()
        drawn = chance.random()
        return [] if drawn < loss else [message, message] if drawn < loss + repeat else [message]

    run.hook = hook


def heal(run: RecordedFederation) -> None:
    """Everyone connects once more, and what is owed is asked for again."""
    run.hook = None
    run._queue.clear()
    for name, site in run.sites.items():
        site.online = True
        run._do_coordinator(run.planned.receive(name, site.machine.hello()))
    run.pump()


@settings(
    max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@example(seed=19442262, count=4, loss=0.1, repeat=0.0, restart=0.01)  # two sites release for three of four
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(4, 6),
    loss=st.sampled_from([0.0, 0.02, 0.1]),
    repeat=st.sampled_from([0.0, 0.1]),
    restart=st.sampled_from([0.0, 0.01, 0.05]),
)
def test_promises_are_kept_in_any_weather(seed: int, count: int, loss: float, repeat: float, restart: float) -> None:
    run = federation(count, seed=seed.to_bytes(5, "big"))
    updates = random_updates(run.policy.layout, run.sites, seed)
    storm(run, seed, loss=loss, repeat=repeat, restart=restart)
    outcome = run.run_round(updates)
    run.check_promises()
    if outcome.total is not None:
        assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    heal(run)
    newest = run.planned.current
    assert newest is not None
    if newest.publication is None:
        # The round is lost, or was completed only now; the next one starts from what everybody has.
        assert outcome.total is None
    else:
        assert newest.state in (CoordinatorState.PUBLISHED, CoordinatorState.CERTIFIED)
        bring_everybody_up_to_date(run)
    following = random_updates(run.policy.layout, run.sites, seed + 1)
    after = run.run_round(following)
    if after.total is None and permit_after_released_shares(run):
        following = random_updates(run.policy.layout, run.sites, seed + 2)
        after = run.run_round(following)
    run.check_promises()
    assert after.total is not None, [site.errors[-1:] for site in run.sites.values()]
    assert after.total.tolist() == reference_sum(run.policy.layout, following, after.survivors)


def permit_after_released_shares(run: RecordedFederation) -> bool:
    """`site-agent permit` at every site; False if no site has a sum on its model that could be compared."""
    cores = {name: site.machine.core for name, site in run.sites.items()}
    known = [seen.state_hash == core.head.state_hash for core in cores.values() for seen in core.journal.sums]
    for name, core in cores.items():
        run._do_site(name, (core.record(UpdatesPermitted(state_hash=core.head.state_hash)),))
    return any(known)


def bring_everybody_up_to_date(run: RecordedFederation) -> None:
    newest = run.planned.current
    assert newest is not None and newest.publication is not None
    run.model, run.prev_result = newest.model, newest.publication.result_hash
    if newest.publication.certificate() is None:
        order = messages.AuditOrder(result=run.prev_result, absent=())
        for name, site in run.sites.items():
            if site.machine.core.head.result == run.prev_result and site.machine.intake.audit is not None:
                run._send(COORDINATOR, name, order)
        run.pump()
    run._bring_back(newest, newest.publication)
    assert any(isinstance(ack, Ack) for ack in newest.publication.acks.values())
    run.book.pause.clear()
