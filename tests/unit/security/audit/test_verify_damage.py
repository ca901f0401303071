"""Damage and misuse that the attacks do not reach: each is refused with its own words."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lazaret.errors import AuditLogError, CodecError, ConfigError, LocalProtocolError, VerificationFailed
from security.audit.agreement import Keys
from security.audit.compare import cross
from security.audit.proof import Proof, prove
from security.audit.verify import erased_annexes, verify
from security.crypto import merkle
from security.log import events as ev
from security.log.keys import EpochKeys
from security.log.machine import Heartbeat
from security.log.note import Checkpoint, KeyType, Note, NoteSigner, Signature, VerifierKey, checkpoint_of
from security.log.opening import create_log
from security.log.witness import Fork, HeldCheckpoint
from security.log.writer import AuditLog
from tests.support.audit_attacks import Lonely, Tampering, copied, encode, weighty
from tests.support.audit_logs import Federation
from tests.support.audit_parties import QuickDisk

# Trees


def test_trees_refuse_what_cannot_be() -> None:
    leaves = [merkle.leaf_hash(bytes([number])) for number in range(6)]
    tree = merkle.Tree(leaves)
    assert tree.root(5) == merkle.root(leaves[:5])
    frontier = merkle.CompactRange()
    frontier.extend(leaves[:1])
    frontier.extend(leaves[1:3])
    assert frontier.size == 3 and frontier.root() == tree.root(3)
    for misuse in (
        lambda: merkle.Tree([b"short"]),
        lambda: tree.root(7),
        lambda: tree.inclusion_path(6),
        lambda: tree.consistency_path(7),
    ):
        with pytest.raises(LocalProtocolError):
            misuse()


# Starting on a damaged folder


def _break(lonely: Lonely, how: str) -> None:
    tampering = Tampering(lonely.folder)
    folder, newest = tampering.folder, tampering.folder.checkpoint_sizes()[-1]
    if how == "head does not verify":
        path = folder.checkpoint_path(newest)
        path.write_bytes(path.read_bytes().replace(b"audit\n", b"audit\n", 1)[:-10] + b"AAAAAAAA=\n")
    elif how == "head under another name":
        folder.checkpoint_path(newest).rename(folder.checkpoint_path(newest + 5))
    elif how == "entries cut below the head":
        tampering.write(tampering.lines[:-1])
    elif how == "entry changed below the head":
        tampering.edit(1, lambda entry: entry.update(actor="x"))
    elif how == "segment missing":
        folder.segment(0).rename(folder.segment(1))
    else:
        (lonely.folder / "FORMAT").write_text("something else\n")


@pytest.mark.parametrize(
    "how",
    [
        "head does not verify",
        "head under another name",
        "entries cut below the head",
        "entry changed below the head",
        "segment missing",
        "other format",
    ],
)
def test_damaged_log_does_not_start(lonely: Lonely, how: str) -> None:
    lonely.log.append(Heartbeat(size=1))
    lonely.log.close()
    _break(lonely, how)
    with pytest.raises(AuditLogError):
        lonely.reopen()


@pytest.mark.parametrize("damage", [b"", b"x" * 33, None])
def test_leaf_hashes_are_rebuilt(lonely: Lonely, damage: bytes | None) -> None:
    lonely.log.close()
    leaves = lonely.folder / "leaves.bin"
    good = leaves.read_bytes()
    leaves.unlink() if damage is None else leaves.write_bytes(damage)
    lonely.reopen().close()
    assert leaves.read_bytes() == good


def test_lost_key_stops_the_log(lonely: Lonely) -> None:
    lonely.log.close()
    EpochKeys(lonely.member.keys, lonely.log.origin, lonely.rng).erase(0)
    with pytest.raises(AuditLogError, match="not here"):
        lonely.reopen()
    EpochKeys(lonely.member.keys, lonely.log.origin, lonely.rng).create(0)
    with pytest.raises(AuditLogError, match="not the one endorsed"):
        lonely.reopen()


def test_log_is_made_once_and_with_the_right_root(lonely: Lonely, tmp_path: Path) -> None:
    lonely.log.close()

    def make(folder: Path, root: NoteSigner) -> AuditLog:
        return create_log(
            folder,
            tmp_path / "other.keys",
            party=lonely.member.party,
            roster=lonely.roster,
            manifest=b"{}\n",
            policy="0" * 64,
            root=root,
            clock=lonely.clock,
            rng=lonely.rng,
            disk=QuickDisk(),
        )

    with pytest.raises(AuditLogError, match="already"):
        make(lonely.folder, lonely.member.root)
    with pytest.raises(LocalProtocolError, match="root key"):
        make(tmp_path / "other", lonely.member.cosigner)


def test_forged_rollback_claims_prove_nothing(lonely: Lonely, tmp_path: Path) -> None:
    held = lonely.show(lonely.watcher(tmp_path / "outside"))
    text = Checkpoint(origin=lonely.log.origin, size=99, root=bytes(32)).text
    forged = Note(text=text, signatures=(NoteSigner.from_seed(lonely.log.origin, bytes(32)).sign(text),))
    lonely.log.refuse_rollback([dataclasses.replace(held, note=forged)])
    lonely.log.append(Heartbeat(size=1))


def test_close_says_farewell(lonely: Lonely) -> None:
    lonely.log.close(lambda log: log.append(ev.AgentStop(reason="end")))
    assert b"agent.stop" in Tampering(lonely.folder).lines[-1]
    assert lonely.codes() == set()


# Notes and files that are not what they seem


@pytest.mark.parametrize(
    "bad",
    [
        lambda: VerifierKey(name="a", kind=KeyType.LOG, public=b"short"),
        lambda: VerifierKey.parse("a+00000000+" + "Zg=="),
        lambda: VerifierKey(name="a b", kind=KeyType.LOG, public=bytes(32)),
        lambda: Signature.parse("\N{EM DASH} a AAAA"),
        lambda: Note.parse(b"x" * (1 << 19)),
        lambda: Note(text="no newline", signatures=()),
        lambda: HeldCheckpoint.parse(b"{}"),
        lambda: HeldCheckpoint.parse(b"{}\n"),
        lambda: HeldCheckpoint.parse(b'{"endorsements":[1],"head":2}\n'),
        lambda: Fork.parse(b"{}\n"),
        lambda: Proof.parse(b"nothing"),
        lambda: Proof.parse(b"x\nextra e30=\nindex 1\n\n"),
    ],
)
def test_malformed(bad: Callable[[], object]) -> None:
    with pytest.raises(CodecError):
        bad()


def test_cosignature_of_the_wrong_shape() -> None:
    key = NoteSigner.from_seed("w", bytes(32), KeyType.COSIGNER)
    for value in (bytes(64), b"\xff" * 8 + bytes(64)):
        with pytest.raises(VerificationFailed):
            key.key.verify("text\n", value)
    with pytest.raises(LocalProtocolError):
        key.cosign("text\n", -1)


def test_proof_is_of_one_log_and_one_entry(lonely: Lonely) -> None:
    for _ in range(4):
        lonely.log.append(Heartbeat(size=1))
    lonely.log.close()
    proof = prove(lonely.folder, 2)
    assert proof.check(lonely.member.party.root)["seq"] == 2
    assert proof.witnesses(lonely.roster) == {}
    stranger = NoteSigner.from_seed("x/audit", bytes(32)).key
    with pytest.raises(VerificationFailed, match="another log"):
        proof.check(stranger)
    with pytest.raises(VerificationFailed):
        dataclasses.replace(proof, line=proof.line.replace(b'"size":1', b'"size":2')).check(lonely.member.party.root)
    with pytest.raises(ConfigError):
        prove(lonely.folder, 50)


# What the verifier says of folders that are wrong in other ways


def _edit_all(lonely: Lonely, change: Callable[[dict[str, object]], object], *, first: int = 1) -> None:
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    for number in range(first, len(lines)):
        entry = json.loads(lines[number])
        change(entry)
        lines[number] = encode(entry)
    tampering.write(lines)
    tampering.resign(lonely.signer(0))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"origin": "linz.lesions/audit"}, "ForeignEntry"),
        ({"epoch": 3}, "WrongEpochKey"),
    ],
)
def test_entries_of_another_log_or_epoch(lonely: Lonely, change: dict[str, object], code: str) -> None:
    lonely.log.append(Heartbeat(size=1))
    lonely.log.close()
    _edit_all(lonely, lambda entry: entry.update(change))
    assert lonely.codes() == {code}


def test_second_genesis_and_broken_manifest_chain(lonely: Lonely) -> None:
    lonely.log.append(ev.ManifestAdopted(version=2, old="1" * 64, new="2" * 64))
    lonely.log.close()
    tampering = Tampering(lonely.folder)
    lines = tampering.lines
    again = encode({**json.loads(lines[0]), "seq": len(lines)})
    tampering.write([*lines, again])
    tampering.resign(lonely.signer(0), [len(lines) + 1])
    assert {"GenesisInvalid", "ManifestMismatch"} <= lonely.codes()


def test_boot_that_returns(lonely: Lonely) -> None:
    boot = lonely.log._boot
    lonely.log.append(ev.AgentStop(reason="end"))
    lonely.log.close()
    log = lonely.reopen()
    log.append(Heartbeat(size=1))
    log._boot = boot
    log.append(Heartbeat(size=1))
    log.close()
    assert "MonotonicRollback" in lonely.codes()


def test_log_without_a_manifest_cannot_be_decided(lonely: Lonely) -> None:
    lonely.log.close()
    result = verify(lonely.folder, Keys())
    assert weighty(result.findings) == {"ManifestMissing", "NotWitnessed"}
    assert result.exit_code == 3


def test_log_that_the_roster_does_not_know(lonely: Lonely, tmp_path: Path) -> None:
    lonely.log.close()
    other = Lonely(tmp_path / "other", name="linz")
    result = verify(lonely.folder, other.keys)
    assert "GenesisInvalid" in weighty(result.findings)


@pytest.mark.parametrize("name", ["x.note", "007.note", "5.txt", "\u00b2.note", "9" * 30 + ".note"])
def test_strange_files_among_the_heads(lonely: Lonely, name: str) -> None:
    lonely.log.close()
    (lonely.folder / "checkpoints" / name).write_bytes(b"x")
    assert "BadHead" in lonely.codes()


def test_too_many_endorsed_keys(lonely: Lonely) -> None:
    for _ in range(3):
        lonely.log.rotate("test")
    lonely.log.close()
    tampering = Tampering(lonely.folder)
    first = next(n for n, line in enumerate(tampering.lines) if b"key.rotated" in line)
    tampering.cut(tampering.folder.checkpoint_sizes()[0])
    assert first > 0
    assert "EpochChain" in lonely.codes()


def test_heads_of_an_absent_log_can_contradict_each_other(tmp_path: Path) -> None:
    """Two sites hold different heads of a coordinator that hands out no log."""
    federation = Federation.make(tmp_path, dp_sites=())
    federation.exchange()
    hub, graz = federation.hub, federation.members["graz"]
    federation.stop()
    path = next((graz.folder / "witness").glob("hub*.json"))
    held = HeldCheckpoint.parse(path.read_bytes())
    head = checkpoint_of(held.note)
    text = Checkpoint(origin=head.origin, size=head.size, root=bytes(32)).text
    signer = EpochKeys(hub.keys, hub.party.origin, federation.rng).load(0)
    forked = Note(text=text, signatures=(signer.sign(text), graz.cosigner.cosign(text, 1_800_000_000)))
    path.write_bytes(HeldCheckpoint(note=forked, endorsements=held.endorsements).encode())
    folders = [member.folder for member in federation.sites]
    result = cross(folders, dict.fromkeys(folders, federation.pinned))
    assert {"Fork", "LogMissing"} <= weighty(result.findings)


def test_copy_without_keys_is_readable(tmp_path: Path, lonely: Lonely) -> None:
    lonely.log.close()
    path = copied(lonely.folder, tmp_path / "copy")
    assert weighty(verify(path, lonely.keys).findings) == set()


def test_erased_annexes_are_found_however_many_there_are() -> None:
    assert erased_annexes([9, 1, 5, 7, 3], [range(4, 6), range(2), range(5, 8), range(9, 9)]) == {1, 5, 7}
    many = range(0, 400_000, 2)
    assert erased_annexes(many, (range(seq, seq + 1) for seq in reversed(many))) == set(many)
