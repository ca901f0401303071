"""Rules between logs, one at a time, on records that a party could have written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from security.audit import compare
from security.audit.facts import LogHistory, read_history
from security.audit.findings import Findings
from security.log.note import Checkpoint, Note, NoteSigner
from security.log.reader import Record
from security.log.roster import COORDINATOR, SITE
from security.log.witness import HeldCheckpoint
from tests.support.audit_logs import Federation, small_federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return small_federation(tmp_path_factory.mktemp("federation"))


@pytest.fixture
def both(federation: Federation) -> tuple[LogHistory, LogHistory]:
    """What graz and the coordinator wrote; a test may change the records."""
    graz, hub = federation.members["graz"], federation.hub
    return (
        read_history(graz.folder, origin=graz.party.origin, name="graz", role=SITE),
        read_history(hub.folder, origin=hub.party.origin, name="hub", role=COORDINATOR),
    )


def codes(findings: Findings) -> set[str]:
    return {finding.code for finding in findings.listed()}


def arrived_of(hub: LogHistory) -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = {}
    for record in hub.of("ingress"):
        found.setdefault((record.body["sender"], record.body["msg_id"]), []).append(record)
    return found


def test_one_id_is_for_one_message(both: tuple[LogHistory, LogHistory]) -> None:
    """Also where the coordinator has both under that id: each would confirm the other."""
    graz, hub = both
    honest = Findings("between")
    compare._match_site(graz, hub, arrived_of(hub), set(), honest)
    first, second = list(graz.of("egress"))[:2]
    assert first.body["sha256"] != second.body["sha256"]
    for record in (*graz.of("egress"), *(one for one in hub.of("ingress") if one.body["sender"] == "graz")):
        if record.body["msg_id"] == second.body["msg_id"]:
            record.body["msg_id"] = first.body["msg_id"]
    joint = Findings("between")
    compare._match_site(graz, hub, arrived_of(hub), set(), joint)
    assert "DuplicateMessage" not in codes(honest) and "DuplicateMessage" in codes(joint)


def test_a_receipt_is_under_a_head_that_covers_its_entry(
    federation: Federation, both: tuple[LogHistory, LogHistory]
) -> None:
    """The head is genuine, and one entry too small."""
    graz, hub = both
    tree = compare.tree_of(federation.hub.folder)
    receipt = next(graz.of("receipt"))
    entry = next(one for one in hub.of("ingress") if one.seq == receipt.body["ingress"])
    assert compare._fault("graz", receipt, entry, tree, {}) is None
    for size in (entry.seq, tree.size + 1):
        root = tree.root(min(size, tree.size)).hex()
        receipt.body.update(head_size=size, head_root=root, proof=None)
        assert "does not cover" in (compare._fault("graz", receipt, entry, tree, {}) or "")


def held_pair(origin: str, *roots: bytes) -> Iterator[HeldCheckpoint]:
    signer = NoteSigner.from_seed(origin, bytes(32))
    for root in roots:
        text = Checkpoint(origin=origin, size=5, root=root).text
        yield HeldCheckpoint(note=Note(text=text, signatures=(signer.sign(text),)), endorsements=())


@pytest.mark.parametrize(("roots", "expected"), [((b"a", b"a"), set()), ((b"a", b"b"), {"Fork"})])
def test_two_heads_of_a_log_that_is_not_here_may_contradict_each_other(
    roots: tuple[bytes, ...], expected: set[str]
) -> None:
    held = {"graz/audit": list(held_pair("graz/audit", *(root * 32 for root in roots)))}
    joint = Findings("between")
    compare._join_held(held, [], joint)
    assert codes(joint) == expected
