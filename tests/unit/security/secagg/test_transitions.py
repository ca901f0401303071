"""The two tables: every pair that is not in them is refused, by the table and by the machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import security
from lazaret.errors import RemoteProtocolError
from protos.loopback import COORDINATOR as COORDINATOR_NAME
from protos.loopback import sent_message
from security.secagg import messages, statements
from security.secagg.fields import Wire
from security.secagg.site.attempt import deal_root
from security.secagg.site.machine import SiteMachine
from security.secagg.transitions import (
    COORDINATOR,
    SITE,
    CoordinatorEvent,
    CoordinatorState,
    SiteEvent,
    SiteState,
    diagram,
    step,
)
from tests.support.secagg_world import RecordedFederation, federation, random_updates

SPEC = Path(security.__file__).parent.parent / "docs" / "spec" / "secure-aggregation.md"
TABLES: list[tuple[Mapping[Any, Mapping[Any, Any]], Any, Any]] = [
    (SITE, SiteState, SiteEvent),
    (COORDINATOR, CoordinatorState, CoordinatorEvent),
]


@pytest.mark.parametrize(("table", "states", "events"), TABLES, ids=["site", "coordinator"])
def test_every_illegal_pair_raises(table: Mapping[Any, Mapping[Any, Any]], states: Any, events: Any) -> None:
    assert set(table) == set(states)
    refused = 0
    for state in states:
        for event in events:
            if event in table[state]:
                assert step(table, state, event) in states
            else:
                refused += 1
                with pytest.raises(RemoteProtocolError, match=f"{event} is not allowed in state {state}"):
                    step(table, state, event)
    assert refused > 50
    assert {event for row in table.values() for event in row} == set(events), "every event is used somewhere"


@pytest.mark.parametrize(("table", "states", "events"), TABLES, ids=["site", "coordinator"])
def test_every_state_can_be_reached(table: Mapping[Any, Mapping[Any, Any]], states: Any, events: Any) -> None:
    reached = {next(iter(states))}
    for _ in states:
        reached |= {target for state in reached for target in table[state].values()}
    assert reached == set(states)


@pytest.mark.parametrize("table", [SITE, COORDINATOR], ids=["site", "coordinator"])
def test_the_diagrams_of_the_specification_are_drawn_from_the_tables(table: Mapping[Any, Mapping[Any, Any]]) -> None:
    assert diagram(table) in SPEC.read_text(), "run `python -m security.secagg.transitions` and paste its output"


EVENTS: dict[type[Wire], SiteEvent] = {
    messages.Plan: SiteEvent.PLAN,
    messages.Adverts: SiteEvent.ADVERTS,
    messages.Deliver: SiteEvent.DELIVER,
    messages.Survivors: SiteEvent.SURVIVORS,
    messages.Quorum: SiteEvent.QUORUM,
    messages.AuditOrder: SiteEvent.AUDIT_ORDER,
    messages.UploadResume: SiteEvent.RESUME,
    messages.ResultCertificate: SiteEvent.CERTIFICATE,
    messages.Jump: SiteEvent.JUMP,
    messages.StateFrame: SiteEvent.STATE_FRAME,
}


def with_bad_box(full: RecordedFederation, message: messages.Shares) -> messages.Shares:
    """The list of a dealer whose box for the first member does not open."""
    machine = full.sites[message.site].machine
    assert machine.aggregation.attempt is not None
    lines = (replace(message.shares[0], box=bytes(len(message.shares[0].box))), *message.shares[1:])
    attempt = machine.aggregation.attempt
    root = attempt.own_root = deal_root(message.kx, message.site, attempt.adverts, lines)
    return replace(message, shares=lines, signature=machine.core.signer.sign(statements.deal(message.kx, root)))


def pause_at(state: SiteState) -> tuple[RecordedFederation, SiteMachine, dict[type[Wire], Wire]]:
    """A federation in which site-00 has come to a state, with the messages it has seen or would have seen."""
    full = federation(4)
    seen: dict[type[Wire], Wire] = {}
    stop = {
        SiteState.IDLE: messages.Plan,
        SiteState.ADVERTISED: messages.Adverts,
        SiteState.DEALT: messages.Deliver,
        SiteState.DISPUTING: messages.Disclosure,
        SiteState.UPLOADED: messages.Survivors,
        SiteState.AGREED: messages.Quorum,
        SiteState.RELEASED: messages.Result,
        SiteState.HALTED: messages.Plan,
    }[state]
    stopped = False

    def hook(sender: str, receiver: str, message: Wire) -> list[Wire]:
        nonlocal stopped
        if receiver == "site-00":
            seen.setdefault(type(message), message)
            stopped = stopped or isinstance(message, stop)
            return [] if stopped else [message]
        if state is SiteState.DISPUTING and sender == "site-01" and isinstance(message, messages.Shares):
            return [with_bad_box(full, message)]
        return [message]

    full.hook = hook
    full.run_round(random_updates(full.policy.layout, full.sites, 1))
    site = full.sites["site-00"]
    if state is SiteState.HALTED:
        site.machine.state = SiteState.HALTED
    assert site.machine.state is state
    return full, site.machine, seen | {cls: message for cls, message in of_any_round().items() if cls not in seen}


@cache
def of_any_round() -> dict[type[Wire], Wire]:
    """Every message that a coordinator sends, from another federation's round."""
    run = federation(4, seed=b"another")
    run.transcript = []
    run.run_round(random_updates(run.policy.layout, run.sites, 1))
    found: dict[type[Wire], Wire] = {}
    for sender, receiver, data in run.transcript:
        message = sent_message(sender, data)
        if receiver != COORDINATOR_NAME:
            found.setdefault(type(message), message)
    result, check = found[messages.Result], run.check
    assert isinstance(result, messages.Result) and check is not None
    extra: list[Wire] = [
        messages.UploadResume(kx=bytes(32), next_frame=0),
        messages.AuditOrder(result=bytes(32), absent=()),
        messages.StateFrame(state_hash=bytes(32), index=0, data=b""),
        messages.ResultCertificate(result=bytes(32), check=check),
        messages.Jump(result=result, check=check),
    ]
    return found | {type(message): message for message in extra}


@pytest.mark.parametrize("state", list(SiteState))
def test_a_machine_refuses_what_its_table_refuses(state: SiteState) -> None:
    run, machine, seen = pause_at(state)
    before = list(run.written["site-00"])
    refused = 0
    for cls, message in seen.items():
        event = EVENTS.get(cls)
        if event is None or event in SITE[state]:
            continue
        if cls is messages.Quorum and SiteEvent.OLD_QUORUM in SITE[state]:
            continue  # of an attempt this site never agreed in: refused as such, tested elsewhere
        if cls is messages.Survivors and state is SiteState.AGREED:
            continue  # the same set again gets the same answer, tested elsewhere
        refused += 1
        machine.aggregation.attempt, kept = machine.aggregation.attempt, machine.aggregation.attempt
        machine._answers.clear()
        with pytest.raises(RemoteProtocolError):
            machine.receive(message)
        assert machine.state is state
        assert machine.aggregation.attempt is kept
    assert refused >= 3
    assert run.written["site-00"] == before, "a refused message leaves no trace"


def test_a_message_for_the_other_side_is_refused() -> None:
    run, machine, _ = pause_at(SiteState.RELEASED)
    with pytest.raises(RemoteProtocolError, match="not for a site"):
        machine.receive(messages.Ready(site="site-00", round=1))
    attempt = run.planned.attempts[-1]
    with pytest.raises(RemoteProtocolError, match="not for a coordinator"):
        attempt.receive("site-00", messages.Ready(site="site-00", round=1))
    with pytest.raises(RemoteProtocolError, match="not in the cohort"):
        attempt.receive("stranger", messages.Refusal(site="stranger", ctx=bytes(32)))
    with pytest.raises(RemoteProtocolError, match="another sender"):
        attempt.receive("site-00", messages.Refusal(site="site-01", ctx=bytes(32)))
    assert COORDINATOR_NAME not in attempt.context.sites
