"""Whatever happens to a ledger's bytes, it is refused or it says what it said before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazaret.errors import BudgetExhausted, LedgerError
from security.clock import ManualClock
from security.dp.accountant import counts_event, dp_sgd_event, prototypes_event, rate_at_least
from security.dp.ledger import Ledger, LedgerState, Terms, Unit, read
from security.dp.ledger_store import MemoryStore
from security.dp.noise import NoiseSource

TERMS = Terms(population="p", unit=Unit.PATIENT, delta=1e-5, cap=4.0, order=8.0)
EVENTS = (
    counts_event(5.0),
    prototypes_event(10.0),
    dp_sgd_event(multiplier=1.5, clip=0.7, rate=rate_at_least(0.03), steps=20),
)


def written() -> list[bytes]:
    store = MemoryStore()
    ledger = Ledger.create(store, TERMS, version="v1", clock=ManualClock())
    ledger.commit(ledger.reserve(run="r", round_number=1, events=EVENTS, noise=NoiseSource()))
    ledger.new_version("v2")
    ledger.reserve(run="r", round_number=2, events=EVENTS[2:], noise=NoiseSource())
    return store.lines


LINES = written()
WHOLE = b"\n".join(LINES)


@settings(max_examples=400, deadline=None)
@given(position=st.integers(0, len(WHOLE) - 1), value=st.integers(0, 255))
def test_no_byte_can_be_changed(position: int, value: int) -> None:
    damaged = WHOLE[:position] + bytes([value]) + WHOLE[position + 1 :]
    if damaged != WHOLE:
        # The last line has no successor that would betray it: there the newest head, kept apart, does.
        try:
            state = read(damaged.split(b"\n"))
        except LedgerError:
            return
        assert state.digests[-1] != read(LINES).digests[-1]
        assert state.digests[:-1] == read(LINES).digests[:-1]


@settings(max_examples=100, deadline=None)
@given(data=st.one_of(st.binary(max_size=300), st.text(max_size=200).map(str.encode)))
def test_any_bytes_are_refused_in_good_order(data: bytes) -> None:
    with pytest.raises(LedgerError):
        read([data])
    with pytest.raises(LedgerError):
        read([*LINES, data])


def test_deep_nesting_is_refused_in_good_order() -> None:
    with pytest.raises(LedgerError):
        read([b"[" * 100_000])


EVENT = st.one_of(
    st.builds(counts_event, st.sampled_from([2.0, 5.0, 20.0])),
    st.builds(prototypes_event, st.sampled_from([3.0, 10.0, 30.0]), releases=st.integers(1, 5)),
    st.builds(
        dp_sgd_event,
        multiplier=st.sampled_from([0.8, 1.5, 4.0]),
        clip=st.sampled_from([0.1, 1.0]),
        rate=st.sampled_from([rate_at_least(q) for q in (0.01, 0.1, 1.0)]),
        steps=st.integers(1, 60),
    ),
)


@settings(max_examples=60, deadline=None)
@given(rounds=st.lists(st.tuples(st.lists(EVENT, min_size=1, max_size=3), st.booleans()), max_size=12))
def test_any_history_reads_back_and_never_passes_the_cap(rounds: list[tuple[list[object], bool]]) -> None:
    store = MemoryStore()
    ledger = Ledger.create(store, TERMS, version="v1", clock=ManualClock())
    before: LedgerState = ledger.state
    for number, (events, commit) in enumerate(rounds):
        try:
            reservation = ledger.reserve(run="r", round_number=number, events=events, noise=NoiseSource())  # type: ignore[arg-type]
        except BudgetExhausted:
            assert ledger.state == before
            continue
        assert ledger.state.epsilon > before.epsilon
        if commit:
            ledger.commit(reservation)
        before = ledger.state
    assert ledger.state.epsilon <= TERMS.cap
    assert read(store.lines) == ledger.state
