"""The ledger's rules: book first, never refund, stop at the cap, refuse what is not the ledger we know."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lazaret.errors import OTHER_VERSION, BudgetExhausted, ConfigError, LedgerError, PolicyViolation
from security.clock import ManualClock
from security.dp import ledger as ledger_entries
from security.dp.accountant import Mechanism, counts_event, dp_sgd_event, prototypes_event, rate_at_least
from security.dp.filter import RunTerms
from security.dp.ledger import MOST_UNCOMMITTED, Ledger, LedgerAnchor, Terms, Unit
from security.dp.ledger_store import FileStore, MemoryStore
from security.dp.noise import NoiseSource
from security.rng import CountedRandomness

TERMS = Terms(population="skin-2024", unit=Unit.PATIENT, delta=1e-5, cap=3.0, order=8.0)
ROUND = (dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.02), steps=50),)


def paths(directory: Path) -> tuple[Path, Path]:
    return directory / "data" / "ledger.jsonl", directory / "state" / "ledger.anchor"


def make(directory: Path, rounds: int) -> None:
    with FileStore(*paths(directory)) as store:
        ledger = Ledger.create(store, TERMS, version="v1", clock=ManualClock())
        book(ledger, rounds)


def book(ledger: Ledger, rounds: int) -> None:
    for number in range(rounds):
        reservation = ledger.reserve(run="run", round_number=number, events=ROUND, noise=NoiseSource())
        ledger.commit(reservation)


def reopen(directory: Path, **options: object) -> ledger_entries.LedgerState:
    with FileStore(*paths(directory)) as store:
        return Ledger.open(store, population="skin-2024", **options).state  # type: ignore[arg-type]


def in_memory() -> Ledger:
    return Ledger.create(MemoryStore(), TERMS, version="v1", clock=ManualClock())


def test_epsilon_survives_a_restart(tmp_path: Path) -> None:
    make(tmp_path, 5)
    state = reopen(tmp_path)
    fresh = in_memory()
    book(fresh, 5)
    assert state.epsilon == fresh.state.epsilon > 0
    assert state.history == ROUND * 5
    assert all(booking.committed for booking in state.bookings)
    assert state.head.seq == 10


def test_an_uncommitted_reservation_costs_the_same() -> None:
    ledger, other = in_memory(), in_memory()
    ledger.reserve(run="run", round_number=1, events=ROUND, noise=NoiseSource())
    book(other, 1)
    assert ledger.state.epsilon == other.state.epsilon
    assert not ledger.state.bookings[0].committed


def test_rounds_past_the_cap_are_refused_and_write_nothing() -> None:
    store = MemoryStore()
    ledger = Ledger.create(store, TERMS, version="v1")
    with pytest.raises(BudgetExhausted, match="above the cap"):
        book(ledger, 10_000)
    lines = len(store.lines)
    with pytest.raises(BudgetExhausted):
        ledger.reserve(run="run", round_number=10_000, events=ROUND, noise=NoiseSource())
    assert len(store.lines) == lines
    assert ledger.state.epsilon <= TERMS.cap
    assert ledger.spent().pld <= ledger.spent().rdp <= ledger.state.epsilon + 1e-12


def test_an_event_is_claimed_once_and_only_if_it_was_booked() -> None:
    events = (counts_event(5.0), *ROUND)
    reservation = in_memory().reserve(run="run", round_number=1, events=events, noise=NoiseSource())
    assert reservation.claim(Mechanism.DP_SGD) == ROUND[0]
    with pytest.raises(BudgetExhausted):
        reservation.claim(Mechanism.DP_SGD)
    with pytest.raises(BudgetExhausted):
        reservation.claim(Mechanism.PROTOTYPES)


def test_seeded_noise_cannot_be_booked() -> None:
    ledger = in_memory()
    with pytest.raises(PolicyViolation, match="seed"):
        ledger.reserve(run="run", round_number=1, events=ROUND, noise=NoiseSource(CountedRandomness(b"42")))
    assert ledger.state.history == ()


def test_a_new_version_of_the_data_inherits_everything_spent() -> None:
    ledger = in_memory()
    book(ledger, 3)
    before = ledger.state.epsilon
    ledger.new_version("v1")
    ledger.new_version("v2")
    assert ledger.state.epsilon == before
    assert ledger.state.version == "v2"
    assert ledger.state.head.seq == 7


def test_an_open_ledger_belongs_to_one_process_and_one_population(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with FileStore(*paths(tmp_path)) as store:
        Ledger.open(store, population="skin-2024")
        with pytest.raises(LedgerError, match="another process"):
            reopen(tmp_path)
    with FileStore(*paths(tmp_path)) as store, pytest.raises(LedgerError, match="another patient population"):
        Ledger.open(store, population="ct-2024")


def test_a_second_ledger_for_the_same_population_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with pytest.raises(LedgerError, match="already"):
        make(tmp_path, 0)
    paths(tmp_path)[0].unlink()
    with pytest.raises(LedgerError, match="already"):
        make(tmp_path, 0)


def test_creating_may_be_repeated_while_nothing_was_ever_reserved(tmp_path: Path) -> None:
    make(tmp_path, 0)
    paths(tmp_path)[0].unlink()
    make(tmp_path, 1)
    assert reopen(tmp_path).head.seq == 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_part_refuses(tmp_path: Path, which: int) -> None:
    make(tmp_path, 2)
    paths(tmp_path)[which].unlink()
    with pytest.raises(LedgerError, match="missing"):
        reopen(tmp_path)


def cut_last_line(data: bytes) -> bytes:
    return data[: data.rstrip(b"\n").rfind(b"\n") + 1]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="emptied"),
        pytest.param(lambda data: data[:-1], id="newline lost"),
        pytest.param(lambda data: data[:-20], id="last line cut"),
        pytest.param(cut_last_line, id="last line gone"),
        pytest.param(lambda data: cut_last_line(cut_last_line(data)), id="reservation gone"),
        pytest.param(lambda data: data.replace(b'"steps":50', b'"steps":49', 1), id="steps changed"),
        pytest.param(lambda data: data.replace(b'"cap":"3.0"', b'"cap":"9.0"', 1), id="cap raised"),
        pytest.param(lambda data: b"\n".join(data.split(b"\n")[1:]), id="first line gone"),
        pytest.param(lambda data: data + data.split(b"\n")[-2] + b"\n", id="line repeated"),
        pytest.param(lambda data: data.replace(b'"at":', b'"at": ', 1), id="spelling"),
        pytest.param(lambda data: data + b"nonsense\n", id="nonsense added"),
        pytest.param(lambda data: data + b"[]\n", id="no object"),
    ],
)
def test_a_damaged_ledger_refuses(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    make(tmp_path, 3)
    ledger = paths(tmp_path)[0]
    ledger.write_bytes(damage(ledger.read_bytes()))
    with pytest.raises(LedgerError):
        reopen(tmp_path)


def rewritten(lines: list[bytes], index: int, change: Callable[[dict[str, object]], None]) -> list[bytes]:
    """The lines with one entry changed and the whole chain made to fit again."""
    entries = [json.loads(line)["entry"] for line in lines]
    change(entries[index])
    out: list[bytes] = []
    for seq, entry in enumerate(entries):
        out.append(ledger_entries.encode_line(entry, seq, ledger_entries.digest_of(out[-1]) if out else ""))
    return out


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (1, {"after": "0.100000"}),
        (3, {"before": "0.000000"}),
        (1, {"events": []}),
        (1, {"round": "1"}),
        (1, {"note": "x"}),
        (0, {"format": 1}),
        (0, {"delta": "0.00001"}),
        (0, {"population": ""}),
        (0, {"kind": "version"}),
        (2, {"reserve": 7}),
        (2, {"kind": "refund"}),
        (4, {"reserve": 1}),
    ],
)
def test_entries_that_contradict_themselves_refuse_even_in_a_whole_chain(index: int, change: dict[str, object]) -> None:
    store = MemoryStore()
    book(Ledger.create(store, TERMS, version="v1", clock=ManualClock()), 2)
    assert ledger_entries.read(rewritten(store.lines, index, lambda entry: None)).head.seq == 4
    with pytest.raises(LedgerError):
        ledger_entries.read(rewritten(store.lines, index, lambda entry: entry.update(change)))


def test_a_ledger_of_another_format_is_refused_in_one_line() -> None:
    """Whatever fields it has: a newer or older format may have others."""
    store = MemoryStore()
    book(Ledger.create(store, TERMS, version="v1", clock=ManualClock()), 1)
    for change in ({"format": 2}, {"format": 2, "sides": None}, {"format": 4, "more": 1}):
        with pytest.raises(LedgerError, match=r"^ledger of format \d, this version knows 3$") as raised:
            ledger_entries.read(rewritten(store.lines, 0, lambda entry, change=change: entry.update(change)))
        assert raised.value.hint == OTHER_VERSION, "not: restore a copy"


def test_a_rolled_back_copy_is_caught_by_the_anchor_or_by_a_head_seen_elsewhere(tmp_path: Path) -> None:
    make(tmp_path, 1)
    files = paths(tmp_path)
    old = [path.read_bytes() for path in files]
    with FileStore(*files) as store:
        ledger = Ledger.open(store, population="skin-2024")
        book(ledger, 1)
        newest = ledger.state.head
    # Only the data directory was restored: the anchor knows better.
    files[0].write_bytes(old[0])
    with pytest.raises(LedgerError, match="seen before"):
        reopen(tmp_path)
    # The whole machine was restored: only a head kept elsewhere can know.
    files[1].write_bytes(old[1])
    with pytest.raises(LedgerError, match="seen before"):
        reopen(tmp_path, witnessed=[newest])
    assert reopen(tmp_path).head.seq == 2


def test_rolled_back_copy_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the comparison off, the same budget is spent twice."""
    make(tmp_path, 1)
    files = paths(tmp_path)
    old = files[0].read_bytes()
    with FileStore(*files) as store:
        book(Ledger.open(store, population="skin-2024"), 5)
        spent = Ledger.open(store, population="skin-2024").state.epsilon
    files[0].write_bytes(old)
    monkeypatch.setattr(ledger_entries.LedgerState, "contains", lambda self, head: True)
    assert reopen(tmp_path).epsilon < spent


def test_a_crash_inside_a_write_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    make(tmp_path, 2)
    ledger, _ = paths(tmp_path)
    whole = ledger.read_bytes()
    # Half a line behind the anchored end: its reservation never returned.
    ledger.write_bytes(whole + b'{"entry":{"after":"1.0')
    assert reopen(tmp_path).head.seq == 4
    assert ledger.read_bytes() == whole


def test_a_crash_between_line_and_anchor_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1)
    with FileStore(*paths(tmp_path)) as store:
        ledger = Ledger.open(store, population="skin-2024")
        before = ledger.state.epsilon
        monkeypatch.setattr(store, "_write_anchor", lambda head: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            book(ledger, 1)
        with pytest.raises(LedgerError, match="earlier write failed"):
            book(ledger, 1)
    state = reopen(tmp_path)
    assert state.epsilon > before
    assert not state.bookings[-1].committed


KILLED = """
import os, signal, sys
from pathlib import Path
from security.dp.ledger import Ledger
from security.dp.ledger_store import FileStore
from security.dp.noise import NoiseSource
from security.dp.accountant import dp_sgd_event, rate_at_least
directory = Path(sys.argv[1])
ledger = Ledger.open(FileStore(directory / "data" / "ledger.jsonl", directory / "state" / "ledger.anchor"),
                     population="skin-2024")
event = dp_sgd_event(multiplier=2.0, clip=1.0, rate=rate_at_least(0.02), steps=50)
ledger.reserve(run="run", round_number=9, events=[event], noise=NoiseSource())
os.kill(os.getpid(), signal.SIGKILL)
(directory / "trained").touch()
"""


def test_kill_between_reserve_and_train_leaves_the_charge_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, 1)
    before = reopen(tmp_path)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "trained").exists()
    after = reopen(tmp_path)
    assert after.history == before.history + ROUND
    assert after.epsilon > before.epsilon
    assert [booking.committed for booking in after.bookings] == [True, False]


def test_terms_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(ConfigError):
        Ledger.create(
            MemoryStore(), Terms(population="p", unit=Unit.IMAGE, delta=1e-5, cap=0.01, order=2.0), version="v1"
        )


def begun(epsilon: float = 2.0, rounds: int = 6) -> RunTerms:
    return RunTerms.of("run", ROUND * rounds, epsilon=epsilon, delta=TERMS.delta)


def test_a_run_is_begun_once_and_keeps_its_terms() -> None:
    store = MemoryStore()
    ledger = Ledger.create(store, TERMS, version="v1")
    ledger.begin_run(begun())
    ledger.begin_run(begun(epsilon=2.9, rounds=60))
    assert ledger.state.run_terms("run") == begun() == ledger_entries.read(store.lines).run_terms("run")
    with pytest.raises(BudgetExhausted, match="run run"):
        book(ledger, 10_000)
    inside = begun().filter(TERMS.delta).epsilon(ledger.state.of_run("run"))
    assert 0 < inside <= 2.0 and ledger.state.epsilon < TERMS.cap
    # Another run has its own limit, and the ledger's cap is for all of them.
    for number in range(2):
        ledger.commit(ledger.reserve(run="other", round_number=number, events=ROUND, noise=NoiseSource()))


def test_a_plan_that_is_fixed_after_the_first_booking_is_none() -> None:
    store = MemoryStore()
    ledger = Ledger.create(store, TERMS, version="v1")
    book(ledger, 1)
    with pytest.raises(ValueError, match="begun once"):
        ledger.begin_run(begun())


def test_a_site_that_never_finishes_a_round_stops_until_an_operator_resumes_it() -> None:
    store = MemoryStore()
    ledger = Ledger.create(store, TERMS, version="v1")
    book(ledger, 2)
    for number in range(MOST_UNCOMMITTED):
        ledger.reserve(run="run", round_number=3 + number, events=ROUND, noise=NoiseSource())
    lines, spent = len(store.lines), ledger.state.epsilon
    with pytest.raises(BudgetExhausted, match="training did not finish"):
        ledger.reserve(run="run", round_number=9, events=ROUND, noise=NoiseSource())
    assert len(store.lines) == lines and ledger_entries.read(store.lines).uncommitted("run") == MOST_UNCOMMITTED
    ledger.resume("run")
    assert ledger.state.epsilon == spent, "nothing is refunded"
    book(ledger, 1)
    assert ledger_entries.read(store.lines).uncommitted("run") == 0


def test_small_things(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="in the same folder"):
        FileStore(tmp_path / "a", tmp_path / "b")
    store = MemoryStore()
    with pytest.raises(LedgerError, match="no ledger"):
        store.load()
    Ledger.create(store, TERMS, version="v1")
    assert Ledger.open(store, population="skin-2024").state.head.seq == 0
    with pytest.raises(LedgerError, match="already"):
        Ledger.create(store, TERMS, version="v1")
    with FileStore(*paths(tmp_path)) as closed, pytest.raises(LedgerError, match="not open"):
        closed.append(b"", LedgerAnchor(seq=0, digest=""))
    make(tmp_path, 0)
    assert all(os.stat(path).st_mode & 0o777 == 0o600 for path in paths(tmp_path))
    paths(tmp_path)[1].write_text("{}")
    with pytest.raises(LedgerError, match="anchor cannot be read"):
        reopen(tmp_path)


def test_a_disk_that_takes_half_a_line_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1)
    whole = os.write
    with FileStore(*paths(tmp_path)) as store:
        ledger = Ledger.open(store, population="skin-2024")
        monkeypatch.setattr(os, "write", lambda file, data: whole(file, data[: len(data) // 2]))
        with pytest.raises(LedgerError, match="in full"):
            book(ledger, 1)
        monkeypatch.undo()
        with pytest.raises(LedgerError, match="earlier write failed"):
            book(ledger, 1)
    assert reopen(tmp_path).head.seq == 2


def test_prototype_releases_count_one_by_one() -> None:
    ledger = in_memory()
    reservation = ledger.reserve(run="run", round_number=1, events=[prototypes_event(10.0)] * 2, noise=NoiseSource())
    reservation.claim(Mechanism.PROTOTYPES)
    reservation.claim(Mechanism.PROTOTYPES)
    with pytest.raises(BudgetExhausted):
        reservation.claim(Mechanism.PROTOTYPES)
