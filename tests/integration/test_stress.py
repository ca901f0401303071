"""Short forms of the storms: fuzzing, bad links and sudden deaths, many sites, many rounds."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks import chaos, crowd, fuzz, soak
from benchmarks.stress import bad_links
from benchmarks.stress.corruption import DAMAGES, Corruptor
from benchmarks.stress.verdict import Verdict
from lazaret.errors import CodecError
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from security.secagg.messages import Ready
from security.secagg.relay import Pong, SignedHead

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long  # what it meets depends on the machine's timing
def test_two_thousand_false_messages_change_nothing(tmp_path: Path) -> None:
    found = fuzz.run(2000, seed=1, seconds=400, folder=tmp_path).report
    assert found["ok"] and found["complete"], found
    # Both ends were spoken to in every phase of a round, with messages that are false and with bytes that are none.
    for end in (found["to_coordinator"], found["to_site"]):
        assert {"TrainOrder", "Plan", "Deliver", "ResultCertificate"} <= end["by_phase"].keys()
        assert end["by_kind"].keys() & set(DAMAGES)
    http2 = found["to_coordinator"]["http2"]
    # Without a certificate a few frames may leave before the refusal arrives: TLS 1.3 lets a client write first.
    assert http2["listed"]["rapid_reset"] > 10 * http2["nobody"]["endless_headers"], http2


def test_false_messages_follow_from_the_seed() -> None:
    messages = [Ready(site="site0", round=1), Pong(number=3)]

    def made(seed: str) -> list[object]:
        corruptor = Corruptor(seed)
        for message in messages:
            corruptor.saw(message)
        return [corruptor.false() for _ in range(50)]

    assert made("7") == made("7") != made("8")
    assert set(map(type, made("7"))) == {Ready, Pong} and set(made("7")) - set(messages)


def test_damaged_bytes_are_not_taken() -> None:
    """But for a bit in the middle of a digest or a name, which only a signature or a sequence number tells."""
    corruptor, taken = Corruptor("1"), set()
    head = SignedHead(origin="site0.demo/audit", size=1, root=bytes(32), signatures=())
    parcel = Parcel(message=Ready(site="site0", round=1), sequence=5, log_head=head)
    for _ in range(300):
        how, data = corruptor.damaged(parcel, FROM_COORDINATOR)
        try:
            found = FROM_SITE.decode(data)
        except CodecError:
            continue
        taken |= {how} if found.sequence == 5 else set()
    assert taken <= {"flipped"}


@pytest.mark.long  # what it meets depends on the machine's timing
@pytest.mark.skipif(bad_links.why_not() is not None, reason="no links between namespaces here")
def test_a_storm_of_a_few_seconds(tmp_path: Path) -> None:
    found = chaos.run(6, seed=3, sites=4, folder=tmp_path).report
    assert found["ok"], found["faults"]
    assert sum(found["happened"].values()) >= 2 and found["results"] >= 3


def test_a_link_delays_loses_and_is_cut(tmp_path: Path) -> None:
    """Without devices: what becomes of packets."""
    router = bad_links._Router.__new__(bad_links._Router)
    router._rng, router._devices, router._free, router._waiting, router._count = Random(1), [0, 1], [0.0, 0.0], [], 0
    packet = bytes([0x45]) + bytes(15) + bytes([10, 88, 0, 2]) + bytes(980)

    def passed(link: bad_links.Link) -> int:
        router._links, router._waiting, router._free = [bad_links.Link(), link], [], [0.0, 0.0]
        for _ in range(400):
            router._take(0, packet)
        return len(router._waiting)

    assert passed(bad_links.Link()) == 400 and passed(bad_links.Link(cut=True)) == 0
    assert 300 < passed(bad_links.Link(loss=0.1)) < 390
    assert passed(bad_links.Link(megabits=1.0)) < 200, "a queue of a second holds 125 such packets"
    passed(bad_links.Link(delay=0.2, jitter=0.1))
    order = [count for _, count, _, _ in sorted(router._waiting)]
    assert order != sorted(order), "packets overtake each other"


def test_a_few_rounds_leave_what_they_should(tmp_path: Path) -> None:
    found = soak.run(6, seed=4, seconds=300, sites=4, ask=False, folder=tmp_path).report
    assert found["ok"] and found["complete"], found
    assert found["per_round"]["coordinator_log_kb"] > 0 and sum(found["members"].values()) >= 1


def test_a_restart_is_no_leak_and_a_leak_over_restarts_is_one() -> None:
    lives = [1.0] * 5 + [2.0] * 5
    flat, leaking = [100.0] * 5 + [130.0] * 5, [100.0, 102, 104, 106, 108] * 2
    rounds = soak._centred(range(10), lives)
    assert soak._slope(rounds, soak._centred(flat, lives)) == pytest.approx(0.0)
    assert soak._slope(rounds, soak._centred(leaking, lives)) == pytest.approx(2.0)


def test_a_small_crowd(tmp_path: Path) -> None:
    found = crowd.run([6], 20_000, 300, tmp_path).report
    assert found["ok"], found["faults"]
    (row,) = found["crowds"]
    assert row["exact"] and row["site_processor_s"] > 0 and row["uploaded_mb_per_site"] > 0.06


@pytest.mark.long
def test_a_crowd_costs_each_site_no_more_than_in_proportion(tmp_path: Path) -> None:
    found = crowd.run([5, 20], 400_000, 500, tmp_path).report
    assert found["ok"], found["faults"]


def test_a_cost_that_grows_faster_is_a_fault() -> None:
    row: dict[str, object] = {"sites": 10, "exact": True, "vector_mb": 16.0, "coordinator_peak_mb": 60.0}
    row |= dict.fromkeys(crowd.GROWING, 1.0)

    def faults(**larger: object) -> list[str]:
        verdict = Verdict()
        crowd.check([row, row | {"sites": 100} | larger], verdict)
        return verdict.faults

    assert faults(site_processor_s=10.0) == [] and len(faults(site_processor_s=20.0)) == 1
    assert len(faults(coordinator_peak_mb=70.0)) == 1 == len(faults(exact=False))
