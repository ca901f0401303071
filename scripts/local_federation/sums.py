"""Published sums against what the sites put in: possible only here, where one person holds the keys of all sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.config import CoordinatorConfig
from coordinator.database import FILE
from coordinator.round_history import ReadOnlyHistory
from lazaret.errors import ConfigError
from security.clock import SystemClock
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.membership import groups_of, movement_rule
from security.rng import SystemRandomness
from security.secagg import groups
from security.secagg import state as states
from security.secagg.context import SumVerdict
from security.secagg.coordinator.publication import read_sum
from security.secagg.coordinator.spool import FileSpool, Gone
from security.secagg.groups import Groups
from security.secagg.layout import Layout
from security.secagg.messages import Result
from site_agent.config import SiteConfig
from site_agent.state_dir import StateDir

Words = np.ndarray[Any, Any]


def kept_folder(state: Path, round_number: int) -> Path:
    """Where the demo's sites put the sealed update of a round aside: a state folder that holds nothing else."""
    return state / "kept-for-the-demo" / str(round_number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One result as the coordinator keeps it; `total` is None when the sum has left its spool, or is of another layout
    than the manifest in force has. With groups it is one group's sum after the other.

    :ivar stands: whether the model follows: not if the sites have voted against it.
    """

    round: int
    survivors: tuple[str, ...]
    total: Words | None
    before: bytes
    after: bytes
    good: bool
    checked: bool
    stands: bool
    movements: bytes


def manifest_at(identity: Path) -> Manifest:
    found = Identity(folder=identity).manifest(now_ms=SystemClock().now_ms())
    if found is None:
        raise ConfigError("there is no manifest", where=str(identity))
    return found


def read_published(coordinator: Path) -> list[Published]:
    """Every result in the state folder of a coordinator."""
    config, base = CoordinatorConfig.read(coordinator / "coordinator.toml")
    numbers = manifest_at(base / config.identity).aggregation
    layout, split = numbers.layout, groups_of(numbers)
    state = base / config.state
    found = []
    with ReadOnlyHistory(state / FILE) as history:
        for link in history.links():
            result = history.result(link.result_hash)
            checked = history.certificate(link.result_hash) is not None
            same = result.context.layout_hash == layout.layout_hash
            total = _total(state / "spool", link.sum_root, layout, split) if same else None
            stands = link.state_hash == result.state_hash
            found.append(_published(result, total, checked=checked, stands=stands))
    return found


def _total(spool: Path, root: bytes, layout: Layout, split: Groups | None) -> Words | None:
    try:
        total = read_sum(FileSpool(spool), root, layout, 1 if split is None else len(split.members))
    except Gone:
        return None
    if groups.sum_root(layout, total) != root:
        raise ConfigError("a sum in the spool does not have the root that was signed", where=str(spool))
    return total


def _published(result: Result, total: Words | None, *, checked: bool, stands: bool) -> Published:
    return Published(
        round=result.context.round,
        survivors=tuple(line.site for line in result.uploads),
        total=total,
        before=result.context.state_hash,
        after=result.state_hash,
        good=result.verdict == SumVerdict.GOOD,
        checked=checked,
        stands=stands,
        movements=result.movements,
    )


def open_kept(site: Path, round_number: int, layout: Layout) -> Words:
    """The words that a site masked in a round, from the copy that the demo's agent put aside."""
    config = SiteConfig.read(site / "site.toml")
    identity = Identity(folder=config.identity)
    folder = kept_folder(config.state, round_number)
    state_dir = StateDir(folder, site=site.name, sealing_key=identity.sealing_key(), randomness=SystemRandomness())
    update = state_dir.unseal(layout)
    if update is None:
        raise ConfigError("no update was saved", where=str(folder))
    return update.words


def is_exact(
    result: Published, words: Mapping[str, Words], layout: Layout, *, split: Groups | None = None
) -> bool:
    """Whether the published sum is the sum of these words over its survivors, and nothing else.

    :param split: the groups of the run; each has a sum of its own.
    """
    expected = sum_of(result.survivors, words, layout, split=split)
    return result.total is not None and bool(np.array_equal(result.total, expected))


def sum_of(
    survivors: tuple[str, ...], words: Mapping[str, Words], layout: Layout, *, split: Groups | None = None
) -> Words:
    """The sum of these words over the survivors; with groups one group's sum after the other."""
    parts = [survivors] if split is None else split.parts(survivors)
    expected = np.zeros((len(parts), layout.words), dtype=layout.dtype)
    for total, sites in zip(expected, parts, strict=True):
        for site in sites:
            total += words[site]
        layout.ring.wrap(total)
    return expected.reshape(-1)


def follows(result: Published, state: states.State, manifest: Manifest, movements: bytes) -> states.State:
    """The model after a result, recomputed as every site does.

    :param movements: those of the result before, nothing before the first one.
    :raises ConfigError: if it is not the one that the result names.
    """
    if result.total is None or states.state_hash(state) != result.before:
        raise ConfigError(f"the sum of round {result.round} cannot be applied", where="sums")
    outcome = groups.outcome_of(
        manifest.aggregation.layout,
        groups_of(manifest.aggregation),
        state,
        result.total,
        survivors=result.survivors,
        rule=movement_rule(manifest.aggregation),
        movements=movements,
    )
    if (outcome.state_hash, outcome.movements) != (result.after, result.movements):
        raise ConfigError(f"round {result.round} names another model than its sum gives", where="sums")
    return outcome.state
