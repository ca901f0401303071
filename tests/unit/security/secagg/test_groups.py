"""Groups of sites: the sums of each, the median of them, and who may be in a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import ConfigError, PolicyViolation, RemoteProtocolError, VerificationFailed
from protos.loopback import Drop
from security.secagg import fixed_point, groups, messages
from security.secagg import state as states
from security.secagg.context import SumVerdict
from security.secagg.coordinator.publication import read_sum, spool_sum
from security.secagg.coordinator.spool import FileSpool, MemorySpool
from security.secagg.effects import KeepEvidence
from security.secagg.groups import Combine, Groups
from security.secagg.layout import Block, Layout
from security.secagg.site import differences
from security.secagg.site.results import WrongSumEvidence
from security.secagg.state import CEILINGS_ALONE
from tests.support.evil import evil
from tests.support.secagg_world import (
    RecordedFederation,
    federation,
    names,
    random_updates,
    reference_sum,
    small_layout,
)


def split(sites: int, count: int = 3, *, c: int = 1, combine: Combine = "median") -> Groups:
    return Groups(tuple(tuple(names(sites)[number::count]) for number in range(count)), c=c, m=3, combine=combine)


def grouped(sites: int = 9, **options: object) -> RecordedFederation:
    return federation(sites, c=1, groups=split(sites), **options)  # type: ignore[arg-type]


def test_each_groups_sum_is_exact_and_all_sites_have_the_same_model() -> None:
    """Twelve sites in three groups, of which one has a dropout; then a site that restarts and one that was away."""
    run = grouped(12, layout=small_layout(12, words=70_000))
    layout = run.policy.layout
    for number, gone in ((1, "site-04"), (2, None), (3, None)):
        updates = random_updates(layout, run.sites, number)
        outcome = run.run_round(updates, drops={gone: Drop(messages.UploadHeader)} if gone else None)
        assert outcome.verdict is SumVerdict.GOOD and outcome.total is not None
        assert set(outcome.survivors) == set(run.sites) - {gone}
        sums = outcome.total.reshape(3, layout.words)
        for found, members in zip(sums, run.policy.parts(outcome.survivors), strict=True):
            assert found.tolist() == reference_sum(layout, updates, members)
        assert run.check is not None, "every chunk of every sum was added up again"
        assert {site.machine.core.head.result for site in run.sites.values()} == {run.prev_result}
        assert {site.machine.intake.model.tobytes() for site in run.sites.values()} == {run.model.tobytes()}
        run.restart_site("site-01")
    run.check_promises()


def test_an_honest_median_is_near_the_mean() -> None:
    run, layout = grouped(), small_layout(9)
    updates = {
        name: fixed_point.encode(layout, np.full(layout.state_words, 0.1 + 0.001 * at, np.float32), weight=5).words
        for at, name in enumerate(run.sites)
    }
    before = run.model
    run.run_round(updates)
    moved = run.model - before
    assert np.abs(moved - 0.104).max() < 0.0015, "the sum of the middle group, 0.103 to 0.105"


def layout_and_sums(values: list[list[float]], weights: list[int]) -> tuple[Layout, np.ndarray]:
    block = Block(name="stem", shape=(len(values[0]),), kind="mean", clip_exponent=0, movement_exponent=20)
    layout = Layout.of([block], roster_size=9, weight_cap=64)
    rows = []
    for row, weight in zip(values, weights, strict=True):
        rows.append(fixed_point.encode(layout, np.array(row, np.float32), weight=weight).words)
    return layout, np.stack(rows)


@pytest.mark.parametrize("combine", ["median", "trimmed-mean"])
def test_one_group_cannot_move_a_coordinate_beyond_the_others(combine: Combine) -> None:
    rng = np.random.default_rng(3)
    honest = rng.normal(0.1, 0.01, (2, 64))
    for lie in (np.full(64, 0.5), np.full(64, -0.5), honest[0] * 3):
        layout, sums = layout_and_sums([*honest, lie], [7, 3, 1])
        out = groups.combine(layout, sums, split(9, combine=combine), survivors=3).view(layout.signed_dtype)
        weight = 11
        step = out[:64] * fixed_point.step_size(layout, layout.runs[0], weight)
        # The longer one of two honest groups may be shortened to the other's length.
        low, high = honest.min(axis=0), honest.max(axis=0)
        assert (step > low * 0.9 - 0.002).all() and (step < high + 0.002).all()


def test_more_groups_keep_the_mean_of_the_middle_ones() -> None:
    layout, sums = layout_and_sums([[v] * 4 for v in (0.1, 0.1, 0.1, 0.1, 0.1)], [2] * 5)
    five = Groups(tuple(tuple(names(15)[number::5]) for number in range(5)), c=1, m=3, combine="trimmed-mean")
    out = groups.combine(layout, sums, five, survivors=5).view(layout.signed_dtype)
    assert out[0] * fixed_point.step_size(layout, layout.runs[0], 10) == pytest.approx(0.1, rel=1e-3)


def test_a_void_group_is_left_out_and_the_round_has_a_model() -> None:
    run = grouped()
    updates = random_updates(run.policy.layout, run.sites, 1)
    updates["site-02"][3] = run.policy.layout.half_ring
    assert run.run_round(updates).verdict is SumVerdict.GOOD
    more = random_updates(run.policy.layout, run.sites, 2)
    for name in ("site-01", "site-02"):
        more[name][3] = run.policy.layout.half_ring
    before = run.model
    assert run.run_round(more).verdict is SumVerdict.VOID, "two groups are more than one dishonest site can spoil"
    assert np.array_equal(run.model, before)


@pytest.mark.parametrize(
    ("sites", "count", "c", "reason"),
    [(8, 3, 1, "fewer than 3 sites"), (9, 2, 1, "cannot outvote"), (15, 5, 2, "fewer than 4 sites")],
)
def test_too_few_sites_for_groups(sites: int, count: int, c: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        split(sites, count, c=c)


def test_a_group_with_one_site_fewer_is_refused() -> None:
    twelve = split(12)
    twelve.check_sites(names(12)[:9], "plan")
    with pytest.raises(PolicyViolation, match="fewer than 3 sites"):
        twelve.check_sites(names(12)[:8], "plan")


def test_a_site_is_in_one_group_and_a_stranger_in_none() -> None:
    with pytest.raises(ConfigError, match="two groups"):
        Groups((("a", "b", "c"), ("c", "d", "e"), ("f", "g", "h")), c=1, m=3)
    with pytest.raises(PolicyViolation, match="in no group"):
        split(9).check_sites([*names(9), "zz"], "plan")


def test_numbers_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 32 bits"):
        split(9).check_layout(small_layout(9, ring_bits=64))


def test_differences_of_sums_look_at_groups() -> None:
    """A site hides among its group only: of three with one colluder, one more that comes and goes shows it."""
    policy = grouped().policy
    run = grouped()
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    seen = run.sites["site-00"].machine.core.journal.sums
    assert policy.parts(seen[-1].sites) == [tuple(names(9)[number::3]) for number in range(3)]
    fewer = [type(seen[-1])(round=2, state_hash=bytes(32), sites=tuple(names(9)[:8]))]
    assert differences.exposure(policy, [*seen, *fewer], "site-08") > 0.7
    assert differences.exposure(policy, [*seen, *fewer], "site-00") == 0


def test_a_wrong_sum_of_one_group_is_found_and_proven() -> None:
    run = evil(9, layout=small_layout(9, words=70_000), c=1, groups=split(9))
    honest, told = groups.outcome_of, []

    def changed(layout: Layout, split: Groups, state: object, total: np.ndarray, **options: object) -> object:
        if not told:  # the coordinator, before it publishes; the sites come after
            total[2 * layout.words + 65_536 + 5] += 1000  # in the third group's sum, in its second frame
        told.append(total)
        return honest(layout, split, state, total, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(groups, "outcome_of", changed)
        run.run_round(run.updates(1))
    assert run.check is None
    found = [e for noted in run.noted.values() for e in noted if isinstance(e, KeepEvidence)]
    assert found
    for effect in found:
        evidence = WrongSumEvidence.parse(effect.proof)
        evidence.verify(run.policy)
        assert evidence.chunk == 2 * run.policy.chunks + 1 and len(evidence.pieces) == 3
        with pytest.raises(VerificationFailed):
            replace(evidence, chunk=run.policy.chunks + 1).verify(run.policy)


def test_a_sum_that_is_not_the_announced_one_is_forgotten() -> None:
    run = grouped()
    run.hook = lambda s, r, m: [] if r == "site-00" and isinstance(m, messages.SumFrame) else [m]
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    publication = run.planned.attempts[0].publication
    assert publication is not None
    site = run.sites["site-00"].machine
    *frames, last = publication.sum_to("site-00").frames()
    for frame in frames:
        site.receive(frame)
    with pytest.raises(VerificationFailed, match="announced root"):
        site.receive(replace(last, data=bytes(len(last.data))))
    with pytest.raises(RemoteProtocolError, match="without a header"):
        site.receive(last)
    assert site.core.head.round == 0


def test_sums_of_groups_are_read_back_from_files(tmp_path: Path) -> None:
    """The last frame of a group's sum is a short one in the middle of the file."""
    layout = small_layout(9, words=70_000)
    rng = np.random.default_rng(3)
    total = rng.integers(0, 1 << layout.ring_bits, 3 * layout.words, dtype=np.uint32).astype(layout.dtype)
    layout.ring.wrap(total)
    root = groups.sum_root(layout, total)
    for spool in (FileSpool(tmp_path), MemorySpool()):
        spool_sum(spool, root, total, layout)
        assert np.array_equal(read_sum(spool, root, layout, 3), total)


def test_without_groups_nothing_changes() -> None:
    layout = small_layout(4)
    total = random_updates(layout, ["a"], 1)["a"]
    state = states.canonical(np.zeros(layout.state_words))
    plain = states.next_state(layout, state, total, survivors=1)
    same = groups.outcome_of(layout, None, state, total, survivors=["a"], rule=CEILINGS_ALONE, movements=b"")
    assert same.state_hash == plain.state_hash and groups.everything(layout, total) is total
