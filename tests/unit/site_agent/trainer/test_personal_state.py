"""What a trainer keeps from round to round."""

from __future__ import annotations

import stat
from pathlib import Path

from site_agent.trainer.isolation import made
from site_agent.trainer.personal_state import KEPT_MEMORIES, PersonalState


def test_the_newest_memories_are_kept_for_this_user_only(tmp_path: Path) -> None:
    state = PersonalState(tmp_path)
    made(state.memory, state.models)
    assert state.memory_before(9) is None
    for number in range(1, 6):
        state.remember(number, str(number).encode())
    assert state.memory_before(6) == (5, b"5") and state.memory_before(5) == (4, b"4")
    assert len([*state.memory.iterdir()]) == KEPT_MEMORIES
    assert state.memory_before(3) is None  # older than any round that can still be open
    state.remember(5, b"again")
    assert state.memory_before(6) == (5, b"again")
    state.keep_model("best", b"model")
    for path in (*state.memory.iterdir(), *state.models.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_a_kill_left_behind_is_removed(tmp_path: Path) -> None:
    state = PersonalState(tmp_path)
    made(state.memory, state.models)
    state.remember(1, b"1")
    (state.memory / ".2.safetensors.new").write_bytes(b"half")
    state.tidy()
    assert [path.name for path in state.memory.iterdir()] == ["1.safetensors"]
