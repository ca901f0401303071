"""The second verifier, written from docs/spec/audit-log.md alone, and `privacy-audit` come to the same verdicts.

On the logs in `logs`, which have every event type; on each case of `logs/cases.json`; on rules that a log's owner
breaks under its own signature; and on mutations of real logs under fixed seeds.
"""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from reference import audit_evidence, audit_formats
from reference.audit_verifier import Verifier

from security.audit.agreement import keys_for, keys_of
from security.audit.compare import cross
from security.audit.proof import prove
from security.audit.verify import verify
from security.log.egress import due_bytes, permitted
from security.log.schema import ENVELOPE, SCHEMAS
from tests.attacks.audit.test_audit_conformance import CASES, GROUPED, WHOLE, _rewritten, _told, _without_types
from tests.attacks.audit.test_audit_conformance import grouped as grouped  # fixtures
from tests.attacks.audit.test_audit_conformance import private as private
from tests.attacks.audit.test_audit_counted import BESIDE
from tests.attacks.audit.test_audit_fuzz import _fuzz
from tests.attacks.audit.test_audit_fuzz import changed as changed  # a fixture
from tests.attacks.audit.test_audit_hostile import HOSTILE
from tests.attacks.audit.test_audit_membership import less_isolated as less_isolated  # a fixture
from tests.attacks.audit.test_audit_second_signature import alone, forged_log, unadopted, with_forged_manifest
from tests.attacks.audit.test_audit_second_signature import federation as federation  # a fixture
from tests.attacks.audit.test_audit_second_signature import skipping as skipping  # a fixture
from tests.attacks.audit.test_audit_steps import STEPS
from tests.support.audit_logs import Federation

HERE = Path(__file__).parent
WORDS = {0: "clean", 1: "findings", 3: "cannot decide"}
TRIED: list[dict[str, Any]] = json.loads((HERE / "logs" / "cases.json").read_text())
MUTATIONS = 60


def derive_leaves(path: Path) -> None:
    lines = [line for file in sorted((path / "segments").glob("*")) for line in file.read_bytes().split(b"\n")[:-1]]
    (path / "leaves.bin").write_bytes(b"".join(map(audit_formats.leaf, lines)))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    with tarfile.open(HERE / "logs" / "federation.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    for path in folder.iterdir():
        if path.is_dir():
            (path / "witness").mkdir(exist_ok=True)
            derive_leaves(path)
    return folder


def _root(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_reference_imports_nothing_of_ours() -> None:
    for file in (HERE / "reference").glob("audit_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots = {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots = set() if node.level else {(node.module or "").split(".")[0]}
            else:
                continue
            assert not roots & {"lazaret", "security", "npr", "protos", "site_agent", "coordinator", "tests", "scripts"}


def test_page_has_the_expression_of_every_event() -> None:
    """So that an entry which one of the two accepts is accepted by the other: the expressions are the same."""
    assert audit_formats.lines().keys() == SCHEMAS.keys()
    for name, schema in SCHEMAS.items():
        ours = re.sub(r"\(\?P<\w+>", "(?:", schema.line.pattern.replace("}+", "}"))
        theirs = audit_formats.lines()[name].pattern
        assert _bare(ours) == _bare(theirs), name
    assert len(ENVELOPE) == 10


def _bare(pattern: str) -> str:
    """Groups that only name a field, or enclose an expression, say nothing about what matches."""
    return pattern.replace("(?:", "").replace(")", "")


def test_page_has_the_length_of_every_message() -> None:
    """Class of data and length of all messages of a site, over many shapes; a shape that one refuses, both refuse."""
    assert audit_formats.classes() == dict(permitted())
    draw = random.Random("shapes")
    for name in audit_formats.classes():
        for _ in range(40):
            # Around the bounds of lists, too: 255 of a cohort, 63 hashes, 64 signatures, 4096 keys.
            cohort, vector = draw.randint(1, 260), draw.randint(1, 3_000_000)
            frames = draw.randint(0, 3) if name == "UploadFrame" else draw.choice((1, 1, 2))
            shape = {
                "cohort": cohort,
                "cosigned": draw.choice((0, 3, 62, 63, 64)),
                "epochs": draw.choice((0, 4000, 4096, 4097)),
                "frame": draw.randint(0, -(-vector // audit_formats.FRAME)),
                "frames": frames,
                "head_signatures": draw.choice((1, 2, 64, 65)),
                "named": draw.choice((None, "a", "vienna", "vienna.lesions/audit")),
                "path": min(cohort - 1, draw.choice((0, 5, 63, 64, 255, 256))),
                "vector_bytes": vector,
            }
            try:
                theirs = audit_formats.due_bytes(name, "graz.lesions/audit", shape)
            except audit_formats.Invalid:
                theirs = None
            assert theirs == due_bytes(name, "graz.lesions/audit", shape), (name, shape)


def test_vectors_have_every_event_and_both_find_them_clean(vectors: Path) -> None:
    seen = set()
    for path in sorted(one for one in vectors.iterdir() if one.is_dir()):
        keys = keys_for(path, vectors / "root.pem")
        assert not keys.agreements.problems, "manifests have another form now: run tests/vectors/generate_logs.py"
        second = Verifier(path, _root(vectors / "root.pem"))
        assert (second.wrong, second.open) == ([], []), path.name
        assert verify(path, keys).exit_code == 0
        seen |= {entry["type"] for entry in second.entries}
    assert seen == set(SCHEMAS)


def test_vectors_agree_with_each_other(vectors: Path) -> None:
    folders = [path for path in vectors.iterdir() if path.is_dir()]
    result = cross(folders, {path: keys_for(path, vectors / "root.pem") for path in folders})
    assert result.exit_code == 0, [finding for finding in result.findings if finding.severity.value != "note"]


def changed_bytes(change: dict[str, Any], data: bytes) -> bytes:
    match change:
        case {"replace": [old, new]}:
            assert old.encode() in data, "the case no longer fits the vectors"
            return data.replace(old.encode(), new.encode(), 1)
        case {"swap": [one, other]}:
            lines = data.split(b"\n")
            lines[one], lines[other] = lines[other], lines[one]
            return b"\n".join(lines)
        case {"drop": count}:
            return b"".join(data.splitlines(keepends=True)[:-count])
        case {"strip": count}:
            return data[:-count]
        case {"append": text}:
            return data + text.encode()
    raise AssertionError("an unknown change")


def apply(case: dict[str, Any], folder: Path) -> None:
    """Make the changes of a case; leaves.bin follows, as whoever changes entries would make it."""
    for change in case["changes"]:
        file = folder / change["file"]
        if "delete" in change:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        elif "rename" in change:
            file.rename(folder / change["rename"])
        elif "write" in change:
            file.parent.mkdir(exist_ok=True)
            file.write_text(change["write"])
        else:
            file.write_bytes(changed_bytes(change, file.read_bytes()))
    if not any(change["file"] == "leaves.bin" for change in case["changes"]):
        derive_leaves(folder)


@pytest.mark.parametrize("case", TRIED, ids=lambda case: case["name"])
def test_cases(case: dict[str, Any], vectors: Path, tmp_path: Path) -> None:
    path = tmp_path / case["log"]
    shutil.copytree(vectors / case["log"], path)
    apply(case, path)
    second = Verifier(path, _root(vectors / "root.pem"))
    assert WORDS[second.verdict] == case["expect"], (second.wrong, second.open)
    found = verify(path, keys_for(path, vectors / "root.pem"))
    assert WORDS[found.exit_code] == case["expect"], found.findings


@pytest.mark.parametrize("name", CASES)
def test_both_find_a_broken_rule(name: str, private: Federation, tmp_path: Path) -> None:
    who, kind, change, _ = CASES[name]
    path = _told(private, tmp_path, who, kind, change)
    assert Verifier(path, _root(private.root_key)).verdict == 1
    assert verify(path, keys_for(path, private.root_key)).exit_code == 1


@pytest.mark.parametrize("name", GROUPED)
def test_both_find_a_breach_of_groups(name: str, grouped: Federation, tmp_path: Path) -> None:
    who, kind, change, _ = GROUPED[name]
    assert Verifier(grouped.members[who].folder, _root(grouped.root_key)).verdict == 0
    path = _told(grouped, tmp_path, who, kind, change)
    assert Verifier(path, _root(grouped.root_key)).verdict == 1
    assert verify(path, keys_for(path, grouped.root_key)).exit_code == 1


@pytest.mark.parametrize("name", [*WHOLE, *STEPS])
def test_both_find_a_broken_sequence(name: str, private: Federation, tmp_path: Path) -> None:
    who, change, _ = {**WHOLE, **STEPS}[name]
    path = _rewritten(private, tmp_path, who, change)
    assert Verifier(path, _root(private.root_key)).verdict == verify(path, keys_for(path, private.root_key)).exit_code


def test_both_find_a_vector_without_its_plugin(grouped: Federation, tmp_path: Path) -> None:
    path = _rewritten(grouped, tmp_path, "site0", _without_types("plugin.loaded"))
    assert Verifier(path, _root(grouped.root_key)).verdict == 1
    assert verify(path, keys_for(path, grouped.root_key)).exit_code == 1


@pytest.mark.parametrize("name", BESIDE)
def test_both_find_a_false_count_or_receipt_and_an_open_process(name: str, private: Federation, tmp_path: Path) -> None:
    change, _, verdict, _ = BESIDE[name]
    path = _rewritten(private, tmp_path, "graz", change)
    assert Verifier(path, _root(private.root_key)).verdict == verdict
    assert verify(path, keys_for(path, private.root_key)).exit_code == verdict


def test_both_judge_isolation_by_the_manifest_in_force(less_isolated: Federation) -> None:
    for path in less_isolated.folders:
        second = Verifier(path, _root(less_isolated.root_key))
        assert second.verdict == verify(path, keys_for(path, less_isolated.root_key)).exit_code
        assert len(second.wrong) == (path.name != "hub"), "only what was trained under the second one"


@pytest.mark.parametrize("name", HOSTILE)
def test_both_read_nothing_of_a_hostile_folder(name: str, vectors: Path, tmp_path: Path) -> None:
    path = tmp_path / "graz"
    shutil.copytree(vectors / "graz", path)
    for folder in ("annex", "evidence"):
        (path / folder).mkdir(exist_ok=True)
    HOSTILE[name](path)
    second = Verifier(path, _root(vectors / "root.pem"))
    assert second.verdict == 1 and not second.entries


@pytest.mark.parametrize("party", ["graz", "hub", "linz"])
def test_both_find_every_mutation(party: str, changed: Federation, tmp_path: Path) -> None:
    root = _root(changed.root_key)

    def judge(path: Path) -> int:
        second = Verifier(path, root).verdict
        assert (second == 0) == (verify(path, keys_for(path, changed.root_key)).exit_code == 0)
        return second

    seeds = [f"second {party} {seed}" for seed in range(MUTATIONS // 3)]
    _fuzz(changed.members[party].folder, changed.members["vienna"].folder, tmp_path / "log", seeds, judge)


def test_proof_is_checked_by_both(vectors: Path) -> None:
    proof = prove(vectors / "graz", 7)
    genesis = audit_formats.entry_of((vectors / "graz" / "segments" / "00000000.jsonl").read_bytes().split(b"\n")[0])
    root = audit_formats.key_of(genesis["body"]["root_vkey"])
    assert audit_evidence.check_proof(proof.encode(), root)["seq"] == 7
    for forged in (proof.encode().replace(b"index 7", b"index 8"), proof.encode()[:-30]):
        with pytest.raises(audit_formats.Invalid):
            audit_evidence.check_proof(forged, root)


# Two signatures


def unadopted_alone(federation: Federation, path: Path) -> Path:
    """The log ends before version 2, and does not have it."""
    return alone(unadopted(federation, path))


@pytest.mark.parametrize("made", [None, forged_log, unadopted, unadopted_alone, with_forged_manifest])
def test_both_verifiers_ask_for_the_second_signature(federation: Federation, tmp_path: Path, made: Any) -> None:
    """With the root's ML-DSA key, which is after the certificate in root.pem, and without it."""
    path = federation.members["graz"].folder if made is None else made(federation, tmp_path / "graz")
    root = federation.root_key
    second = serialization.load_pem_public_key(b"-----BEGIN PUBLIC" + root.read_bytes().split(b"-----BEGIN PUBLIC")[1])
    key = second.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()
    reference = Verifier(path, _root(root), ml_dsa=key)
    due = {None: 0, unadopted_alone: 3}.get(made, 1)
    assert verify(path, keys_for(path, root)).exit_code == reference.verdict == due
    certificate = tmp_path / "root.pem"
    certificate.write_bytes(root.read_bytes().split(b"-----BEGIN PUBLIC")[0])
    assert verify(path, keys_for(path, certificate)).exit_code == Verifier(path, _root(certificate)).verdict


def test_both_verifiers_join_manifests_over_a_version_that_was_skipped(skipping: Federation) -> None:
    path, hub, root = skipping.members["graz"].folder, skipping.hub.folder, skipping.root_key
    second = serialization.load_pem_public_key(b"-----BEGIN PUBLIC" + root.read_bytes().split(b"-----BEGIN PUBLIC")[1])
    key = second.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()
    assert Verifier(path, _root(root), ml_dsa=key).verdict == verify(path, keys_for(path, root)).exit_code == 3
    together = verify(path, keys_of([path, hub], root)[path])
    assert Verifier(path, _root(root), ml_dsa=key, others=[hub]).verdict == together.exit_code == 0
