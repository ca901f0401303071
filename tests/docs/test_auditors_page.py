"""docs/auditors.md: its commands run on a small federation's logs, and each line quoted has the shape of a real one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from security.audit.cli import main
from security.log import events as ev
from security.log.keys import EpochKeys
from security.log.schema import DATA_CLASSES
from tests.support.audit_attacks import Tampering, copied
from tests.support.audit_logs import Federation
from tests.support.audit_parties import RUN
from tests.support.consortium_world import World

PAGE = (Path(__file__).parents[2] / "docs" / "auditors.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(\$ privacy-audit .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
# The page's parties, and who plays them here: rosendahl is the one that is tampered with, vidir-modern the one killed.
CAST = {"rosendahl": "graz", "vidir-modern": "linz", "bcn": "vienna"}
EXITS = {"verify edited": 1, "verify rewritten": 3, "cross rewritten": 1, "check-proof evidence": 0}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An auditor's desk: logs as they came, an edited copy, a rewritten one, and the consortium's root."""
    desk = tmp_path_factory.mktemp("desk")
    federation = Federation.from_world(World.make(desk / "world"), desk / "logs", dp_sites=())
    federation.play(2)
    _kill(federation, "linz")
    federation.play(2)
    federation.stop()
    for keys in (desk / "logs").glob("*.keys"):
        shutil.move(keys, desk / keys.name)
    shutil.copy(desk / "world" / "consortium" / "root.pem", desk / "root.pem")
    for name in ("edited", "rewritten"):
        tampering = Tampering(copied(desk / "logs", desk / name) / "graz")
        lines = tampering.lines
        at = next(seq for seq, line in enumerate(lines) if seq > len(lines) // 2 and b'"UploadFrame"' in line)
        tampering.edit(at, lambda entry: entry["body"].update(sha256="00" * 32))
    tampering.strip_cosignatures()
    party = federation.members["graz"].party
    tampering.resign(EpochKeys(desk / "graz.keys", party.origin, federation.rng).load(0))
    return desk


def _kill(federation: Federation, name: str) -> None:
    """A message is logged, and the agent is dead before it leaves."""
    log = federation.members[name].log
    lines = Tampering(federation.members[name].folder).lines
    sent = next(json.loads(line)["body"] for line in lines if b'"message":"Agree"' in line)
    log.append(ev.Egress(**{**sent, "msg_id": "77" * 16}), run=RUN, round=2)
    federation.restart(name, stop=False)


def _shape(line: str) -> str:
    """A line without its names and numbers."""
    line = re.sub(r"\b(?:rosendahl|vidir-modern|vidir-molemax|bcn|coordinator|graz|linz|vienna|hub)\b(?!')", "P", line)
    line = line.replace(".lesions/", ".F/").replace(".demo/", ".F/")
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\dZ", "T", line)
    line = re.sub(r"\d[\d.,]*(?: (?:B|kB|MB|GB)\b)?", "N", line)
    line = re.sub(r"\b(?:N|P)(?:, (?:N|P))+", "N", line)
    line = re.sub(r"P\.F/witness T(?:, P\.F/witness T)*", "W", line)
    line = re.sub(r" \(and N more like this\)", "", line)
    line = re.sub(rf"^(?:{'|'.join(DATA_CLASSES)}) ", "class ", line)
    line = re.sub(r": [a-z.]+ at T\b", ": an event at T", line)
    line = re.sub(r"\[entry .*\]$", "[entries]", line)
    line = re.sub(r"missing: .* ->|missing: .*$", "missing: whom", line)
    return re.sub(r"\b[NP]\b", "x", re.sub(r"\s+", " ", line)).strip()


def _commands(block: str) -> list[tuple[str, list[str]]]:
    """Each command of a block with the lines quoted below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ privacy-audit "), []))
        elif line != "...":
            found[-1][1].append(line)
    return found


def _played_here(command: str) -> list[str]:
    words: list[str] = []
    for word in shlex.split(command.replace("--seq 300", "--seq 60")):
        for theirs, ours in CAST.items():
            word = word.replace(theirs, ours)
        words += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    return words


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0] for block in BLOCKS])
def test_quoted_lines_are_what_the_commands_say(block: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    for command, quoted in _commands(block):
        done = CliRunner().invoke(main, _played_here(command))
        due = next((code for start, code in EXITS.items() if command.startswith(start)), 0)
        assert done.exit_code == due, done.output
        real = {_shape(line) for line in done.output.splitlines()}
        for line in quoted:
            assert _shape(line) in real, (line, sorted(real))


def test_page_quotes_a_clean_an_edited_and_a_rewritten_log() -> None:
    quoted = "\n".join(BLOCKS)
    for word in ("verdict: clean", "RootMismatch", "Fork", "NotWitnessed", "verdict: cannot decide"):
        assert word in quoted
    assert len(BLOCKS) >= 7
