"""One page about one round: proven entries, sentences that follow from them, and forgeries that do not pass."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lazaret.errors import ConfigError
from security.audit.claim import Claim, ClaimSubject
from security.audit.cli import main
from security.crypto import encoding
from security.log.note import KeyType, Note, NoteSigner
from tests.support.audit_attacks import Tampering, copied, with_signatures
from tests.support.audit_logs import Federation, small_federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return small_federation(tmp_path_factory.mktemp("claims"))


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def page(federation: Federation, tmp_path: Path) -> Path:
    target = tmp_path / "claim.txt"
    made = _run("claim", "site graz, round 2", *federation.folders, "--root-key", federation.root_key, "-o", target)
    assert made.exit_code == 0, made.output
    return target


def _check(federation: Federation, page: Path) -> Result:
    manifest = federation.hub.folder / "manifest.json"
    return _run("check-proof", page, "--manifest", manifest, "--root-key", federation.root_key)


def _with_proof(page: Path, change: object) -> None:
    """The page of somebody who changes the proof and writes the sentences that follow from it."""
    text = page.read_text()
    top, _, rest = text.partition("-----BEGIN PROOF-----\n")
    value = encoding.loads(base64.b64decode(rest.partition("-----END")[0].replace("\n", "")))
    change(value)  # type: ignore[operator]
    armoured = base64.b64encode(encoding.dumps(value)).decode()
    claim = Claim.parse(f"{top}-----BEGIN PROOF-----\n{armoured}\n-----END PROOF-----\n".encode())
    page.write_text(claim.page([json.loads(proof.line) for proof in claim.proofs]))


def test_page_says_what_left_and_check_proof_proves_it(federation: Federation, page: Path) -> None:
    text = page.read_text()
    assert text.startswith("lazaret claim 1\nsite graz, round 2, run run-1\n")
    for words in ("masked-vector", "It trained 40 steps", "epsilon", "cohort of 3", "hub.lesions/witness"):
        assert words in text
    told = _check(federation, page)
    assert told.exit_code == 0 and "every sentence of the page is an entry" in told.output
    assert "cosigned by hub.lesions/witness" in told.output
    assert _run("check-proof", page).exit_code == 3, "whose keys these are is not known"


def test_another_word_is_false(federation: Federation, page: Path) -> None:
    text = page.read_text()
    for old, new in (("cohort of 3", "cohort of 9"), ("round 2, run", "round 1, run"), ("epsilon 0", "epsilon 0.")):
        page.write_text(text.replace(old, new, 1))
        assert text != page.read_text()
        told = _check(federation, page)
        assert told.exit_code == 1 and "FALSE" in told.output
    page.write_text(text.replace("BEGIN PROOF", "BEGIN"))
    assert _check(federation, page).exit_code == 2


def test_another_entry_is_false(federation: Federation, page: Path) -> None:
    """The sentences follow from the entries here, so only the proofs of the entries can object."""

    def lie(value: dict[str, list[dict[str, str]]]) -> None:
        for entry in value["entries"]:
            entry["line"] = entry["line"].replace('"cohort_size":3', '"cohort_size":9')

    _with_proof(page, lie)
    assert "cohort of 9" in page.read_text()
    assert _check(federation, page).exit_code == 1


def test_entries_of_another_log_or_round_are_false(federation: Federation, page: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    _run("claim", "site linz, round 1", *federation.folders, "-o", other)
    other.write_text(other.read_text().replace("site linz, round 1", "site graz, round 1", 1))
    assert _check(federation, other).exit_code == 1


def test_invented_witness_is_not_proven(federation: Federation, page: Path) -> None:
    """Anybody can add a signature line under a name of the own choice. The page would then name that witness."""
    ours = NoteSigner.from_seed("regulator.lesions/witness", bytes(32), KeyType.COSIGNER)

    def add(value: dict[str, str]) -> None:
        note = Note.parse(value["head"].encode())
        value["head"] = with_signatures(note, ours.cosign(note.text, 1_800_000_000)).encode().decode()

    _with_proof(page, add)
    assert "regulator.lesions/witness" in page.read_text()
    told = _check(federation, page)
    assert told.exit_code == 3 and "not in this manifest" in told.output


def test_log_that_fails_makes_no_page(federation: Federation, tmp_path: Path) -> None:
    changed = copied(federation.members["graz"].folder, tmp_path / "graz")
    Tampering(changed).edit(5, lambda entry: entry.update(actor="somebody else"))
    told = _run("claim", "site graz, round 1", changed, "-o", tmp_path / "x.txt")
    assert told.exit_code == 1 and "fails verification" in told.output
    assert not (tmp_path / "x.txt").exists()


@pytest.mark.parametrize(
    "subject", ["graz", "site graz", "site graz, round x", "site nobody, round 1", "site hub, round 1"]
)
def test_unclear_subject_is_refused(subject: str, federation: Federation) -> None:
    assert _run("claim", subject, *federation.folders).exit_code == 2


def test_subject_names_its_run() -> None:
    assert str(ClaimSubject.parse("coordinator hub, round 7, run r.1")) == "coordinator hub, round 7, run r.1"
    with pytest.raises(ConfigError):
        ClaimSubject.parse("site a, round 1; drop")


def test_coordinator_has_pages_too(federation: Federation, tmp_path: Path) -> None:
    page = tmp_path / "hub.txt"
    assert _run("claim", "coordinator hub, round 1", *federation.folders, "-o", page).exit_code == 0
    assert "It published the sum of 3 vectors" in page.read_text()
    assert _check(federation, page).exit_code == 0
    assert _run("claim", "coordinator hub, round 99", *federation.folders).exit_code == 2
