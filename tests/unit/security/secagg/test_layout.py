"""Layouts: what may lie in the vector."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import rfc8785

from lazaret.errors import ConfigError
from security.secagg import layout as layouts
from security.secagg.clips import Clips
from security.secagg.layout import LEAST_STEPS, Block, Layout, most_weight

CLIPS = Clips(learning_rate=0.01, steps=10)


def tensors() -> list[Block]:
    return [
        CLIPS.weights("conv.weight", (4, 3)),
        CLIPS.weights("conv.bias", (4,)),
        CLIPS.running_mean("norm.mean", [1.0, 1e-4, 9.0]),
        CLIPS.running_variance("norm.var", [1.0, 1e-4, 9.0]),
    ]


def make(**changes: Any) -> Layout:
    return Layout.of(tensors(), **({"roster_size": 10, "weight_cap": 2048} | changes))


def test_sizes_and_places() -> None:
    layout = make(loss_exponent=10, hits_maximum=4096)
    assert layout.state_words == 22
    assert layout.used_words == 25
    assert layout.words == 28 and layout.byte_length == 84 and layout.memory_bytes == 112
    assert make(ring_bits=32).byte_length == 24 * 4
    assert layout.slot("conv.bias") == slice(12, 16)
    assert layout.slot("weight") == slice(22, 23)
    assert [layout.block_at(word).name for word in (0, 11, 12, 21, 22, 24)] == [
        "conv.weight",
        "conv.weight",
        "conv.bias",
        "norm.var",
        "weight",
        "hits",
    ]
    assert make(ring_bits=64).byte_length == 24 * 8


@pytest.mark.parametrize("roster", [2, 3, 10, 100, 255])
def test_the_quantum_leaves_room_for_the_whole_roster(roster: int) -> None:
    for bits in (24, 32):
        layout = make(roster_size=roster, ring_bits=bits)
        assert roster * layout.quantum <= 2 ** (bits - 1) - 1 < roster * (layout.quantum + 1)
    wide = make(roster_size=roster, ring_bits=64)
    assert roster * wide.quantum < 2**63


def test_sixteen_bits_are_for_sites_that_count_nearly_alike() -> None:
    """A site of weight 1 keeps a few steps up to its clip; 1 beside 2,801 would have none."""
    block = Block(name="w", shape=(4,), kind="mean", clip_exponent=0, movement_exponent=4)
    for sites in (2, 3, 10, 60):
        most = most_weight(sites)
        told = Layout.of([block], roster_size=sites, weight_cap=most, ring_bits=16)
        assert told.quantum // most >= LEAST_STEPS and sites * told.quantum <= 2**15 - 1
        with pytest.raises(ConfigError, match=f"weight_cap = {most + 1} is too large for {sites} sites"):
            Layout.of([block], roster_size=sites, weight_cap=most + 1, ring_bits=16)
    for sites, cap in ((10, 2801), (200, 8), (255, 8)):
        Layout.of([block], roster_size=sites, weight_cap=cap)
        with pytest.raises(ConfigError, match="16 bits"):
            Layout.of([block], roster_size=sites, weight_cap=cap, ring_bits=16)


def test_neighbours_with_one_clip_are_scaled_together() -> None:
    runs = make().runs
    assert [run.place for run in runs] == [slice(0, 16), slice(16, 22)]
    assert runs[0].clips.tolist() == 1.0
    assert runs[1].clips.tolist() == [2.0 ** (8 + unit) for block in tensors()[2:] for unit in block.units]


def test_json_carries_a_layout() -> None:
    layout = make(loss_exponent=-2, hits_maximum=9)
    text = rfc8785.dumps(layout.to_dict())
    assert b"." not in text.replace(b"conv.", b"").replace(b"norm.", b"")
    again = Layout.from_dict(json.loads(text))
    assert again == layout
    assert again.layout_hash == layout.layout_hash


def test_every_field_moves_the_hash() -> None:
    hashes = {make().layout_hash}
    changes: list[dict[str, Any]] = [
        {"roster_size": 11},
        {"weight_cap": 2047},
        {"ring_bits": 32},
        {"ring_bits": 64},
        {"loss_exponent": 1},
        {"loss_exponent": 2},
        {"hits_maximum": 5},
    ]
    for change in changes:
        hashes.add(make(**change).layout_hash)
    first: list[dict[str, Any]] = [
        {"name": "w"},
        {"shape": (3, 4)},
        {"shape": (12,)},
        {"clip_exponent": 5},
        {"movement_exponent": 5},
    ]
    for change in first:
        block = replace(tensors()[0], **change)
        hashes.add(Layout.of([block, *tensors()[1:]], roster_size=10, weight_cap=2048).layout_hash)
    assert len(hashes) == 13


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "median"},
        {"name": ""},
        {"shape": (0,)},
        {"shape": (2**24 + 1,)},
        {"clip_exponent": 101},
        {"movement_exponent": -101},
        {"units": (1,)},
        {"nonnegative": True},
        {"maximum": 3},
        {"kind": "statistic", "units": (1, 2)},
        {"kind": "statistic", "units": (101,)},
        {"kind": "count"},
    ],
)
def test_impossible_blocks(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Block(**({"name": "w", "shape": (1,), "kind": "mean"} | change))
    assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [{"ring_bits": 33}, {"roster_size": 1}, {"roster_size": 256}, {"weight_cap": 0}, {"weight_cap": 2**23 // 9}],
)
def test_impossible_layouts(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**change)


def test_the_wide_ring_refuses_weights_that_overflow() -> None:
    make(ring_bits=64, roster_size=100, weight_cap=2**20)
    with pytest.raises(ConfigError):
        make(ring_bits=64, roster_size=100, weight_cap=2**22)


@pytest.mark.parametrize(
    "change",
    [{"clip_exponent": 0.5}, {"shape": [1.0]}, {"colour": 1}, {"units": "zz"}, {"nonnegative": False}, {"shape": 3}],
)
def test_block_descriptions_are_strict(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Block.from_dict(CLIPS.weights("w", (2,)).to_dict() | change)


@pytest.mark.parametrize("change", [{"ring_bits": 32.0}, {"roster_size": "10"}, {"weight_cap": True}, {"more": 1}])
def test_layout_descriptions_are_strict(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Layout.from_dict(make().to_dict() | change)


def ask_for_class_counts() -> Layout:
    told = make().to_dict()
    told["blocks"].append({"name": "class_counts", "shape": [1], "kind": "count", "maximum": 100})
    return Layout.from_dict(told)


def test_class_counts_have_no_slot() -> None:
    with pytest.raises(ConfigError, match="class_counts"):
        ask_for_class_counts()


def test_class_counts_have_no_slot_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "AUXILIARY", {"class_counts": "count"})
    assert ask_for_class_counts().has("class_counts")
