"""privacy-audit as an auditor meets it: on copies, offline, with and without the consortium's root."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from security.audit.cli import main
from security.audit.verify import verify
from security.log.keys import EpochKeys
from tests.support.audit_attacks import Tampering, copied
from tests.support.audit_logs import Federation
from tests.support.consortium_world import World


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _json(*arguments: object) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(_run(*arguments, "--json").stdout)
    return data


def test_verify_clean_and_pinned(signed: Federation, root_pem: Path) -> None:
    result = _run("verify", *signed.folders, "--root-key", root_pem)
    assert result.exit_code == 0, result.output
    assert "verdict: clean" in result.output
    assert "KeysNotPinned" not in result.output
    assert "epsilon" in result.output


def test_verify_says_where_keys_come_from(signed: Federation) -> None:
    result = _run("verify", signed.hub.folder)
    assert result.exit_code == 0
    assert "keys taken from the log itself; pin them with --root-key" in result.output


def test_wrong_root_is_a_finding(signed: Federation, tmp_path: Path, root_pem: Path) -> None:
    other = World.enrolled(tmp_path / "other", sites=())
    result = _run("verify", signed.hub.folder, "--root-key", other.authority.folder / "root.pem")
    assert result.exit_code == 1
    assert "ManifestRejected" in result.output


def test_verify_json(signed: Federation, root_pem: Path) -> None:
    data = _json("verify", signed.members["graz"].folder, "--root-key", root_pem)
    log = data["logs"][0]
    assert data["verdict"] == "clean"
    assert log["origin"] == "graz.lesions/audit"
    assert log["epsilon"]["unit"] == "patient"
    others = ("hub", "linz", "steyr", "vienna", "wels")
    assert set(log["witnesses"]) == {f"{name}.lesions/witness" for name in others}
    assert log["egress"]["masked-vector"]["messages"] == 4


@pytest.mark.parametrize("name", ["cross", "compare"])
def test_cross_clean(signed: Federation, root_pem: Path, name: str) -> None:
    result = _run(name, *signed.folders, "--root-key", root_pem)
    assert result.exit_code == 0, result.output
    assert "messages match at both ends" in result.output
    data = _json(name, *signed.folders, "--root-key", root_pem)
    assert data["verdict"] == "clean"
    assert data["matched_messages"] == sum(
        total["messages"] for log in data["logs"] for total in log["egress"].values()
    )


def test_finding_beats_cannot_decide(signed: Federation, tmp_path: Path) -> None:
    """One log missing (3) and one log changed (1): the exit code is 1, and both are said."""
    changed = copied(signed.members["graz"].folder, tmp_path / "graz")
    Tampering(changed).edit(5, lambda entry: entry.update(actor="somebody else"))
    assert _run("cross", signed.hub.folder).exit_code == 3
    result = _run("cross", signed.hub.folder, changed)
    assert result.exit_code == 1
    assert "RootMismatch" in result.output
    assert "LogMissing" in result.output
    assert "verdict: findings" in result.output


def test_a_log_that_is_lost_is_a_note_if_the_auditor_says_so(signed: Federation, root_pem: Path) -> None:
    given = (*(path for path in signed.folders if path.name != "linz"), "--root-key", root_pem)
    assert _run("cross", *given).exit_code == 3
    result = _run("cross", *given, "--lost", "linz")
    assert result.exit_code == 0 and "LogLost" in result.output and "messages match" in result.output
    assert _run("cross", *given, "--lost", "graz").exit_code == 3, "only the one that is named"
    stranger = _run("cross", *given, "--lost", "nobody")
    assert stranger.exit_code == 2 and "nobody is no party" in stranger.output


def test_fork_evidence_travels(signed: Federation, tmp_path: Path, root_pem: Path) -> None:
    folders = [copied(path, tmp_path / path.name) for path in signed.folders]
    tampering, hub = Tampering(folders[0]), signed.hub
    tampering.edit(5, lambda entry: entry.update(actor="somebody else"))
    tampering.strip_cosignatures()
    tampering.resign(EpochKeys(hub.keys, hub.party.origin, signed.rng).load(0))
    result = _run("cross", *folders, "--evidence", tmp_path / "evidence")
    assert result.exit_code == 1
    proof = next((tmp_path / "evidence").glob("fork-*.json"))
    assert _run("check-proof", proof).exit_code == 3
    told = _run("check-proof", proof, "--manifest", hub.folder / "manifest.json", "--root-key", root_pem)
    assert told.exit_code == 0, "proven"
    assert "two histories" in told.output


def test_held_head_shows_a_cut_tail(signed: Federation, tmp_path: Path) -> None:
    path = copied(signed.members["graz"].folder, tmp_path / "graz")
    held = next((signed.hub.folder / "witness").glob("graz*.json"))
    tampering = Tampering(path)
    tampering.cut(tampering.folder.checkpoint_sizes()[3])
    (path / "cosigned.note").unlink()
    result = _run("verify", path, "--held", held)
    assert result.exit_code == 1
    assert "TruncatedTail" in result.output


@pytest.mark.parametrize("by", ["round", "class", "message"])
def test_egress_totals(signed: Federation, by: str) -> None:
    data = _json("egress", signed.members["linz"].folder, "--by", by)
    log = _json("verify", signed.members["linz"].folder)["logs"][0]
    assert sum(row["bytes"] for row in data["rows"]) == sum(total["bytes"] for total in log["egress"].values())
    assert all(row["surplus"] == 0 for row in data["rows"])
    assert "blocked by the egress filter: 0" in _run("egress", signed.members["linz"].folder, "--by", by).output


def test_epsilon(signed: Federation) -> None:
    data = _json("epsilon", signed.members["graz"].folder, "--recompute")["epsilon"]
    assert data["pld"] < data["best_rdp"] <= data["epsilon"] < data["cap"]
    assert len(data["rounds"]) == 4
    assert "second opinions" in _run("epsilon", signed.members["graz"].folder).output
    assert "no differential privacy" in _run("epsilon", signed.members["linz"].folder).output


def test_heads(signed: Federation, root_pem: Path) -> None:
    data = _json("heads", signed.members["graz"].folder, "--root-key", root_pem)
    assert any(head["epochs"] == [0, 1] for head in data["heads"])
    assert "witnessed up to" in _run("heads", signed.members["graz"].folder).output


def test_prove_and_check(signed: Federation, tmp_path: Path, root_pem: Path) -> None:
    proof, manifest = tmp_path / "entry.tlog-proof", signed.hub.folder / "manifest.json"
    assert _run("prove", signed.members["graz"].folder, "--seq", 7, "-o", proof).exit_code == 0
    assert proof.read_text().startswith("c2sp.org/tlog-proof@v1\n")
    assert _run("check-proof", proof).exit_code == 3
    result = _run("check-proof", proof, "--manifest", manifest, "--root-key", root_pem)
    assert result.exit_code == 0, result.output
    assert "entry 7 of graz.lesions/audit" in result.output
    told = _json("check-proof", proof, "--manifest", manifest)
    assert told["entry"]["seq"] == 7
    text = proof.read_bytes()
    proof.write_bytes(text.replace(b"index 7", b"index 8"))
    assert _run("check-proof", proof, "--manifest", manifest).exit_code == 1
    proof.write_bytes(text[:-9])
    assert _run("check-proof", proof, "--manifest", manifest).exit_code == 2, "unreadable"
    assert _run("prove", signed.members["graz"].folder, "--seq", 99_999, "-o", proof).exit_code == 2


def test_report(signed: Federation, tmp_path: Path, root_pem: Path) -> None:
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    assert _run("report", *signed.folders, "--root-key", root_pem, "-o", page).exit_code == 0
    text = page.read_text()
    for heading in (
        "Clean",
        "What was checked, and what could not be",
        "Round by round",
        "Everything that left, by class of data",
        "Differential privacy",
        "Cohorts and witnesses over time",
        "Findings",
        "Regulation map",
        "How to repeat this",
    ):
        assert heading in text
    assert "<svg" in text
    assert text.count(">holds</span>") == 7, "the conditions for `prototypes never left`"
    assert "<script" not in text
    assert "src=" not in text
    assert _run("report", *signed.folders, "-o", data).exit_code == 0
    rounds = json.loads(data.read_text())["rounds"]
    assert [item["round"] for item in rounds] == [1, 2, 3, 4]
    assert rounds[2]["dropouts"] == ["vienna"]
    assert _run("report", *signed.folders, "-o", tmp_path / "report.doc").exit_code == 2


def test_report_of_a_changed_log_says_so(signed: Federation, tmp_path: Path) -> None:
    changed = copied(signed.members["graz"].folder, tmp_path / "graz")
    Tampering(changed).edit(5, lambda entry: entry.update(actor="somebody else"))
    page = tmp_path / "report.html"
    assert _run("report", signed.hub.folder, changed, "-o", page).exit_code == 1
    assert "Do not rely on these logs" in page.read_text()
    assert "<strong>RootMismatch</strong>: the entries do not lead to a signed checkpoint" in page.read_text()
    assert "Until they are explained, what holds above" in page.read_text()


def test_usage_errors(tmp_path: Path, signed: Federation) -> None:
    assert _run("verify").exit_code == 2
    assert _run("verify", tmp_path / "nothing").exit_code == 2
    assert _run("verify", tmp_path).exit_code == 3, "an empty folder is no pass"
    bad = tmp_path / "root.pem"
    bad.write_text("not a certificate")
    assert _run("verify", signed.hub.folder, "--root-key", bad).exit_code == 2


def test_unreadable_part_is_no_pass(signed: Federation, tmp_path: Path) -> None:
    path = copied(signed.members["linz"].folder, tmp_path / "linz")
    (path / "checkpoints" / "4.note").mkdir()
    assert "HostileFolder" in _run("verify", path).stdout
    assert _run("verify", path).exit_code == 1


def test_export_adds_up_what_left(signed: Federation, tmp_path: Path) -> None:
    folders = [path for path in signed.folders if path.name != "hub"]
    rows = [json.loads(line) for line in _run("export", *folders, "--format", "jsonl").stdout.splitlines()]
    logs = [verify(path, signed.pinned) for path in folders]
    assert sum(row["bytes"] for row in rows) == sum(log.ledger.total for log in logs)
    assert {row["surplus"] for row in rows} == {0}
    target = tmp_path / "left.csv"
    assert _run("export", *folders, "-o", target).exit_code == 0
    lines = target.read_text().splitlines()
    assert lines[0] == "party,run,round,data_class,messages,bytes,surplus" and len(lines) == len(rows) + 1


def test_report_names_root_date_purpose_and_both_verdicts(signed: Federation, tmp_path: Path, root_pem: Path) -> None:
    page = tmp_path / "report.html"
    assert _run("report", *signed.folders, "--root-key", root_pem, "-o", page).exit_code == 0
    text = page.read_text()
    assert signed.world is not None and signed.world.root_fingerprint in text
    for words in ("Record intact:", "Rules kept:", "Date of the check", "consent, study 12", "% sure"):
        assert words in text, words


def test_bench_small(tmp_path: Path) -> None:
    data = _json("bench", "--entries", 3000, "--appends", 20, "--folder", tmp_path)
    assert {"verify_over_plain_read", "append_over_bare_fsync", "checkpoint_ms"} <= data.keys()
    assert data["findings"] == [], "a log like a site's, with nothing wrong"
    assert data["entries"] >= 3000
    assert 400 <= data["entry_bytes"] <= 600
    assert data["syncs_of_an_append"] == 1


def test_bench_of_many_logs(tmp_path: Path) -> None:
    data = _json("bench", "--entries", 1000, "--logs", 4, "--folder", tmp_path)
    assert data["findings"] == [] and data["messages"] == data["receipts"] > 500
    assert data["cross_s"] > 0 and data["peak_mb"] > 0


def test_cross_runs_with_what_an_auditor_installs(signed: Federation, root_pem: Path, tmp_path: Path) -> None:
    """Neither torch nor grpc nor ray, nor anything else that only other roles install."""
    program = (
        "import sys\n"
        "OTHERS = {'torch', 'grpc', 'google', 'ray', 'opacus', 'timm', 'rich', 'safetensors', 'sklearn', 'PIL'}\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in OTHERS:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from security.audit.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    page = tmp_path / "report.html"
    for command in (["cross"], ["report", "-o", str(page)]):
        told = [*command, *map(str, signed.folders), "--root-key", str(root_pem)]
        done = subprocess.run([sys.executable, "-c", program, *told], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert page.read_text().startswith("<!")


def test_help_is_quick_and_light() -> None:
    """No torch, no grpc, no accountant, no templates: help answers at once."""
    program = (
        "import sys, time; start = time.process_time()\n"
        "from security.audit.cli import main\n"
        "try: main(['verify', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'grpc', 'numpy', 'scipy', 'dp_accounting', 'pydantic', 'jinja2'} & set(sys.modules)\n"
        "print(round(time.process_time() - start, 3), sorted(heavy), file=sys.stderr)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert time.perf_counter() - start < 20
    seconds, _, heavy = done.stderr.strip().partition(" ")
    assert heavy == "[]"
    assert float(seconds) < 0.5


def test_verify_imports_neither_torch_nor_grpc(signed: Federation) -> None:
    program = (
        "import sys\n"
        "from security.audit.cli import main\n"
        f"try: main(['verify', {str(signed.members['linz'].folder)!r}])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'dp_accounting'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr.strip().endswith("[]")
