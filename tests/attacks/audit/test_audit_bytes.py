"""Bytes that neither end would have named: frames outside of an upload, room from connections, counts that disagree."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.ingress_log import Arrived, IngressLog
from security.audit import egress_ledger
from security.audit.compare import Comparison, cross
from security.audit.egress_ledger import EgressLedger
from security.audit.findings import Findings
from security.log import events as ev
from security.log.reader import LogReader
from security.log.schema import match_line
from security.secagg.messages import UploadFrame
from security.secagg.relay import Pong
from tests.support.audit_attacks import Lonely, encode, unchecked, weighty
from tests.support.audit_logs import Federation

STRAY = 190_000


def _crossed(federation: Federation) -> Comparison:
    federation.stop()
    return cross(federation.folders, federation.keys)


def _frame(sequence: int, size: int) -> Arrived:
    message = UploadFrame(kx=bytes(32), index=sequence, data=b"")
    return Arrived.of("graz", 7, sequence, message, bytes(size))


def test_frames_after_an_upload_are_logged(lonely: Lonely) -> None:
    """Twice 190 kB after a whole upload: the next message, or the end of the stream, gives them an entry."""
    books = IngressLog(lonely.log, "run-1")
    books.arrived(_frame(5, 1000), round_number=1)
    books.upload_complete("graz", 7, bytes(32), round_number=1)
    books.arrived(_frame(6, STRAY), round_number=None)
    books.arrived(_frame(7, STRAY), round_number=None)
    books.arrived(Arrived.of("graz", 7, 8, Pong(number=1), b"pong"), round_number=None)
    books.arrived(_frame(9, STRAY), round_number=None)
    books.forget_stream("graz")
    found = [
        (record.type, record.body["bytes"]) for record in LogReader(lonely.folder).records("ingress", "ingress.partial")
    ]
    assert found == [("ingress", 1000), ("ingress.partial", 2 * STRAY), ("ingress", 4), ("ingress.partial", STRAY)]


def _with_partial(folder: Path, msg_id: str | None, size: int) -> Federation:
    federation = Federation.make(folder, dp_sites=())
    federation.play(1)
    sent = next(record for record in LogReader(federation.members["graz"].folder).records("egress"))
    name = sent.body["msg_id"] if msg_id is None else msg_id
    federation.hub.log.append(ev.IngressPartial(msg_id=name, sender="graz", bytes=size))
    federation.exchange()
    return federation


def test_frames_that_no_upload_explains_are_found(tmp_path: Path) -> None:
    federation = _with_partial(tmp_path, "77" * 16, STRAY)
    assert weighty(_crossed(federation).findings) == {"IngressUnexplained"}
    with unchecked("IngressUnexplained"):
        assert weighty(cross(federation.folders, federation.keys).findings) == set(), "twin"


def test_frames_of_somebody_who_is_not_listed_are_found(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, dp_sites=())
    federation.play(1)
    federation.hub.log.append(ev.IngressPartial(msg_id="77" * 16, sender="nobody", bytes=STRAY))
    federation.exchange()
    assert weighty(_crossed(federation).findings) == {"IngressUnexplained", "SenderUnlisted"}
    with unchecked("IngressUnexplained", "SenderUnlisted"):
        assert weighty(cross(federation.folders, federation.keys).findings) == set(), "twin"


def test_a_broken_upload_is_settled(tmp_path: Path) -> None:
    """The site logged the whole upload, and a part of it came: no finding, and nothing is left in flight."""
    federation = Federation.make(tmp_path, dp_sites=())
    federation.play(1)
    graz = federation.members["graz"]
    sent = next(
        record for record in LogReader(graz.folder).records("egress") if record.body["message"] == "UploadHeader"
    )
    lost = ev.Egress(**{**sent.body, "msg_id": "77" * 16})
    graz.log.append(lost, run=federation.run, round=1)
    federation.hub.log.append(ev.IngressPartial(msg_id="77" * 16, sender="graz", bytes=lost.bytes // 2))
    federation.exchange()
    result = _crossed(federation)
    assert weighty(result.findings) == set()
    assert "InFlight" not in {finding.code for finding in result.findings}


def test_more_frames_than_the_upload_has_are_found(tmp_path: Path) -> None:
    federation = _with_partial(tmp_path, None, STRAY)
    assert weighty(_crossed(federation).findings) == {"IngressUnexplained"}
    with unchecked("IngressUnexplained"):
        assert weighty(cross(federation.folders, federation.keys).findings) == set(), "twin"


def _kernel(came: int) -> ev.NetCounter:
    figures = {"connections": 3, "bytes_out": 1, "bytes_in": came}
    return ev.NetCounter(source="kernel", coverage="process", beside_out=None, **figures)


def test_coordinator_that_names_bytes_its_kernel_did_not_see(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, dp_sites=())
    federation.play(1)
    never = ev.Ingress(msg_id="77" * 16, sender="graz", message="Pong", bytes=90_000_000, sha256="0" * 64)
    federation.hub.log.append(never)
    federation.hub.log.append(_kernel(20_000))
    federation.exchange()
    assert weighty(_crossed(federation).findings) == {"UnloggedTraffic", "IngressUnexplained"}
    with unchecked("UnloggedTraffic"):
        assert weighty(cross(federation.folders, federation.keys).findings) == {"IngressUnexplained"}, "twin"


def test_bytes_that_only_the_coordinators_kernel_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site sends three megabytes past both logs: the coordinator's own count has them."""
    federation = Federation.make(tmp_path, dp_sites=())
    federation.play(1)
    came = sum(record.body["bytes"] for record in LogReader(federation.hub.folder).records("ingress"))
    federation.hub.log.append(_kernel(came + 3_000_000))
    federation.exchange()
    assert weighty(_crossed(federation).findings) == {"IngressSurplus"}
    monkeypatch.setattr(egress_ledger, "PROBES_PER_SECOND", 1_000_000)
    assert weighty(cross(federation.folders, federation.keys).findings) == set(), "twin"


def test_a_coordinator_that_was_killed_is_not_accused(tmp_path: Path) -> None:
    """What its kernel had counted since the last reading is gone; the entries after that are compared with nothing."""
    federation = Federation.make(tmp_path, dp_sites=())
    federation.play(1)
    federation.hub.log.append(_kernel(90_000_000))
    late = ev.Ingress(msg_id="77" * 16, sender="graz", message="Pong", bytes=90_000_000, sha256="0" * 64)
    federation.hub.log.append(late)
    federation.exchange()
    assert "UnloggedTraffic" not in weighty(_crossed(federation).findings)


def _smuggle(connections: int) -> Findings:
    """A reading that claims many connections, to have room for three megabytes."""
    findings = Findings("graz.lesions/audit")
    ledger = EgressLedger(findings)
    ledger.started(0)
    ledger.reconnected()
    ledger.add("control", 200, "x")
    entry = {
        "actor": "agent",
        "annex_commit": None,
        "body": {
            "beside_out": None,
            "bytes_in": 0,
            "bytes_out": 3_000_000,
            "connections": connections,
            "coverage": "process",
            "source": "kernel",
        },
        "boot": "0" * 32,
        "epoch": 0,
        "mono_ms": 60_000,
        "origin": "graz.lesions/audit",
        "round": None,
        "run": None,
        "seq": 1,
        "ts": 1,
        "type": "net.counter",
        "v": 1,
    }
    match = match_line(encode(entry).decode())
    assert match is not None
    ledger.counter(match, 1)
    return findings


def test_connections_are_bounded_by_logged_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "UnloggedTraffic" in _smuggle(1000)
    monkeypatch.setattr(egress_ledger, "FEW_ATTEMPTS", 10_000)
    assert "UnloggedTraffic" not in _smuggle(1000), "twin"
