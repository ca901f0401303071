"""Attacks that one log alone does not show: the two ends differ, sites are shown different things, clocks lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from security.audit.agreement import Agreements, keys_for
from security.audit.compare import Comparison, cross
from security.audit.verify import verify
from security.log import events as ev
from security.log.note import KeyType, Note, NoteSigner
from security.log.schema import Event
from security.log.store import LogFolder
from security.log.writer import AuditLog
from tests.support.audit_attacks import Lonely, Tampering, copied, unchecked, weighty
from tests.support.audit_logs import Federation
from tests.support.audit_parties import digest
from tests.support.consortium_world import PLAN, World

Change = Callable[[Event], Event | None]


def _play(folder: Path, who: str, kind: type[Event], change: Change, *, rounds: int = 1) -> Federation:
    """A federation in which one party logs something else than what happened, once, through the real library."""
    federation = Federation.make(folder)
    member = federation.members[who]
    append, done = member.log.append, []

    def lying(event: Event, **scope: Any) -> int:
        if isinstance(event, kind) and not done:
            done.append(event)
            changed = change(event)
            return 0 if changed is None else append(changed, **scope)
        return append(event, **scope)

    member.log.append = lying  # type: ignore[method-assign]  # one party's own log, and only here
    federation.play(rounds)
    federation.stop()
    assert done, "the lie was told"
    return federation


def _cross(federation: Federation) -> Comparison:
    return cross(federation.folders, dict.fromkeys(federation.folders, federation.pinned))


def _replaced(**fields: object) -> Change:
    def change(event: Event) -> Event:
        return type(event)(**{**event.body(), **fields})

    return change


CASES: dict[str, tuple[str, type[Event], Change, set[str]]] = {
    "other digest": ("hub", ev.Ingress, _replaced(sha256=digest("other")), {"DigestMismatch"}),
    "other length": ("hub", ev.Ingress, _replaced(bytes=7), {"DigestMismatch"}),
    "other type": ("hub", ev.Ingress, _replaced(message="Hello"), {"DigestMismatch"}),
    "dropped": ("hub", ev.Ingress, lambda event: None, {"EgressUnacknowledged", "ReceiptInvalid"}),
    "never sent": ("graz", ev.Egress, lambda event: None, {"IngressUnexplained", "ReceiptInvalid"}),
    "receipt for nothing": ("graz", ev.ReceiptReceived, _replaced(msg_id="cd" * 16), {"ReceiptInvalid"}),
    "receipt for another place": ("graz", ev.ReceiptReceived, _replaced(ingress=3), {"ReceiptInvalid"}),
    "receipt under another history": ("graz", ev.ReceiptReceived, _replaced(head_root=digest("x")), {"ReceiptInvalid"}),
    "receipt under an early head": ("graz", ev.ReceiptReceived, _replaced(head_size=2), {"ReceiptInvalid"}),
    "receipt with another proof": ("graz", ev.ReceiptReceived, _replaced(proof=None), {"ReceiptInvalid"}),
    "other id": (
        "hub",
        ev.Ingress,
        _replaced(msg_id="ab" * 16),
        {"EgressUnacknowledged", "IngressUnexplained", "ReceiptInvalid"},
    ),
    "other sender": (
        "hub",
        ev.Ingress,
        _replaced(sender="linz"),
        {"EgressUnacknowledged", "IngressUnexplained", "ReceiptInvalid"},
    ),
    "head for one only": ("linz", ev.CheckpointSeen, _replaced(root=digest("shown to linz")), {"HeadContradicted"}),
    "head of more than there is": ("linz", ev.CheckpointSeen, _replaced(size=10**6), {"HeadContradicted"}),
    "two models": ("linz", ev.ModelReceived, _replaced(model=digest("trap")), {"ModelInconsistency"}),
    "sum on another model": ("hub", ev.AggregatePublished, _replaced(previous=digest("x")), {"ModelInconsistency"}),
    "two cohorts": ("vienna", ev.RoundInvited, _replaced(cohort=digest("few")), {"SplitCohort"}),
    "two contexts": ("vienna", ev.RoundInvited, _replaced(context=digest("other")), {"SplitCohort", "StepMissing"}),
    "two survivor sets": ("graz", ev.SecaggSurvivors, _replaced(survivors=digest("few")), {"SplitCohort"}),
    "both shares of one site": ("hub", ev.SecaggUnmasked, _replaced(mask_key=("graz",)), {"MaskExposure"}),
    "no payment": ("graz", ev.DpCommitted, lambda event: None, {"UnaccountedRound"}),
    "cheaper than it was": ("graz", ev.DpReserved, _replaced(epsilon_total="0.5"), {"EpsilonMismatch"}),
    "another delta": ("graz", ev.DpCommitted, _replaced(delta="0.001"), {"DpTermsChanged"}),
    "another cap": ("graz", ev.DpCommitted, _replaced(cap="80"), {"DpTermsChanged"}),
    "less noise counted": (
        "graz",
        ev.DpReserved,
        lambda event: type(event)(**{**event.body(), "mechanisms": ({**event.body()["mechanisms"][0], "steps": 1},)}),
        {"EpsilonMismatch"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ends_differ(name: str, tmp_path: Path) -> None:
    who, kind, change, expected = CASES[name]
    federation = _play(tmp_path, who, kind, change)
    assert weighty(_cross(federation).findings) == expected
    with unchecked(*expected):
        assert weighty(_cross(federation).findings) == set(), "twin"


def test_honest_federation_is_clean(federation: Federation) -> None:
    result = _cross(federation)
    assert result.exit_code == 0
    assert result.matched == sum(log.ledger.count for log in result.logs)


def test_missing_log_is_not_a_pass(federation: Federation) -> None:
    folders = [path for path in federation.folders if path.name != "linz"]
    result = cross(folders, dict.fromkeys(folders, federation.pinned))
    assert result.exit_code == 3
    assert weighty(result.findings) == {"LogMissing"}
    with unchecked("LogMissing"):
        assert cross(folders, dict.fromkeys(folders, federation.pinned)).exit_code == 0, "twin"


def test_killed_site_explains_its_bytes(tmp_path: Path) -> None:
    """Logged, then killed before the send: the message is under way for ever, which is no finding."""
    federation = Federation.make(tmp_path)
    federation.play(1)
    site = federation.members["linz"]
    lost = ev.Egress(
        **{
            **next(iter(_egress(site.log))).body(),
            "msg_id": "77" * 16,
        }
    )
    site.log.append(lost, run="run-1", round=2)
    federation.restart("linz", stop=False)
    federation.play(1)
    federation.stop()
    result = _cross(federation)
    assert result.exit_code == 0
    assert {"InFlight", "UncleanStop"} <= {finding.code for finding in result.findings}


def _egress(log: AuditLog) -> list[ev.Egress]:
    from security.log.schema import event_from, read_line

    lines = Tampering(log._writer.path).lines
    entries = [read_line(line) for line in lines if b'"type":"egress"' in line]
    return [event_from(entry) for entry in entries]  # type: ignore[misc]  # all of one type


# Clocks


def test_clock_that_goes_back_is_owned_up_to(lonely: Lonely) -> None:
    """An honest restart with a wrong clock is visible and no finding."""
    lonely.log.close()
    lonely.clock.wall -= 3_600_000
    lonely.reopen()
    lonely.log.append(ev.OperatorAction(command="status", role="operator"))
    lonely.log.checkpoint()
    assert lonely.codes() == set()
    assert any(b'"type":"clock.adjusted"' in line for line in Tampering(lonely.folder).lines)


@pytest.mark.parametrize(
    ("seq", "change", "code"),
    [
        (5, {"ts": 1_700_000_000_000}, "ClockRollback"),
        (5, {"mono_ms": 1}, "MonotonicRollback"),
        (9, {"mono_ms": 5_000_000}, "HeartbeatGap"),
    ],
)
def test_clock_lies(lonely: Lonely, seq: int, change: dict[str, int], code: str) -> None:
    tampering = Tampering(lonely.folder)
    tampering.edit(seq, lambda entry: entry.update(change))
    tampering.resign(lonely.signer(0))
    assert lonely.codes() == {code}
    with unchecked(code):
        assert lonely.codes() == set(), "twin"


def _play_with_clock(federation: Federation, ahead_ms: int) -> None:
    """A site's clock runs ahead, so that its entries are later than the witnesses' time on the head above them."""
    site = federation.members["graz"]

    class Ahead:
        def now_ms(self) -> int:
            return federation.clock.now_ms() + ahead_ms

        def mono_ms(self) -> int:
            return federation.clock.mono_ms()

    site.log._clock = Ahead()
    federation.play(1)


def _backdate(federation: Federation, ahead_ms: int) -> None:
    _play_with_clock(federation, ahead_ms)
    federation.stop()


def test_witness_times_bound_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that backdates does not mind that its witnesses have another time."""
    monkeypatch.setattr("security.log.writer.SKEW_MS", 1 << 50)
    federation = Federation.make(tmp_path)
    _backdate(federation, 3_600_000)
    expected = {"Backdated", "ClockSkew"}
    assert weighty(_cross(federation).findings) == expected
    with unchecked("ClockSkew"):
        assert weighty(_cross(federation).findings) == {"Backdated"}
    with unchecked(*expected):
        assert weighty(_cross(federation).findings) == set(), "twin"


def _observed(federation: Federation, folder: Path, keys: list[NoteSigner], seconds: int) -> Path:
    """A copy of a site's log in which observers have put their signatures on every checkpoint, at their own time."""
    path = copied(federation.members["graz"].folder, folder)
    heads = LogFolder(path)
    for size in heads.checkpoint_sizes():
        note = heads.checkpoint_note(size)
        signed = tuple(key.cosign(note.text, seconds) for key in keys)
        heads.checkpoint_path(size).write_bytes(Note(text=note.text, signatures=(*note.signatures, *signed)).encode())
    return path


@pytest.mark.parametrize("listed_later", [True, False])
@pytest.mark.parametrize("backdated", [True, False])
def test_times_of_observers_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backdated: bool, listed_later: bool
) -> None:
    """Late ones do not excuse a log that is ahead of its witnesses, and early ones do not frame an honest one. It does
    not matter if they became witnesses after the entries were written.
    """
    monkeypatch.setattr("security.log.writer.SKEW_MS", 1 << 50)
    names = [f"observer-{number}.lesions/witness" for number in range(7)]
    keys = [NoteSigner.from_seed(name, bytes([60 + at]) * 32, KeyType.COSIGNER) for at, name in enumerate(names)]
    world = World.make(tmp_path / "world")
    listed = ", ".join(f'"{key.key}"' for key in keys)
    plan = PLAN + f"[audit]\nwitnesses = [{listed}]\n"
    if not listed_later:
        world.write_plan(plan)
    federation = Federation.from_world(world, tmp_path / "logs")
    _play_with_clock(federation, 3_600_000 if backdated else 0)
    if listed_later:
        world.write_plan(plan)
        federation.republish()
    federation.stop()
    days = 86_400 * (30 if backdated else -30)
    path = _observed(federation, tmp_path / "graz", keys, federation.clock.now_ms() // 1000 + days)

    def codes() -> set[str]:
        return {finding.code for finding in verify(path, keys_for(path, federation.root_key)).findings}

    assert ("Backdated" in codes()) is backdated
    monkeypatch.setattr(Agreements, "observers", frozenset())
    assert ("Backdated" in codes()) is not backdated, "twin: as if they were members"


def test_small_skew_is_tolerated(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path)
    _backdate(federation, 60_000)
    assert _cross(federation).exit_code == 0
