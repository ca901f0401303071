"""A regulator as witness: a key, a line in the manifest, and a command that signs what it has seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from lazaret.errors import ManifestRejected
from security.audit.cli import main
from security.identity.acceptance import public_pem
from security.identity.rules import check_distinct_keys
from security.log.keys import EpochKeys
from security.log.note import KeyType, NoteSigner
from security.log.roster import audit_roster
from tests.support.audit_attacks import Tampering, copied
from tests.support.audit_logs import Federation
from tests.support.consortium_world import PLAN, World


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


class Regulator:
    """A federation whose manifest lists a regulator, and the regulator's desk."""

    def __init__(self, folder: Path) -> None:
        self.key, self.store = folder / "regulator.key", folder / "seen"
        made = _run("witness-key", "regulator", "--federation", "lesions", "-o", self.key)
        assert made.exit_code == 0 and self.key.stat().st_mode & 0o777 == 0o600
        world = World.make(folder / "world")
        world.write_plan(PLAN + "[audit]\n" + made.stdout)
        self.federation = Federation.from_world(world, folder / "logs")
        self.federation.play()
        self.federation.stop()
        self.graz = self.federation.members["graz"]

    def cosign(self, path: Path, store: Path | None = None) -> Result:
        chosen = store or self.store
        return _run("cosign", path, "--root-key", self.federation.root_key, "--key", self.key, "--store", chosen)

    def rewritten(self, target: Path) -> Path:
        tampering = Tampering(copied(self.graz.folder, target))
        tampering.edit(5, lambda entry: entry.update(actor="somebody else"))
        tampering.strip_cosignatures()
        signer = EpochKeys(self.graz.keys, self.graz.party.origin, self.federation.rng).load(0)
        tampering.resign(signer)
        return target


@pytest.fixture(scope="module")
def regulator(tmp_path_factory: pytest.TempPathFactory) -> Regulator:
    return Regulator(tmp_path_factory.mktemp("regulator"))


def test_cosigned_head_proves_who_saw_what(regulator: Regulator) -> None:
    told = regulator.cosign(regulator.graz.folder)
    assert told.exit_code == 0 and "cosigned as regulator.lesions/witness" in told.output
    file = next(regulator.store.iterdir())
    manifest, root = regulator.graz.folder / "manifest.json", regulator.federation.root_key
    checked = _run("check-proof", file, "--manifest", manifest, "--root-key", root)
    assert checked.exit_code == 0 and "seen by regulator.lesions/witness" in checked.output
    assert _run("check-proof", file).exit_code == 3
    forged = regulator.store.parent / "forged.json"
    forged.write_bytes(re.sub(rb"audit.n[0-9]+.n", rb"audit\\n9\\n", file.read_bytes()))
    assert forged.read_bytes() != file.read_bytes()
    assert _run("check-proof", forged, "--manifest", manifest, "--root-key", root).exit_code == 1


def test_fork_is_not_cosigned_and_the_head_that_was_seen_convicts(regulator: Regulator, tmp_path: Path) -> None:
    assert regulator.cosign(regulator.graz.folder).exit_code == 0
    kept = next(regulator.store.iterdir()).read_bytes()
    path = regulator.rewritten(tmp_path / "graz")
    told = regulator.cosign(path)
    assert told.exit_code == 1 and "not cosigned" in told.output and "Fork" in told.output
    assert next(regulator.store.iterdir()).read_bytes() == kept
    held = _run("verify", path, "--held", next(regulator.store.iterdir()), "--root-key", regulator.federation.root_key)
    assert held.exit_code == 1 and "Fork" in held.output
    twin = regulator.cosign(path, tmp_path / "fresh")
    assert "Fork" not in twin.output and "cosigned as" in twin.output, "twin: a witness without memory signs it"


def test_nothing_is_built_on_one_signature(regulator: Regulator, tmp_path: Path) -> None:
    """The root has an ML-DSA key by now, and the log is from before it: a forger of Ed25519 could have made it."""
    root = tmp_path / "root.pem"
    second = public_pem(MLDSA65PrivateKey.generate().public_key())
    root.write_bytes(regulator.federation.root_key.read_bytes() + second)
    store, log = tmp_path / "seen", regulator.graz.folder
    told = _run("cosign", log, "--root-key", root, "--key", regulator.key, "--store", store)
    assert told.exit_code == 3 and "not cosigned" in told.output and not store.exists()
    claimed = _run("claim", "site graz, round 1", log, "--root-key", root)
    assert claimed.exit_code == 1 and "OneSignature" in claimed.output
    assert _run("remember", log, "--root-key", root, "--store", store).exit_code == 3 and not store.exists()
    assert regulator.cosign(log, store).exit_code == 0 and store.exists(), "twin: with the certificate alone"
    assert _run("claim", "site graz, round 1", log, "--root-key", regulator.federation.root_key).exit_code == 0


def test_unlisted_key_and_second_key_file_are_refused(regulator: Regulator, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.key"
    assert _run("witness-key", "stranger", "--federation", "lesions", "-o", stranger).exit_code == 0
    assert _run("witness-key", "stranger", "--federation", "lesions", "-o", stranger).exit_code == 2, "not overwritten"
    assert _run("witness-key", "a b", "--federation", "lesions", "-o", tmp_path / "x").exit_code == 2
    root = regulator.federation.root_key
    told = _run("cosign", regulator.graz.folder, "--root-key", root, "--key", stranger, "--store", tmp_path / "s")
    assert told.exit_code == 2 and "lists this key" in told.output


def test_observer_makes_no_quorum(regulator: Regulator) -> None:
    assert regulator.federation.world is not None
    made = audit_roster(regulator.federation.world.publish())
    origin = regulator.graz.party.origin
    assert made.observers and made.observers[0] in made.cosigners_for(origin)
    assert made.missing_for_quorum(origin, ()) == made.missing_for_quorum(origin, made.observers)


def test_manifest_with_an_ambiguous_witness_is_refused(regulator: Regulator) -> None:
    assert regulator.federation.world is not None
    manifest = regulator.federation.world.publish()
    check_distinct_keys(manifest)
    fine, taken = manifest.audit.witnesses[0], manifest.roster[0].cosigner
    log_key = str(NoteSigner.from_seed("x.lesions/witness", bytes(32), KeyType.LOG).key)
    same_name = str(NoteSigner.from_seed("graz.lesions/witness", bytes(32), KeyType.COSIGNER).key)
    elsewhere = str(NoteSigner.from_seed("x.other/witness", bytes(32), KeyType.COSIGNER).key)
    for keys in ((taken,), (log_key,), (same_name,), (elsewhere,), (fine, fine)):
        audit = manifest.audit.model_copy(update={"witnesses": keys})
        with pytest.raises(ManifestRejected):
            check_distinct_keys(manifest.model_copy(update={"audit": audit}))
