"""Documents drafted from logs: every sentence follows from the entries it names, and the rest are blanks."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from security.audit.cli import main
from security.audit.drafts import DOCUMENTS
from security.log import events as ev
from tests.support.audit_attacks import Tampering, copied
from tests.support.audit_logs import Federation, small_federation

STATEMENT = re.compile(r'<li class="statement">(.*?) <cite>\((.*?)\)</cite></li>', re.DOTALL)
# Words of a sentence that come from an entry and not from us: quoted, digests, decimals.
VALUES = re.compile(r"\u201c(.*?)\u201d|\b([0-9a-f]{64})\b|epsilon ([0-9.]+)")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    made = Federation.make(tmp_path_factory.mktemp("drafts"))
    graz = made.members["graz"].log
    graz.append(ev.AccessExported(auditor="<script>alert(1)</script>", purpose="audit", size=graz.size))
    made.play(2)
    made.stop()
    return made


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _draft(federation: Federation, document: str, target: Path) -> str:
    done = _run("draft", *federation.folders, "--root-key", federation.root_key, "--document", document, "-o", target)
    assert done.exit_code == 0, done.output
    return target.read_text()


def _entries(source: str) -> tuple[str, list[int]]:
    origin, _, rest = source.partition(", ")
    numbers = list(map(int, re.findall(r"\b[0-9]+\b", rest)))
    return origin, numbers[1:] if re.match(r"[0-9]+ entries from", rest) else numbers


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_sentence_follows_from_the_entries_it_names(
    document: str, federation: Federation, tmp_path: Path
) -> None:
    page = _draft(federation, document, tmp_path / "draft.html")
    logs = {member.party.origin: Tampering(member.folder).lines for member in federation.members.values()}
    manifest = json.loads((federation.hub.folder / "manifest.json").read_text())["manifest"]
    found = [(html.unescape(words), html.unescape(source)) for words, source in STATEMENT.findall(page)]
    assert len(found) > 10
    for words, source in found:
        origin, numbers = _entries(source)
        assert numbers, source
        told = " ".join(logs[origin][number].decode() for number in numbers)
        for value in (one for match in VALUES.finditer(words) for one in match.groups() if one):
            assert value in told, (words, source)
        if "manifest version" in words:
            assert f"method {manifest['training']['method']}, {manifest['training']['rounds']} rounds" in words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_no_log_carries_is_a_blank(document: str, federation: Federation, tmp_path: Path) -> None:
    page = _draft(federation, document, tmp_path / "draft.html")
    assert page.count('class="blank"') >= 5 and "To be completed by a person" in page
    assert "<script" not in page and "src=" not in page
    body = page.split("</header>", 1)[1]
    without = re.sub(
        r'<(h2|h3)>.*?</\1>|<p class="blank">.*?</p>|<li class="statement">.*?</li>', "", body, flags=re.DOTALL
    )
    assert re.sub(r"<[^>]+>|\s", "", without) == "", "nothing is said without an entry"


def test_record_names_purpose_recipients_and_exports(federation: Federation, tmp_path: Path) -> None:
    page = html.unescape(_draft(federation, "record", tmp_path / "record.html"))
    for words in ("model training", "consent, study 12", "masked-vector", "prototypes stay at graz", "alert(1)"):
        assert words in page


def test_numbers_are_those_of_the_entries(federation: Federation, tmp_path: Path) -> None:
    page = html.unescape(_draft(federation, "record", tmp_path / "record.html"))
    lines = [json.loads(line) for line in Tampering(federation.members["linz"].folder).lines]
    covered = int(re.search(r"linz.lesions/audit: ([0-9,]+) of", page)[1].replace(",", ""))  # type: ignore[index]
    sent = [one for one in lines[:covered] if one["type"] == "egress" and one["body"]["data_class"] == "control"]
    total = sum(one["body"]["bytes"] for one in sent)
    assert f"{len(sent)} messages of class control left linz, {total} bytes in all." in page


def test_entries_outside_of_the_verdict_are_left_out(federation: Federation, tmp_path: Path) -> None:
    """Entries after the newest witnessed checkpoint have only the log's own signature."""
    page = html.unescape(_draft(federation, "technical", tmp_path / "draft.html"))
    covered = {
        match[1]: int(match[2].replace(",", ""))
        for match in re.finditer(r"<li>(\S+): ([0-9,]+) of [0-9,]+ entries", page)
    }
    for _, source in STATEMENT.findall(page):
        origin, numbers = _entries(html.unescape(source))
        assert max(numbers) < covered[origin]


def test_log_that_fails_refuses_with_one_line(federation: Federation, tmp_path: Path) -> None:
    changed = copied(federation.members["graz"].folder, tmp_path / "graz")
    Tampering(changed).edit(5, lambda entry: entry.update(actor="somebody else"))
    target = tmp_path / "draft.html"
    done = _run("draft", federation.hub.folder, changed, "--document", "dpia", "-o", target)
    assert done.exit_code == 1 and "RootMismatch" in done.output and not target.exists()
    assert [line.startswith("privacy-audit: error:") for line in done.output.splitlines()].count(True) == 1
    assert _run("draft", changed, "--document", "dpia", "-o", tmp_path / "draft.doc").exit_code == 2


def test_a_log_that_nobody_witnessed_carries_nothing(tmp_path: Path) -> None:
    made = small_federation(tmp_path / "logs")
    path = made.members["graz"].folder
    Tampering(path).strip_cosignatures()
    done = _run("draft", path, "--document", "record", "-o", tmp_path / "draft.html")
    assert done.exit_code == 0
    assert "<cite>" not in (tmp_path / "draft.html").read_text(), "blanks only"
