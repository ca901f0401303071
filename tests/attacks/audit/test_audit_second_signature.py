"""Somebody computes the Ed25519 and ECDSA keys of everybody, as a quantum computer would, and rewrites a log: entries,
heads and cosignatures, or the manifests behind them. With ML-DSA-65 beside them an auditor sees it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from lazaret.errors import ManifestRejected, VerificationFailed
from security.audit import agreement, compare
from security.audit import verify as verify_module
from security.audit.agreement import Agreements, keys_for, keys_of
from security.audit.checkpoints import believed
from security.audit.compare import cross, held_checkpoints
from security.audit.proof import Proof, check_file, prove
from security.audit.verify import verify
from security.identity.acceptance import unseal
from security.log.keys import EpochKeys
from security.log.note import KeyType, Note
from security.log.store import LogFolder
from security.log.witness import Fork
from security.rng import CountedRandomness
from tests.support.audit_attacks import Tampering, copied, weighty, with_signatures
from tests.support.audit_logs import Federation
from tests.support.consortium_world import World


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """It begins with one signature, and turns the second one on after a round."""
    folder = tmp_path_factory.mktemp("second")
    made = Federation.from_world(World.make(folder / "world"), folder / "logs", dp_sites=())
    assert made.world is not None
    made.play(1)
    made.world.turn_on_ml_dsa()
    made.republish()
    made.play(1)
    made.stop()
    return made


def forged_log(federation: Federation, path: Path) -> Path:
    """Graz never trained in the second round, says its log now. Every Ed25519 signature is the forger's own work."""
    member = federation.members["graz"]
    folder = copied(member.folder, path)
    tampering = Tampering(folder)
    last = len(tampering.lines) - 1
    tampering.edit(last, lambda entry: entry["body"].update(reason="nothing was sent"))
    keys = EpochKeys(member.keys, member.party.origin, CountedRandomness(b""))
    signer = keys.load(keys.held()[-1])
    witnesses = [other.cosigner for other in federation.members.values() if other is not member]
    size = max(LogFolder(folder).checkpoint_sizes())
    old = LogFolder(folder).checkpoint_note(size)
    tampering.resign(signer, least=size)
    note = LogFolder(folder).checkpoint_note(size)
    times = {line.name: line.time for line in old.signatures if line.time}
    lines = [one.cosign(note.text, times[one.key.name]) for one in witnesses if one.key.name in times]
    LogFolder(folder).checkpoint_path(size).write_bytes(with_signatures(note, *lines).encode())
    if checkpoint_size(folder / "cosigned.note") == size:
        shutil.copy(LogFolder(folder).checkpoint_path(size), folder / "cosigned.note")
    return folder


def checkpoint_size(path: Path) -> int:
    return int(Note.parse(path.read_bytes()).text.split("\n")[1])


def test_honest_logs_are_clean_before_and_after(federation: Federation) -> None:
    result = cross(federation.folders, federation.keys)
    assert weighty(result.findings) == set() and result.exit_code == 0
    folder = LogFolder(federation.members["graz"].folder)
    heads = [folder.checkpoint_note(size) for size in folder.checkpoint_sizes()]
    lengths = [{len(line.value) for line in head.signatures} for head in heads]
    assert 3309 not in lengths[0] and 3309 in lengths[-1]


def test_a_forged_head_lacks_the_second_signature(federation: Federation, tmp_path: Path) -> None:
    path = forged_log(federation, tmp_path / "graz")
    assert weighty(verify(path, keys_for(path, federation.root_key)).findings) == {"BadSignature"}


def test_a_forged_head_lacks_the_second_signature_twin(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = forged_log(federation, tmp_path / "graz")
    monkeypatch.setattr(verify_module, "check_ml_dsa", lambda *_: None)
    assert weighty(verify(path, keys_for(path, federation.root_key)).findings) == set()


def unadopted(federation: Federation, path: Path) -> Path:
    """The log ends before version 2 is taken over: heads with one signature are all that it has."""
    folder = copied(federation.members["graz"].folder, path)
    tampering = Tampering(folder)
    adopted = next(i for i, line in enumerate(tampering.lines) if b'"manifest.adopted"' in line)
    tampering.cut(max(size for size in LogFolder(folder).checkpoint_sizes() if size <= adopted))
    first = json.loads(tampering.lines[0])["body"]["manifest"]
    shutil.copy(folder / "manifests" / f"{first}.json", folder / "manifest.json")
    (folder / "cosigned.note").unlink(missing_ok=True)
    return folder


def alone(folder: Path) -> Path:
    """The folder has no manifest but the one in force at its end."""
    for file in (folder / "manifests").iterdir():
        if file.read_bytes() != (folder / "manifest.json").read_bytes():
            file.unlink()
    return folder


def test_a_log_that_ends_before_the_second_signature_is_not_clean(federation: Federation, tmp_path: Path) -> None:
    """Whoever forges Ed25519 could have made all of it. With version 2 in the folder, its heads lack a signature.
    Without it the party may have stopped before there was one, and nobody is blamed: also where the folder of another
    party has version 2, and confirms version 1."""
    path = unadopted(federation, tmp_path / "graz")
    found = verify(path, keys_for(path, federation.root_key)).findings
    assert "BadSignature" in weighty(found)
    by_itself = verify(alone(path), keys_for(path, federation.root_key))
    assert "OneSignature" in weighty(by_itself.findings)
    assert not weighty(by_itself.findings) & {"BadSignature", "ManifestRejected"}
    keys = keys_of([path, federation.hub.folder], federation.root_key)[path]
    assert keys.agreements.problems == () and [one.version for one in keys.agreements.confirmed.versions] == [1]
    assert "OneSignature" in weighty(verify(path, keys).findings)


def test_a_log_that_ends_before_the_second_signature_is_not_clean_twin(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = alone(unadopted(federation, tmp_path / "graz"))
    monkeypatch.setattr(agreement, "unconfirmed", lambda *_: [])
    monkeypatch.setattr(verify_module, "check_ml_dsa", lambda *_: None)
    found = weighty(verify(path, keys_for(path, federation.root_key)).findings)
    assert not found & {"BadSignature", "ManifestRejected", "OneSignature"}


def with_forged_manifest(federation: Federation, path: Path) -> Path:
    """A version 3 with the forger's ECDSA signature and no ML-DSA key lies in the folder."""
    folder = copied(federation.members["graz"].folder, path)
    assert federation.world is not None
    newest = federation.world.authority.latest(now_ms=federation.world.now)
    assert newest is not None
    bare = [member.model_copy(update={"log_ml_dsa": None}) for member in newest.members]
    update = {"version": 3, "previous": newest.digest.hex(), "root_ml_dsa": None}
    manifest = newest.model_copy(update={**update, "coordinator": bare[0], "roster": tuple(bare[1:])})
    data = federation.world.signed(manifest)
    LogFolder(folder).manifest_path(sha256(data).hexdigest()).write_bytes(data)
    return folder


def test_a_manifest_that_the_auditor_gives_needs_the_roots_second_key(federation: Federation, tmp_path: Path) -> None:
    folder = with_forged_manifest(federation, tmp_path / "graz")
    known = {unseal(path.read_bytes())[0].version: path for path in (folder / "manifests").iterdir()}
    assert agreement.manifest_from(known[2], federation.root_key).version == 2
    with pytest.raises(ManifestRejected, match="not signed with the root's ML-DSA key"):
        agreement.manifest_from(known[3], federation.root_key)


@pytest.mark.parametrize("brought", [True, False])
def test_a_forged_manifest_is_no_manifest(federation: Federation, tmp_path: Path, brought: bool) -> None:
    """Also for an auditor who has the certificate alone: version 2, in the folder, names the key."""
    path, root = with_forged_manifest(federation, tmp_path / "graz"), federation.root_key
    if not brought:
        root = tmp_path / "root.pem"
        root.write_text(federation.root_key.read_text().split("-----BEGIN PUBLIC")[0])
    keys = keys_for(path, root)
    codes = ["ManifestRejected"] if brought else ["ManifestRejected", "SecondKeyNotPinned"]
    assert [one.code for one in keys.agreements.problems] == codes
    assert [one.version for one in keys.agreements.versions] == [1, 2]


def test_a_forged_manifest_is_no_manifest_twin(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "unconfirmed", lambda *_: [])
    keys = keys_for(with_forged_manifest(federation, tmp_path / "graz"), federation.root_key)
    assert [one.version for one in keys.agreements.versions] == [1, 2, 3]


def test_a_proof_needs_both_signatures(federation: Federation, tmp_path: Path) -> None:
    """An entry that a forged head covers is not proven; one under the log's own heads is."""
    assert federation.world is not None
    manifest, root = federation.world.authority.manifest_path, federation.root_key
    honest = federation.members["graz"].folder
    assert check_file(prove(honest, 1).encode(), manifest, root).proves == "Entry"
    proof = prove(honest, 1)
    bare = tuple(line for line in proof.note.signatures if len(line.value) != 3309)
    forger = Proof(
        line=proof.line,
        index=proof.index,
        path=proof.path,
        note=Note(text=proof.note.text, signatures=bare),
        endorsements=proof.endorsements,
    )
    with pytest.raises(VerificationFailed, match="no signature by a known key"):
        check_file(forger.encode(), manifest, root)
    party = federation.roster.by_name["graz"]
    assert party.ml_dsa is not None and party.ml_dsa.kind is KeyType.ML_DSA
    assert forger.check(party.root)["seq"] == 1, "twin: without the second key it is believed"


def test_a_root_without_the_second_key_is_noted(federation: Federation, tmp_path: Path) -> None:
    """The audit is clean: the certificate pins everything but the ML-DSA key, which the manifests themselves name."""
    path, root = federation.members["graz"].folder, tmp_path / "root.pem"
    root.write_text(federation.root_key.read_text().split("-----BEGIN PUBLIC")[0])
    found = verify(path, keys_for(path, root))
    assert "SecondKeyNotPinned" in {one.code for one in found.findings} and found.exit_code == 0
    pinned = verify(path, keys_for(path, federation.root_key)).findings
    assert "SecondKeyNotPinned" not in {one.code for one in pinned}


# A site that was away when a version came


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Version 2 does not reach graz. Version 3 has the second signature."""
    folder = tmp_path_factory.mktemp("skipping")
    made = Federation.from_world(World.make(folder / "world"), folder / "logs", dp_sites=())
    assert made.world is not None
    made.play(1)
    made.republish(skipped_by=("graz",))
    made.world.turn_on_ml_dsa()
    made.republish()
    made.play(1)
    made.stop()
    return made


def test_a_site_that_skipped_a_version_is_not_blamed(skipping: Federation) -> None:
    """Among all folders version 2 confirms version 1. By itself the log is neither clean nor wrong."""
    together = cross(skipping.folders, skipping.keys)
    assert weighty(together.findings) == set() and together.exit_code == 0
    path = skipping.members["graz"].folder
    by_itself = verify(path, keys_for(path, skipping.root_key))
    assert weighty(by_itself.findings) == {"OneSignature"} and by_itself.exit_code == 3


def with_forged_first(federation: Federation, name: str, path: Path) -> Path:
    """Another version 1 lies in a folder, under the forger's ECDSA signature."""
    folder = copied(federation.members[name].folder, path)
    assert federation.world is not None
    manifests = (unseal(file.read_bytes())[0] for file in (folder / "manifests").iterdir())
    first = next(one for one in manifests if one.version == 1)
    data = federation.world.signed(first.model_copy(update={"issued_at_ms": first.issued_at_ms + 1}))
    LogFolder(folder).manifest_path(sha256(data).hexdigest()).write_bytes(data)
    return folder


def test_a_forged_older_version_is_found_beside_the_others(skipping: Federation, tmp_path: Path) -> None:
    """Where the version after it is here, which names another one. Graz lacks it, and nobody can tell by graz alone."""
    path = with_forged_first(skipping, "graz", tmp_path / "graz")
    by_itself = keys_for(path, skipping.root_key).agreements
    assert {one.code for one in by_itself.problems} == {"OneSignature"} and len(by_itself.unconfirmed) == 2
    beside = keys_of([path, skipping.hub.folder], skipping.root_key)
    assert [one.code for one in beside[path].agreements.problems] == ["ManifestRejected"]
    assert [one.version for one in beside[path].agreements.versions] == [1, 3]
    assert beside[skipping.hub.folder].agreements.problems == (), "the forger's file does not touch another folder"


def test_a_forged_older_version_is_found_beside_the_others_twin(
    skipping: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "unconfirmed", lambda *_: [])
    path = with_forged_first(skipping, "graz", tmp_path / "graz")
    beside = keys_of([path, skipping.hub.folder], skipping.root_key)
    assert [one.version for one in beside[path].agreements.versions] == [1, 1, 3]


def test_keys_that_nothing_confirms_speak_against_nobody(federation: Federation, tmp_path: Path) -> None:
    """Heads that a folder holds of other logs count as evidence under a manifest that a forger could not have made."""
    path = alone(unadopted(federation, tmp_path / "graz"))
    agreed = keys_for(path, federation.root_key).agreements
    assert held_checkpoints([path], agreed.confirmed) == {}
    assert held_checkpoints([path], agreed) != {}, "twin: they count under any manifest in the folder"


def test_nor_do_they_where_logs_are_compared_or_evidence_is_read(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place that takes somebody's word about another log: heads that are brought, heads that are held, forks."""
    path = alone(unadopted(federation, tmp_path / "graz"))
    keys = keys_for(path, federation.root_key)
    held = held_checkpoints([path], keys.agreements)
    origin, (head, *_) = next(iter(held.items()))
    anybody = replace(keys, agreements=replace(keys.agreements, unconfirmed=frozenset()))
    assert believed(head, anybody, origin) and not believed(head, keys, origin)

    fork = Fork(origin=origin, held=head.note, shown=head.note, endorsements=head.endorsements, other_root=bytes(32))
    LogFolder(path).evidence.mkdir(exist_ok=True)
    (LogFolder(path).evidence / "fork-1.json").write_bytes(fork.encode())
    trusted: list[Agreements] = []
    monkeypatch.setattr(verify_module, "verify_fork", lambda _, agreed: trusted.append(agreed))
    monkeypatch.setattr(compare, "held_checkpoints", lambda _, agreed: trusted.append(agreed) or {})
    cross([path], {path: keys})
    assert [agreed.parties(origin) for agreed in trusted] == [[], []]
    cross([path], {path: anybody})
    assert all(agreed.parties(origin) for agreed in trusted[2:]) and len(trusted) == 4
