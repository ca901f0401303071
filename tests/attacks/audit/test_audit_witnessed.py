"""Lies that were written as they happened, so that every witness has signed them: only what they say gives them away.

In each case one party, or several together, write something else than what a federation does. All logs are compared as
an auditor would compare them; the twin does the same without the rule.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from security.audit import checkpoints, compare, epsilon, facts, scan
from security.audit.agreement import keys_of
from security.audit.compare import cross
from security.audit.completeness import RoundBook
from security.audit.scan import Scan
from security.audit.verify import verify
from security.log import events as ev
from security.log.egress import due_bytes, recorded_shape
from security.log.keys import EpochKeys
from security.log.machine import SegmentSealed
from security.log.roster import SITE
from security.log.store import LogFolder
from security.secagg.registry import Shape
from tests.support.audit_attacks import Lonely, Tampering, copied, weighty
from tests.support.audit_logs import Federation
from tests.support.audit_parties import FIVE, digest
from tests.support.consortium_world import World

Lie = Callable[[ev.Event], Sequence[ev.Event]]
NINE = tuple(f"site{number}" for number in range(9))


def _federation(folder: Path, sites: Sequence[str] = FIVE) -> Federation:
    return Federation.from_world(World.make(folder / "world", sites), folder / "logs", dp_sites=())


def _lies(federation: Federation, names: Sequence[str], lie: Lie) -> None:
    """From now on these parties write what `lie` makes of each entry."""
    for name in names:
        log = federation.members[name].log
        append = log.append

        def instead(event: ev.Event, _append: Callable[..., int] = append, **scope: Any) -> int:
            numbers = [_append(one, **scope) for one in lie(event)]
            return numbers[-1] if numbers else 0

        log.append = instead  # type: ignore[method-assign]  # a party that lies


def _found(federation: Federation) -> set[str]:
    return weighty(cross(federation.folders, federation.keys).findings)


# Names that nobody bears


def _hides_who_dropped_out(federation: Federation) -> None:
    def lie(event: ev.Event) -> Sequence[ev.Event]:
        if isinstance(event, ev.SecaggSurvivors):
            event = replace(event, dropouts=("nobody",))
        if isinstance(event, ev.SecaggUnmasked):
            event = replace(event, mask_key=("nobody",))
        return [event]

    _lies(federation, list(federation.members), lie)
    federation.play(1, dropouts=("wels",))


# Sums and models


def _hides_its_sums(federation: Federation) -> None:
    _lies(federation, ["hub"], lambda event: [] if isinstance(event, ev.AggregatePublished) else [event])
    federation.play(2)


def _has_no_quorum(federation: Federation) -> None:
    """The shares of two sets are opened in one round, each by some sites; no log tells of both."""
    sites = [member.party.name for member in federation.sites]
    first, last = sites[0], sites[-1]

    def one(event: ev.Event) -> Sequence[ev.Event]:
        if isinstance(event, ev.SecaggSurvivors):
            event = replace(event, survivors=digest("one"), count=len(sites) - 1, dropouts=(last,))
        if isinstance(event, ev.SecaggUnmasked):
            event = replace(event, self_mask=tuple(sites[:-1]), mask_key=(last,))
        if isinstance(event, ev.AggregatePublished):
            event = replace(event, inputs=len(sites) - 1)
        return [event]

    def other(event: ev.Event) -> Sequence[ev.Event]:
        if isinstance(event, ev.RoundInvited | ev.SecaggSurvivors | ev.SecaggUnmasked):
            event = replace(event, attempt=1, context=digest("another attempt"))
        if isinstance(event, ev.SecaggSurvivors):
            event = replace(event, survivors=digest("other"), count=len(sites) - 1, dropouts=(first,))
        if isinstance(event, ev.SecaggUnmasked):
            event = replace(event, self_mask=tuple(sites[1:]), mask_key=(first,))
        return [event]

    half = len(sites) // 2 + 1
    _lies(federation, ["hub", *sites[:half]], one)
    _lies(federation, sites[half:], other)
    federation.play(1)


def _unmasks_what_never_came(federation: Federation) -> None:
    def lie(event: ev.Event) -> Sequence[ev.Event]:
        gone = isinstance(event, ev.Ingress) and (event.message, event.sender) == ("UploadFrame", "wels")
        return [] if gone else [event]

    _lies(federation, ["hub"], lie)
    federation.play(1)


# What leaves a site


def _masks_two_vectors_alike(federation: Federation) -> None:
    graz = federation.members["graz"]
    aggregation = federation._aggregation

    def twice(member: Any, number: int, *, uploads: bool) -> None:
        aggregation(member, number, uploads=uploads)
        if member is graz:
            federation.send(graz, "UploadFrame", number)
            federation.give_receipts()

    federation._aggregation = twice  # type: ignore[method-assign]  # a site that masks a second vector
    federation.play(1)


def _answers_again_unlogged(federation: Federation) -> None:
    """Shares leave twice, and were opened once: the second time they may have been those of another set."""
    federation.play(1)
    federation.send(federation.members["graz"], "Unmask", 1)
    federation.give_receipts()
    federation.exchange()


def _names_another_ring(federation: Federation) -> None:
    _lies(federation, ["graz"], _of_vectors(modulus_bits=8))
    federation.play(1)


def _is_more_than_certain(federation: Federation) -> None:
    _lies(federation, ["graz"], _of_vectors(uniformity="inf"))
    federation.play(1)


def _of_vectors(**fields: object) -> Lie:
    def lie(event: ev.Event) -> Sequence[ev.Event]:
        vector = isinstance(event, ev.Egress) and event.modulus_bits is not None
        return [replace(event, **fields) if vector else event]  # type: ignore[type-var]  # an Egress

    return lie


def _sends(message: str, **numbers: object) -> Callable[[Federation], None]:
    """One more message of a site, as long as these numbers make it, at both ends."""

    def act(federation: Federation) -> None:
        federation.play(1)
        graz = federation.members["graz"]
        cohort = tuple(site.party.name for site in federation.sites)
        shape = Shape(federation="lesions", site="graz", cohort=cohort, vector_bytes=federation.vector_bytes)
        told = recorded_shape(shape) | numbers
        due = due_bytes(message, shape.origin, told)
        assert due is not None, "more than the wire bears: no such length"
        same = {"msg_id": digest(message)[:32], "message": message, "bytes": due, "sha256": digest("parcel")}
        sent = ev.Egress(
            data_class="checkpoint" if message == "Head" else "control" if message == "Ready" else "public-key",
            expected_bytes=due,
            shape=told,
            masked=False,
            modulus_bits=None,
            uniformity=None,
            destination=federation.destination,
            head=LogFolder(graz.folder).checkpoint_sizes()[-1],
            **same,  # type: ignore[arg-type]  # the fields that both ends have
        )
        graz.log.append(sent, run=federation.run, round=1)
        federation.hub.log.append(ev.Ingress(sender="graz", **same), run=federation.run, round=1)  # type: ignore[arg-type]
        count = {"connections": 0, "bytes_out": due + 200, "bytes_in": 0, "beside_out": 0}
        graz.log.append(ev.NetCounter(source="namespace eth0", coverage="network namespace", **count))
        federation.exchange()

    return act


def _says_nothing_of_its_start(federation: Federation) -> None:
    """The software and the options of an agent are in `agent.start`; so this one has none."""
    federation.play(1)
    graz = federation.members["graz"]
    graz.log.append(ev.AgentStop(reason="update"))
    graz.log.close()
    federation.reopen(graz)
    graz.log.append(ev.TrainerIsolated(asked="best", keys=False, ranks=False, connection=False, **WALLS))
    federation.play(1)


WALLS = dict.fromkeys(("network_namespace", "seccomp", "landlock"), True)


def _goes_on_after_the_end(federation: Federation) -> None:
    federation.play(1)
    federation.members["graz"].log.append(ev.RunStopped(statement=digest("the operator's word")), run=federation.run)
    federation.play(1)


def _explains_in_advance(federation: Federation) -> None:
    federation.play(1)
    log = federation.members["graz"].log
    log.append(ev.OperatorAction(command=f"entry {log.size + 1}: a test", role="operator"))
    log.append(ev.EgressBlocked(rule="does not look masked", message="UploadFrame", bytes=4, sha256=None))
    federation.exchange()


def _takes_what_no_site_sends(federation: Federation) -> None:
    federation.play(1)
    plain = ev.Ingress(msg_id="ab" * 16, sender="graz", message="Update", bytes=5_000_000, sha256=digest("plain"))
    federation.hub.log.append(plain, run=federation.run, round=1)
    federation.exchange()


def _pays_once(federation: Federation) -> None:
    """A site under its own budget reserves one round, and lets this one pay for all others."""
    federation.dp_sites = ("graz",)
    told: dict[type, ev.Event] = {}

    def lie(event: ev.Event) -> Sequence[ev.Event]:
        if isinstance(event, ev.DpReserved):
            return [] if ev.DpReserved in told else [told.setdefault(ev.DpReserved, event)]
        if isinstance(event, ev.DpCommitted):
            return [told.setdefault(ev.DpCommitted, event)]
        return [event]

    _lies(federation, ["graz"], lie)
    federation.play(3)


def _off(*_: object, **__: object) -> None:
    """A rule that looks at nothing."""


Patch = tuple[object, str, object]
LIES: dict[str, tuple[Callable[[Federation], None], set[str], tuple[Patch, ...]]] = {
    "a site of no manifest in place of who dropped out": (
        _hides_who_dropped_out,
        {"SumMismatch"},
        ((RoundBook, "_no_strangers", _off),),
    ),
    "models that no sum gives": (_hides_its_sums, {"ModelInconsistency"}, ((facts, "join_models", _off),)),
    "a sum without a quorum": (_has_no_quorum, {"SumMismatch"}, ((facts, "join_openings", _off),)),
    "a ring of 8 bits": (_names_another_ring, {"UnmaskedVector"}, ((Scan, "_check_mask", _off),)),
    "a p-value above one": (_is_more_than_certain, {"UnmaskedVector"}, ((Scan, "_check_mask", _off),)),
    "two vectors under one mask": (
        _masks_two_vectors_alike,
        {"StepMissing"},
        ((RoundBook, "_one_mask_each", _off),),
    ),
    "shares that nobody opened": (
        _answers_again_unlogged,
        {"StepMissing"},
        ((RoundBook, "_each_release_is_logged", _off),),
    ),
    "a cohort of 250": (
        _sends("Advert", cohort=250, path=249),
        {"SurplusBytes"},
        ((scan, "possible", lambda *_: True),),
    ),
    "a path past the cohort": (
        _sends("Advert", path=200),
        {"SurplusBytes"},
        ((scan, "possible", lambda *_: True),),
    ),
    "64 signatures on a checkpoint": (
        _sends("Ready", head_signatures=64),
        {"SurplusBytes"},
        ((scan, "possible", lambda *_: True),),
    ),
    "keys of epochs that never were": (
        _sends("Head", named="linz", epochs=400),
        {"SurplusBytes"},
        ((scan, "possible", lambda *_: True),),
    ),
    "an agent without a start": (_says_nothing_of_its_start, {"StepMissing"}, ((scan, "OF_AN_AGENT", frozenset()),)),
    "rounds after the operator's end": (
        _goes_on_after_the_end,
        {"RoundsExceeded"},
        ((RoundBook, "_not_ended", _off),),
    ),
    "one reservation for all rounds": (_pays_once, {"EpsilonMismatch"}, ((epsilon, "_check_commits", _off),)),
}


@pytest.mark.parametrize("name", LIES)
def test_lie_that_everybody_signed_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act, expected, checks = LIES[name]
    federation = _federation(tmp_path)
    act(federation)
    federation.stop()
    assert _found(federation) == expected
    for owner, attribute, instead in checks:
        monkeypatch.setattr(owner, attribute, instead)
    assert _found(federation) == set(), "twin"


# What one log shows by itself, though others would object too

ALONE: dict[str, tuple[Callable[[Federation], None], str, str, tuple[Patch, ...]]] = {
    "a vector that never came": (
        _unmasks_what_never_came,
        "hub",
        "SumMismatch",
        ((RoundBook, "_judge_arrivals", _off),),
    ),
    "a message that no site sends": (
        _takes_what_no_site_sends,
        "hub",
        "ForbiddenMessage",
        ((scan, "permitted", lambda: {"Update": "control"} | dict(PERMITTED)),),
    ),
    "a block that was explained before": (
        _explains_in_advance,
        "graz",
        "VectorBlocked",
        ((RoundBook, "close", _off),),
    ),
}
PERMITTED = scan.permitted()


@pytest.mark.parametrize("name", ALONE)
def test_lie_is_found_in_one_log(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act, who, expected, checks = ALONE[name]
    federation = _federation(tmp_path)
    act(federation)
    federation.stop()
    path = federation.members[who].folder
    assert weighty(verify(path, federation.keys[path]).findings) == {expected}
    for owner, attribute, instead in checks:
        monkeypatch.setattr(owner, attribute, instead)
    assert weighty(verify(path, federation.keys[path]).findings) == set(), "twin"


def test_a_list_that_the_wire_does_not_bear_has_no_length() -> None:
    shape = recorded_shape(Shape(federation="lesions", site="graz", cohort=FIVE, vector_bytes=1000))
    for message, most in (("Advert", 255), ("Head", 63)):
        named = {"named": "linz", "epochs": 1}
        assert due_bytes(message, "graz.lesions/audit", shape | named | {"path": most}) is not None
        assert due_bytes(message, "graz.lesions/audit", shape | named | {"path": most + 1}) is None


def test_whoever_is_not_listed_does_not_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wels writes that it took over the manifest that no longer lists it, and uploads."""
    federation = _federation(tmp_path)
    world, wels = federation.world, federation.members["wels"]
    assert world is not None
    federation.play(1)
    world.authority.revoke("wels", reason="key lost", now_ms=world.now)
    manifest, roster = world.publish(), federation.roster
    wels.log.adopt_manifest(world.published(), manifest.version, roster)
    federation.play(1)
    federation.stop()
    found = weighty(verify(wels.folder, federation.keys[wels.folder]).findings)
    assert "CertificateInvalid" in found
    monkeypatch.setattr(scan, "NEVER", scan.EVER)
    assert "CertificateInvalid" not in weighty(verify(wels.folder, federation.keys[wels.folder]).findings), "twin"


# Nobody is framed


def test_a_vector_that_only_the_coordinator_knows_is_no_unpaid_round(tmp_path: Path) -> None:
    federation = _federation(tmp_path)
    federation.dp_sites = ("graz",)
    federation.play(1)
    made_up = ev.Ingress(msg_id="ab" * 16, sender="graz", message="UploadFrame", bytes=100, sha256=digest("made up"))
    federation.hub.log.append(made_up, run=federation.run, round=9)
    federation.exchange()
    federation.stop()
    result = cross(federation.folders, federation.keys)
    assert weighty(result.joint) == {"IngressUnexplained"}, "and not that graz took part unpaid"


def test_a_log_is_verified_while_its_agent_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries and leaves that come while the audit reads are no contradiction."""
    federation = _federation(tmp_path)
    federation.play(1)
    graz = federation.members["graz"]
    keys = federation.keys[graz.folder]
    begin = Scan.run

    def meanwhile(reading: Scan, files: list[Path]) -> None:
        federation.exchange()
        begin(reading, files)

    monkeypatch.setattr(Scan, "run", meanwhile)
    assert verify(graz.folder, keys).exit_code == 3, "undecided, and nobody is accused"
    close = checkpoints.TreeCheck.close

    def later(tree: checkpoints.TreeCheck, latest: int) -> None:
        federation.exchange()
        close(tree, latest)

    monkeypatch.undo()
    monkeypatch.setattr(checkpoints.TreeCheck, "close", later)
    assert verify(graz.folder, keys).exit_code == 3


@pytest.mark.parametrize("folder", ["checkpoints", "manifests", "witness", "epochs"])
def test_what_a_kill_left_beside_a_file_accuses_nobody(folder: str, tmp_path: Path) -> None:
    federation = _federation(tmp_path)
    federation.play(1)
    federation.stop()
    graz = federation.members["graz"].folder
    (graz / folder / ".7.note.4711.new").write_bytes(b"hal")
    assert _found(federation) == set()


# Several copies of one log


def _copies(folder: Path) -> tuple[Federation, Path]:
    federation = _federation(folder)
    federation.play(1)
    early = Path(shutil.copytree(federation.members["graz"].folder, folder / "early" / "graz"))
    federation.play(1)
    federation.stop()
    return federation, early


def test_a_log_given_twice_is_one_log(tmp_path: Path) -> None:
    federation, _ = _copies(tmp_path)
    again = copied(federation.members["graz"].folder, tmp_path / "again" / "graz")
    folders = [*federation.folders, again]
    result = cross(folders, keys_of(folders, federation.root_key))
    assert weighty(result.findings) == set() and len(result.logs) == len(result.histories) + 1
    assert len(list(result.pairs)) == len(result.histories)


def test_an_older_copy_is_told_from_another_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are shorter than the log; only the one that graz signed anew contradicts it, and the two heads are proof."""
    federation, early = _copies(tmp_path)
    folders = [*federation.folders, early]
    keys = keys_of(folders, federation.root_key)
    assert "Fork" not in weighty(cross(folders, keys).findings)
    member, tampering = federation.members["graz"], Tampering(early)
    tampering.edit(2, lambda entry: entry.update(ts=entry["ts"] + 1))
    tampering.folder.cosigned.unlink(missing_ok=True)
    tampering.resign(EpochKeys(member.keys, member.party.origin, federation.rng).load(0))
    result = cross(folders, keys)
    forked = [log.folder for log in result.logs if "Fork" in weighty(log.findings)]
    assert forked == [member.folder] and {fork.origin for fork in result.forks} == {member.party.origin}
    assert not {"EgressUnacknowledged", "IngressUnexplained"} & weighty(result.joint), "the others are not accused"
    monkeypatch.setattr(compare, "hold_copies", _off)
    assert "Fork" not in weighty(cross(folders, keys).findings), "twin"


def test_all_roles_of_the_federation_are_here(tmp_path: Path) -> None:
    """What the cases above rest on: without a lie the same federation is clean."""
    federation = _federation(tmp_path)
    federation.play(2)
    federation.stop()
    assert _found(federation) == set()
    assert len([member for member in federation.members.values() if member.party.role == SITE]) == len(FIVE)


# What is only noted: it changes no verdict, and the auditor reads it


def _no_acknowledgement(federation: Federation) -> None:
    send = federation.send

    def quieter(member: Any, message: str, number: int, *, frame: int = 0) -> None:
        if (member.party.name, message) != ("graz", "Ack"):
            send(member, message, number, frame=frame)

    federation.send = quieter  # type: ignore[method-assign]  # a site that checks no result
    federation.play(1)


def _invited_once_more(federation: Federation) -> None:
    told: list[ev.RoundInvited] = []

    def lie(event: ev.Event) -> Sequence[ev.Event]:
        told.extend([event] if isinstance(event, ev.RoundInvited) else [])
        return [event]

    _lies(federation, ["graz"], lie)
    federation.play(1)
    again = replace(told[0], context=digest("a round that was lost"))
    federation.members["graz"].log.append(again, run=federation.run, round=2)
    federation.exchange()


NOTES = {"ResultUnchecked": _no_acknowledgement, "RoundUnfinished": _invited_once_more}


@pytest.mark.parametrize("code", NOTES)
def test_what_is_noted(code: str, tmp_path: Path) -> None:
    federation = _federation(tmp_path)
    NOTES[code](federation)
    federation.stop()
    path = federation.members["graz"].folder
    found = verify(path, federation.keys[path])
    assert found.exit_code == 0 and code in {finding.code for finding in found.findings}
    other = federation.members["linz"].folder
    assert code not in {finding.code for finding in verify(other, federation.keys[other]).findings}, "twin"


def test_a_seal_of_no_segment(lonely: Lonely, monkeypatch: pytest.MonkeyPatch) -> None:
    lonely.log.append(SegmentSealed(segment=0, sha256=digest("another file")))
    lonely.log.checkpoint()
    assert lonely.codes() == {"SegmentMismatch"}
    monkeypatch.setattr(Scan, "_sealed", _off)
    assert lonely.codes() == set(), "twin"
