"""Who is there, and in which order a step promises, writes and says things."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from coordinator.attendance import ASK_AGAIN_MS, Attendance, held_back
from coordinator.effects import CloseRound, Effects, OpenRound, StoreBlame
from coordinator.phases import RunPhase
from security.secagg import messages, records
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.effects import Blamed, Certified, Persist, Send
from security.secagg.messages import UploadHeader
from security.secagg.relay import Ping
from tests.support.engine_world import EngineWorld

GRACE = 1000


def attendance(*, online: str, ready: str = "", declined: str = "") -> Attendance:
    made = Attendance()
    made.online, made.ready, made.declined = set(online), set(ready), dict.fromkeys(declined, 10**9)
    return made


def test_nobody_is_waited_for_who_has_answered() -> None:
    assert attendance(online="abc", ready="ab", declined="c").complete("abc", 0, grace_ms=GRACE)


def test_who_trains_is_waited_for_and_who_is_away_only_for_a_while() -> None:
    sites = attendance(online="abc", ready="ab")
    assert not sites.complete("abcd", 50, grace_ms=GRACE), "c is connected and has not answered"
    sites.ready.add("c")
    assert not sites.complete("abcd", 60, grace_ms=GRACE), "d may come back"
    assert not sites.complete("abcd", 59 + GRACE, grace_ms=GRACE)
    assert sites.complete("abcd", 60 + GRACE, grace_ms=GRACE)
    sites.online.add("d")
    assert not sites.complete("abcd", 61 + GRACE, grace_ms=GRACE), "it is back, and trains"
    sites.gone("d")
    assert not sites.complete("abcd", 62 + GRACE, grace_ms=GRACE), "the time for it begins anew"


def test_only_answers_to_the_newest_ping_count() -> None:
    sites = attendance(online="abc", ready="abc")
    assert sites.next_ping() == ["a", "b", "c"] and sites.ping == 1
    sites.answered.update("abc")
    assert sites.all_answered and sites.present == set("abc")
    sites.gone("c")
    assert sites.next_ping() == ["a", "b"] and sites.ping == 2
    assert not sites.all_answered and sites.present == set()


def test_who_came_back_during_an_aggregation_has_not_answered() -> None:
    sites = attendance(online="abd", ready="a", declined="d")
    assert sites.silent == {"b"} and sites.willing == {"a", "b"}


def test_a_new_round_asks_everybody_anew_but_those_who_said_until_when_they_decline() -> None:
    sites = attendance(online="abc", ready="a")
    sites.decline("b", 0, 0)
    sites.decline("c", 3600, 0)
    sites.new_round()
    assert (sites.online, sites.ready, sites.declined) == ({"a", "b", "c"}, set(), {"c": 3_600_000})


def test_a_decline_ends_when_the_site_said_it_would() -> None:
    sites = attendance(online="ab")
    sites.decline("a", 0, 0)
    sites.decline("b", 3600, 0)
    assert sites.ask_again(ASK_AGAIN_MS - 1) == []
    assert sites.ask_again(ASK_AGAIN_MS) == ["a"] and "a" not in sites.declined
    assert sites.ask_again(3_600_000) == ["b"] and not sites.declined


# The order of effects.


class WatchedWorld(EngineWorld):
    """Keeps the effects of every step."""

    def do_coordinator(self, effects: Effects) -> None:
        vars(self).setdefault("steps", []).append(effects)
        super().do_coordinator(effects)


def place(step: Effects, kind: type) -> int:
    return next(number for number, effect in enumerate(step) if isinstance(effect, kind))


def sends(step: Effects, message: type) -> list[int]:
    return [n for n, effect in enumerate(step) if isinstance(effect, Send) and isinstance(effect.message, message)]


def test_what_is_held_against_sites_is_stored_before_the_next_attempt_is_prepared(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path, sites=5, rounds=1)
    world.silent = {("site4", messages.Shares)}
    world.run(until=1)
    blamed = [step for step in world.steps if any(isinstance(effect, Blamed) for effect in step)]
    assert blamed
    for step in blamed:
        assert place(step, Blamed) < place(step, StoreBlame) < min(sends(step, Ping))
    world.kill_coordinator()


def test_records_stand_before_the_messages_that_rest_on_them(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path, rounds=2)
    world.run(until=2)
    shown = {
        messages.Plan: records.Planned,
        messages.Adverts: records.AdvertsShown,
        messages.Deliver: records.DealShown,
        messages.Survivors: records.SurvivorsShown,
        messages.Quorum: records.QuorumShown,
        messages.Result: records.ResultShown,
    }
    written: Counter[type] = Counter()
    said: dict[type, set[object]] = {message: set() for message in shown}
    for effect in (effect for step in world.steps for effect in step):
        if isinstance(effect, Persist):
            dealt = isinstance(effect.record, records.DealShown)
            # One for each site; the attempt has them all with the last.
            written[type(effect.record)] += not dealt or effect.record.shares.site == max(world.names)
        elif isinstance(effect, Send) and type(effect.message) in shown:
            kind, message = type(effect.message), effect.message
            # One of each in an attempt, whoever it is sent to, and however often.
            said[kind].add(getattr(message, "kx", None) or getattr(message, "ctx", None) or message.context.ctx())
            assert len(said[kind]) <= written[shown[kind]], kind
    assert all(said.values())
    for step in world.steps:
        if sends(step, messages.TrainOrder) and any(isinstance(effect, OpenRound) for effect in step):
            assert place(step, OpenRound) < min(sends(step, messages.TrainOrder))
        if sends(step, messages.ResultCertificate) and any(isinstance(effect, Certified) for effect in step):
            assert place(step, Certified) < min(sends(step, messages.ResultCertificate))
    closing = [step for step in world.steps if any(isinstance(effect, CloseRound) for effect in step)]
    # One round ends and the next begins with nothing in between, so that both are one transaction.
    assert place(closing[0], OpenRound) == place(closing[0], CloseRound) + 1
    world.kill_coordinator()


def test_records_are_filed_under_the_round_of_their_attempt(tmp_path: Path) -> None:
    """The acknowledgements of a sum come while the next round trains."""
    world = WatchedWorld(tmp_path, rounds=2)
    world.run(until=2)
    filed = [effect for step in world.steps for effect in step if isinstance(effect, Persist)]
    assert {effect.round for effect in filed} == {1, 2}
    results = {effect.round: effect.record.result for effect in filed if isinstance(effect.record, records.ResultShown)}
    assert all(result.context.round == number for number, result in results.items()) and len(results) == 2
    acks = [effect.round for effect in filed if isinstance(effect.record, records.AckSeen)]
    assert set(acks) == {1, 2} and acks == sorted(acks)
    world.kill_coordinator()


ALL = set("abcdefgh")


@pytest.mark.parametrize(
    ("sums", "away", "held"),
    [
        ([], set(), set()),
        ([ALL], set(), set()),
        ([ALL - {"a"}, ALL], set(), set()),
        ([ALL - {"a", "b"}, ALL], {"b"}, {"a", "b"}),
        ([ALL - {"a", "b"}, ALL], set(), set()),
        ([ALL - {"a"}, ALL - {"a", "b"}, ALL], {"b"}, set()),
        ([ALL - {"a", "b"}, ALL - {"a", "b"}, ALL], {"b"}, {"a", "b"}),
        ([ALL - {"a", "b"}] * 3 + [ALL], {"b"}, set()),
        ([ALL - set("abcd"), ALL], {"d"}, set()),
        ([ALL - set("abcd"), ALL], {"c", "d"}, set("abcd")),
    ],
    ids=[
        "no sum yet",
        "nobody left",
        "one left alone",
        "one of two is back",
        "both are back",
        "who is away was back before",
        "two sums without them",
        "three sums without them",
        "enough for c = 1",
        "too few for c = 1",
    ],
)
def test_who_left_waits_for_others_who_left(sums: list[set[str]], away: set[str], held: set[str]) -> None:
    assert held_back(sums, ALL, ALL - away, c=1) == held


def test_nobody_waits_for_a_site_that_may_not_come_back() -> None:
    assert held_back([ALL - {"a", "b"}, ALL], ALL - {"b"}, ALL - {"b"}, c=1) == set()


def test_a_batch_that_is_complete_in_mid_training_comes_back_at_once(tmp_path: Path) -> None:
    world = EngineWorld(tmp_path, sites=8, rounds=4)
    world.run(until=1)
    for name in ("site6", "site7"):
        world.disconnect(name)
    world.run(until=2)
    world.silent = {("site0", messages.Ready)}
    world.connect("site6")
    while world.step():
        pass
    assert world.engine.phase is RunPhase.TRAINING and "site6" not in world.engine.sites.ready
    world.connect("site7")
    while world.step():
        pass
    assert {"site6", "site7"} <= world.engine.sites.ready


def test_a_round_that_needs_them_does_not_wait_for_a_batch(tmp_path: Path) -> None:
    world = EngineWorld(tmp_path, sites=8, rounds=4)
    world.run(until=1)
    for name in ("site6", "site7"):
        world.disconnect(name)
    world.run(until=2)
    for name in world.names[world.engine.candidates.least - 1 : 6]:
        world.disconnect(name)
    world.connect("site6")
    world.run(until=3)
    assert set(world.engine.chain.cohorts(most=1)[0]) == {*world.names[: world.engine.candidates.least - 1], "site6"}


def test_boxes_leave_memory_when_the_last_site_announces_its_upload(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path, rounds=2)
    seen: list[tuple[int, bool]] = []
    take = CoordinatorAttempt._header

    def watched(attempt: CoordinatorAttempt, header: UploadHeader) -> Effects:
        found = take(attempt, header)
        announced = sum(attempt.uploads.header(site) is not None for site in attempt.context.sites)
        lines = [line for shares in attempt.dealing.shares.values() for line in shares.shares]
        seen.append((announced, any(line.box for line in lines)))
        return found

    with patch.object(CoordinatorAttempt, "_header", watched):
        world.run(until=2)
    everybody = len(world.names)
    assert (everybody - 1, True) in seen
    assert {boxes for announced, boxes in seen if announced == everybody} == {False}


def test_boxes_are_on_disk_alone_once_all_have_uploaded(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path, rounds=2)
    world.run(until=2)
    assert world.engine.previous is not None
    attempt = world.engine.previous.attempts[-1]
    dealing, first = attempt.dealing, attempt.context.sites[0]
    assert not any(line.box or line.pair for shares in dealing.shares.values() for line in shares.shares)
    written = world.storage.history.deals(attempt.context.round, dealing.kx)
    assert [shares.site for shares in written] == list(attempt.context.sites)
    assert not world.storage.history.deals(attempt.context.round, bytes(32))
    assert dealing.whole(first) == written[0] and all(line.box for line in written[0].shares[1:])
    world.kill_coordinator()
