"""Heads that an auditor remembers from visit to visit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from security.audit.cli import main
from security.log import events as ev
from security.log.keys import EpochKeys
from tests.support.audit_attacks import Tampering, copied
from tests.support.audit_logs import Federation, small_federation


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return small_federation(tmp_path / "federation")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _remember(federation: Federation, path: Path, store: Path, *extra: object) -> Result:
    return _run("remember", path, "--root-key", federation.root_key, "--store", store, *extra)


def test_a_log_that_grew_is_remembered_anew(federation: Federation, tmp_path: Path) -> None:
    graz, store = federation.members["graz"], tmp_path / "store"
    first = _remember(federation, graz.folder, store)
    assert first.exit_code == 0 and "seen for the first time" in first.output
    before = graz.log.size
    federation.reopen(graz)
    graz.log.append(ev.OperatorAction(command="status", role="operator"))
    graz.log.close()
    told = json.loads(_remember(federation, graz.folder, store, "--json").stdout)
    assert (told["logs"][0]["before"], told["logs"][0]["remembered"]) == (before, before + 1)


def test_rollback_and_fork_against_the_remembered_head(federation: Federation, tmp_path: Path) -> None:
    """Without the remembered head, a log that was cut, or cut and written anew, looks like one that is younger."""
    graz, store = federation.members["graz"], tmp_path / "store"
    assert _remember(federation, graz.folder, store).exit_code == 0
    kept = {path.name: path.read_bytes() for path in store.iterdir()}
    cut = copied(graz.folder, tmp_path / "cut")
    tampering = Tampering(cut)
    tampering.cut(tampering.folder.checkpoint_sizes()[4])
    tampering.folder.cosigned.unlink()
    told = _remember(federation, cut, store)
    assert told.exit_code == 1 and "TruncatedTail" in told.output
    anew = copied(graz.folder, tmp_path / "anew")
    tampering = Tampering(anew)
    tampering.edit(5, lambda entry: entry.update(actor="somebody else"))
    tampering.strip_cosignatures()
    tampering.resign(EpochKeys(graz.keys, graz.party.origin, federation.rng).load(0))
    told = _remember(federation, anew, store, "--evidence", tmp_path / "evidence")
    assert told.exit_code == 1 and "Fork" in told.output
    proof = next((tmp_path / "evidence").glob("fork-*.json"))
    checked = _run("check-proof", proof, "--manifest", graz.folder / "manifest.json", "--root-key", federation.root_key)
    assert checked.exit_code == 0, "the two heads convict the log's owner, without any log"
    assert {path.name: path.read_bytes() for path in store.iterdir()} == kept, "what is wrong is not remembered"
    for path in (cut, anew):
        twin = _remember(federation, path, tmp_path / f"store of {path.name}")
        assert "TruncatedTail" not in twin.output and "Fork" not in twin.output, "twin: nothing was remembered"


def test_remembered_head_of_somebody_else_is_no_comparison(federation: Federation, tmp_path: Path) -> None:
    """A head under other keys, or none: never silently "seen for the first time"."""
    store = tmp_path / "store"
    assert _remember(federation, federation.members["graz"].folder, store).exit_code == 0
    file = next(store.iterdir())
    genuine = file.read_bytes()
    held = genuine.replace(b"graz.lesions/audit", b"linz.lesions/audit")
    file.write_bytes(held)
    told = _remember(federation, federation.members["graz"].folder, store)
    assert told.exit_code == 1 and "KeysReplaced" in told.output
    file.write_bytes(b"{}\n")
    assert _remember(federation, federation.members["graz"].folder, store).exit_code == 2
    file.write_bytes(genuine)
    assert _remember(federation, federation.members["graz"].folder, store).exit_code == 0


def test_an_older_copy_does_not_replace_what_is_remembered(federation: Federation, tmp_path: Path) -> None:
    """A replay: the log as it was at the last but one visit, genuine throughout."""
    graz, store = federation.members["graz"], tmp_path / "store"
    older = copied(graz.folder, tmp_path / "older")
    federation.reopen(graz)
    graz.log.append(ev.OperatorAction(command="status", role="operator"))
    graz.log.close()
    assert _remember(federation, graz.folder, store).exit_code == 0
    kept = next(store.iterdir()).read_bytes()
    assert _remember(federation, older, store).exit_code == 1
    assert next(store.iterdir()).read_bytes() == kept
