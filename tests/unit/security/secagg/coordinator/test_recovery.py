"""Kill either side between any two of its effects: nothing is said twice differently, and the round still ends.

A process dies before effect k of its life, for every k: what was persisted stays, what was to be sent is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from protos.loopback import COORDINATOR, RoundOutcome, sent_message
from security.clock import ManualClock
from security.crypto.prg import Words
from security.rng import CountedRandomness
from security.secagg import messages, records
from security.secagg import state as states
from security.secagg.coordinator.recovery import restore_round, resume
from security.secagg.coordinator.rounds import BlameBook, RoundLost
from security.secagg.effects import Effect, Effects, SaveState
from security.secagg.layout import Vector
from tests.support.secagg_world import CONFIG, RecordedFederation, names, random_updates, reference_sum, small_layout

SITES = 4


class Killed(Exception):
    """The coordinator's process is gone."""


class CrashingFederation(RecordedFederation):
    """Kills one party just before its k-th effect."""

    victim = ""
    left = -1
    kills = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self.stored: dict[bytes, Vector] = {}
        super().__init__(*args, **options)

    def _do_site(self, name: str, effects: Effects) -> None:
        if name != self.victim:
            super()._do_site(name, effects)
            return
        for effect in effects:
            if self._dies():
                self.restart_site(name)
                return
            super()._do_site(name, (effect,))

    def _do_coordinator(self, effects: Effects) -> None:
        for effect in effects:
            if self.victim == COORDINATOR and self._dies():
                raise Killed
            super()._do_coordinator((effect,))

    def _dies(self) -> bool:
        self.left -= 1
        self.kills += self.left == -1
        return self.left == -1

    def finish_attempt(self) -> None:
        while True:
            try:
                super().finish_attempt()
                return
            except Killed:
                self.restart_coordinator()

    def run_attempt(self, attempt: object) -> None:
        try:
            super().run_attempt(attempt)  # type: ignore[arg-type]
        except Killed:
            self.restart_coordinator()
            if self.planned.attempts:
                self.finish_attempt()

    def restart_coordinator(self) -> None:
        """The new process knows its records, its spool and saved states; messages on the way still arrive."""
        stored = {states.state_hash(self.model): self.model} | self.stored
        found = restore_round(self.core, BlameBook(), self.coordinator_wal, lambda digest: stored[digest])
        if found is None or found.start.round != self.round:
            self.planned.attempts.clear()
            return
        self.planned = found
        self._do_coordinator(resume(found.attempts[-1]))

    def _note(self, party: str, effect: Effect) -> None:
        if party == COORDINATOR and isinstance(effect, SaveState):
            self.stored[effect.state_hash] = effect.state


def crash_run(victim: str, at: int) -> tuple[CrashingFederation, dict[str, Words], RoundOutcome]:
    layout = small_layout(SITES)
    model = states.canonical(np.linspace(-1, 1, layout.state_words))
    run = CrashingFederation(
        layout,
        names(SITES),
        model,
        config_hash=CONFIG,
        randomness=CountedRandomness(b"crash"),
        clock=ManualClock(),
    )
    run.transcript = []
    run.victim, run.left = victim, at
    updates = random_updates(layout, run.sites, 1)
    return run, updates, run.run_round(updates)


def effects_of(victim: str) -> int:
    """How many effects an undisturbed round has for a party."""
    run, _, _ = crash_run(victim, 10**6)
    return 10**6 - run.left


def answers(run: RecordedFederation) -> Iterator[tuple[str, type, bytes, bytes]]:
    """Every signed answer of a site, with the question it belongs to."""
    for sender, _, data in run.transcript or ():
        message = sent_message(sender, data)
        if isinstance(message, messages.Agree | messages.Unmask | messages.Shares | messages.UploadHeader):
            yield sender, type(message), message.kx, message.to_bytes()


def check(run: CrashingFederation, updates: dict[str, Words], outcome: RoundOutcome) -> None:
    assert run.kills == 1 or run.left >= 0, "killed once, or the round had fewer effects than that"
    run.check_promises()
    said: dict[tuple[str, type, bytes], set[bytes]] = {}
    for sender, kind, question, answer in answers(run):
        said.setdefault((sender, kind, question), set()).add(answer)
    assert all(len(different) == 1 for different in said.values()), "no step answers twice differently"
    if outcome.total is None:
        return
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)


def and_then(run: CrashingFederation) -> None:
    """Whatever happened, the next round succeeds with every site."""
    run.left = -1
    if run.check is None:
        pytest.fail("the result was never covered")
    updates = random_updates(run.policy.layout, run.sites, 99)
    outcome = run.run_round(updates)
    assert outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    assert len(outcome.survivors) == SITES
    assert {site.machine.core.head.result for site in run.sites.values()} == {run.prev_result}


# Encapsulation draws from the operating system, so a result's hash, and with it who checks how many chunks, differs
# from run to run: the last points may lie behind the end of a round.
MOST_SITE_EFFECTS, MOST_COORDINATOR_EFFECTS = 24, 53


def test_the_points_below_are_all_there_are() -> None:
    assert 20 <= effects_of("site-01") <= MOST_SITE_EFFECTS
    assert 45 <= effects_of(COORDINATOR) <= MOST_COORDINATOR_EFFECTS


@pytest.mark.parametrize("at", range(MOST_SITE_EFFECTS))
def test_a_site_dies_at_any_point(at: int) -> None:
    run, updates, outcome = crash_run("site-01", at)
    check(run, updates, outcome)
    assert outcome.total is not None, "three others are enough, or the next attempt is"
    and_then(run)


@pytest.mark.parametrize("at", range(MOST_COORDINATOR_EFFECTS))
def test_the_coordinator_dies_at_any_point(at: int) -> None:
    run, updates, outcome = crash_run(COORDINATOR, at)
    check(run, updates, outcome)
    assert outcome.total is not None
    and_then(run)


def test_all_sites_die_between_agree_and_release() -> None:
    """Every site has agreed, none has released, all restart: the round still ends with the right sum."""
    run, updates, _ = crash_run("nobody", 0)
    updates = random_updates(run.policy.layout, run.sites, 5)
    run.begin_round(updates)
    attempt = run.planned.next_attempt(list(run.sites))
    run._do_coordinator(attempt.start())
    held: list[tuple[str, str, bytes]] = []
    while run._queue:
        item = next(run._queue[0], None)
        if item is None:
            run._queue.popleft()
            continue
        sender, receiver, data = item
        message = run.arrived(sender, receiver, data)
        if isinstance(message, messages.Quorum):
            held.append(item)
        elif receiver == COORDINATOR:
            run._do_coordinator(run.planned.receive(sender, message))
        else:
            run._do_site(receiver, run.sites[receiver].machine.receive(message))
    assert len(held) >= attempt.context.t
    for name in run.sites:
        run.restart_site(name)
    run.finish_attempt()
    assert attempt.publication is not None
    survivors = attempt.publication.survivors
    assert attempt.publication.total.tolist() == reference_sum(run.policy.layout, updates, survivors)
    run.check_promises()
    assert any(isinstance(record, records.AttemptEnded) for record in run.written["site-00"])


def test_a_round_can_be_lost_but_never_half_open() -> None:
    run, _, _ = crash_run("nobody", 0)
    run.begin_round({})
    with pytest.raises(RoundLost, match="too few"):
        run.planned.next_attempt(["site-00"])
