"""Witness, roster, annex, html and the smaller parts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import security.audit
from lazaret.errors import (
    AuditLogError,
    CheckpointConflict,
    CodecError,
    ConfigError,
    LocalProtocolError,
    VerificationFailed,
)
from security.audit.findings import CODES, Finding, Findings, exit_code
from security.audit.pages import Dot, Drawing, Label, environment
from security.audit.report import Span, digest
from security.audit.text import plain, quantity, when
from security.log import events as ev
from security.log.machine import Heartbeat
from security.log.note import KeyType, Note, NoteSigner, Signature, checkpoint_of
from security.log.roster import COORDINATOR, SITE, Party, Roster
from security.log.store import Annex, LogFolder
from security.log.witness import Submission
from tests.support.audit_attacks import Lonely
from tests.support.audit_logs import Federation


def _party(name: str, role: str, number: int) -> Party:
    return Party(
        name=name,
        role=role,
        origin=f"{name}/audit",
        root=NoteSigner.from_seed(f"{name}/audit", bytes([number]) * 32).key,
        cosigner=NoteSigner.from_seed(f"{name}/witness", bytes([number + 100]) * 32, KeyType.COSIGNER).key,
    )


PARTIES = (_party("hub", COORDINATOR, 1), *(_party(name, SITE, 2 + at) for at, name in enumerate("abcd")))
ROSTER = Roster(parties=PARTIES)


def test_quorum_of_a_site() -> None:
    hub, _, b, c, d = (party.cosigner for party in PARTIES)
    assert ROSTER.missing_for_quorum("a/audit", [hub, b, c]) == ()
    assert ROSTER.missing_for_quorum("a/audit", [b, c, d]) == ("hub",)
    assert ROSTER.missing_for_quorum("a/audit", [hub, b]) == ("1 more of c, d",)
    assert len(ROSTER.missing_for_quorum("a/audit", [])) == 2


def test_quorum_of_the_coordinator() -> None:
    _, a, b, *_ = (party.cosigner for party in PARTIES)
    assert ROSTER.missing_for_quorum("hub/audit", [a, b]) == ()
    assert ROSTER.missing_for_quorum("hub/audit", [a])


def test_nobody_witnesses_itself() -> None:
    assert PARTIES[1].cosigner not in ROSTER.cosigners_for("a/audit")


def test_roster_refuses_shared_keys_and_names() -> None:
    with pytest.raises(ConfigError, match="name"):
        Roster(parties=(PARTIES[1], dataclasses.replace(PARTIES[2], name="a")))
    with pytest.raises(ConfigError, match="key"):
        Roster(parties=(PARTIES[1], dataclasses.replace(PARTIES[2], root=PARTIES[1].root)))
    with pytest.raises(ConfigError, match="coordinator"):
        Roster(parties=(PARTIES[0], dataclasses.replace(PARTIES[1], role=COORDINATOR)))
    with pytest.raises(ConfigError, match="mixed up"):
        dataclasses.replace(PARTIES[1], root=PARTIES[1].cosigner)
    with pytest.raises(ConfigError, match="not"):
        dataclasses.replace(PARTIES[1], role="guest")


# Witness


def test_witness_tells_what_it_holds(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    lonely.show(watcher)
    lonely.log.append(Heartbeat(size=1))
    lonely.log.checkpoint()
    with pytest.raises(CheckpointConflict) as conflict:
        watcher.consider(lonely.log.submission(0))
    assert conflict.value.held_size == 1
    watcher.consider(lonely.log.submission(1))
    assert watcher.held_size(lonely.log.origin) == 2


def test_witness_refuses_strangers_and_itself(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    offer = lonely.log.submission(0)
    unknown = Note(text="x/audit\n0\n" + "A" * 43 + "=\n", signatures=offer.note.signatures)
    with pytest.raises(VerificationFailed):
        watcher.consider(dataclasses.replace(offer, note=unknown))
    forged = Signature(name=lonely.log.origin, key_id=offer.note.signatures[0].key_id, value=bytes(64))
    with pytest.raises(VerificationFailed):
        watcher.consider(dataclasses.replace(offer, note=Note(text=offer.note.text, signatures=(forged,))))
    assert watcher.held(lonely.log.origin) is None


def test_witness_answers_the_same_head_again(lonely: Lonely, tmp_path: Path) -> None:
    watcher = lonely.watcher(tmp_path / "outside")
    lonely.show(watcher)
    again = lonely.log.submission(1)
    assert watcher.consider(again).name == "outside.lesions/witness"


def test_submissions_travel(lonely: Lonely) -> None:
    offer = lonely.log.submission(0)
    assert Submission.parse(offer.encode()) == offer
    for bad in (b"{}", offer.encode().replace(b'"old_size":0', b'"old_size":"0"'), b"[]"):
        with pytest.raises(CodecError):
            Submission.parse(bad)


def test_foreign_cosignature_is_refused(lonely: Lonely) -> None:
    stranger = NoteSigner.from_seed("x/witness", bytes(32), KeyType.COSIGNER)
    with pytest.raises(VerificationFailed):
        lonely.log.add_cosignature(1, stranger.cosign(lonely.log.newest_checkpoint.text, 5))


@pytest.mark.parametrize("size", [7, 2**53 - 1])
def test_a_cosignature_of_a_head_that_never_was_does_not_close_the_log(lonely: Lonely, size: int) -> None:
    stranger = NoteSigner.from_seed("x/witness", bytes(32), KeyType.COSIGNER)
    with pytest.raises(VerificationFailed):
        lonely.log.add_cosignature(size, stranger.cosign(lonely.log.newest_checkpoint.text, 5))
    lonely.log.append(ev.OperatorAction(command="still open", role="operator"))


def test_cosignatures_are_kept_and_logged(tmp_path: Path) -> None:
    federation = Federation.make(tmp_path, dp_sites=())
    federation.exchange()
    site = federation.members["graz"]
    kept = LogFolder(site.folder)
    note = Note.parse(kept.cosigned.read_bytes())
    assert {line.name for line in note.signatures} >= {f"{name}.lesions/witness" for name in ("hub", "linz", "vienna")}
    assert checkpoint_of(note).size in kept.checkpoint_sizes()
    federation.stop()


# Small parts


def test_annex_opens_only_its_own_commitment() -> None:
    annex = Annex(salt=bytes(32), details={"images": 3})
    assert Annex.open(annex.encode(), annex.commitment()) == annex
    with pytest.raises(VerificationFailed):
        Annex.open(annex.encode(), "0" * 64)
    for bad in (b"{}", b'{"details":1,"salt":"00"}', b'{"details":{},"salt":"zz"}'):
        with pytest.raises(CodecError):
            Annex.open(bad, annex.commitment())


def test_every_code_says_what_and_what_next() -> None:
    for name, entry in CODES.items():
        assert name[0].isupper()
        assert len(entry.meaning) > 10
        assert len(entry.ask) > 5
    with pytest.raises(LocalProtocolError):
        Finding(code="Nonsense", log="x", detail="y")


def test_exit_codes() -> None:
    fail, undecided, note = (
        Finding(code=name, log="", detail="") for name in ("RootMismatch", "NotWitnessed", "BeyondWitnessed")
    )
    assert exit_code([]) == exit_code([note]) == 0
    assert exit_code([undecided, note]) == 3
    assert exit_code([undecided, fail]) == 1


def test_many_findings_become_one() -> None:
    findings = Findings("log")
    for number in range(100):
        findings.add("SequenceGap", f"entry {number}", number)
    (only,) = findings.listed()
    assert only.detail == "entry 0 (and 99 more like this)"
    assert len(only.entries) == 20


def shown(template: str, **facts: object) -> str:
    """A template of our own with the report's parts and rules."""
    parts = '{% from "parts.html" import chart, show, table, terms %}'
    return environment().from_string(parts + template).render(facts)


def test_templates_escape_everything_but_markup() -> None:
    assert shown('<p class="{{ x }}">{{ y }}</p>', x='"x"', y="<b>") == '<p class="&#34;x&#34;">&lt;b&gt;</p>'
    assert shown("<p>{{ show(x) }}</p>", x=(Span("x"), "a", 1000)) == "<p><strong>x</strong>a1,000</p>"
    assert shown("{{ show(x) }}", x=Span(Span("<b>", "alarm"), '"x"')) == (
        '<span class="&#34;x&#34;"><strong class="alarm">&lt;b&gt;</strong></span>'
    )
    assert "\x1b" not in shown("<p>{{ x }}</p>", x="\x1b[31m")
    assert "\u202e" not in shown("{{ show(x) }}", x=Span("\u202e", "code"))
    assert f'title="{"a" * 64}"' in shown("{{ show(x) }}", x=digest("a" * 64, 8))
    assert "<script" not in shown("{{ table(x, y) }}", x=("<script>",), y=[("<script>",)])
    assert "<script" not in shown("{{ terms(x) }}", x=[("<script>", "<script>")])


def test_charts_escape_too() -> None:
    drawing = Drawing(title="<b>", height=10, labels=[Label(0, 0, "<b>")], dots=[Dot(0, 0, "<b>")])
    page = shown("{{ chart(x, y) }}", x=drawing, y="<b>")
    assert page.count("&lt;b&gt;") == 4
    assert "<b>" not in page


TEMPLATES = sorted((Path(security.audit.__file__).parent / "templates").iterdir())


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_self_contained_and_switch_no_escaping_off(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"\|\s*safe\b|autoescape|\bsrc=|\bhref=|<script|<link|@import|url\(|\bon[a-z]+=", source)
    assert set(re.findall(r"https?://[^\s\"')]+", source)) <= {"http://www.w3.org/2000/svg"}


def test_a_name_that_a_template_does_not_get_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        shown("{{ x.nothing }}", x={})


def test_words_for_people() -> None:
    assert [quantity(number) for number in (0, 999, 1500, 5_100_000_000, 10**15)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "5.1 GB",
        "1000.0 TB",
    ]
    assert plain("a\x1b[31m\u202eb") == "a?[31m?b"
    assert when(253_402_300_799) == "9999-12-31 23:59Z" and when(2**63 - 1) == "after the year 9999"


def test_folder_names_cannot_climb(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path)
    assert folder.witness_path("../../etc/passwd").parent == folder.witness
    with pytest.raises(AuditLogError):
        folder.check_format()
