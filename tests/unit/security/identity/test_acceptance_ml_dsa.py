"""ML-DSA-65 beside the root's signature: keys, documents and who must have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA65PrivateKey

from lazaret.errors import AuditLogError, ConfigError, ManifestRejected, PolicyViolation
from security import labels
from security.clock import ManualClock
from security.crypto.signing import SigningKey
from security.identity import acceptance, credentials, rules
from security.identity.acceptance import seal, sign, unseal
from security.identity.enrolment import EnrolmentRequest, Identity
from security.identity.keystore import load_ed25519_key
from security.identity.pki import Role
from security.log.opening import create_log
from security.log.roster import audit_roster
from security.rng import CountedRandomness
from tests.support.consortium_world import NOW, World, subject


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World.make(tmp_path_factory.mktemp("on"))
    world.turn_on_ml_dsa()
    world.publish()
    return world


def test_off_no_document_has_a_trace_of_it(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    world.publish()
    request = world.identity("new").create(subject("new"))
    for data in (world.published(), request.to_bytes(), (tmp_path / "consortium/members/graz.json").read_bytes()):
        assert b"ml_dsa" not in data
    assert not list(tmp_path.rglob("*ml-dsa*")) and b"PUBLIC KEY" not in (tmp_path / "consortium/root.pem").read_bytes()


def test_on_every_private_key_is_private_and_every_member_is_listed(on: World) -> None:
    manifest, signatures = unseal(on.published())
    assert len(signatures.ml_dsa) == 3309 and all(len(member.log_ml_dsa or "") == 3904 for member in manifest.members)
    keys = [*on.folder.rglob("*ml-dsa.key")]
    assert len(keys) == 1 + len(manifest.members) and {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    root = (on.authority.folder / "root.pem").read_bytes()
    assert acceptance.key_in(root, "root.pem") == manifest.root_ml_dsa
    assert seal(manifest, *signatures) == on.published()


def test_who_has_no_key_keeps_it_from_being_turned_on(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    world.write_plan(world.authority.plan_path.read_text() + "\n[audit]\nml_dsa = true\n")
    with pytest.raises(PolicyViolation, match="no ML-DSA key of the logs of graz, hub"):
        world.publish()
    assert not world.authority.manifest_path.exists()
    assert b"PUBLIC KEY" not in (world.authority.folder / "root.pem").read_bytes()


def test_a_log_keeps_its_key(on: World) -> None:
    """A request with another one is refused; one without it changes nothing."""
    record = on.authority.member("graz")
    request = on.identity("graz").renew(record.subject)
    assert request.log_ml_dsa == record.log_ml_dsa
    other = request.model_copy(update={"log_ml_dsa": "00" * 1952})
    with pytest.raises(PolicyViolation, match="has another ML-DSA key"):
        on.authority.renew(on.key, "graz", _signed_again(on, other), compared=True, now_ms=on.now, days=30)


def _signed_again(world: World, request: EnrolmentRequest) -> EnrolmentRequest:
    """By a member that has made its key anew."""
    newest = max((world.folder / "graz" / "keys").glob("signing-*.key"), key=lambda path: path.stat().st_mtime_ns)
    signature = SigningKey(load_ed25519_key(newest)).sign(labels.SIGN_ENROLMENT, request.member, request.digest)
    return request.model_copy(update={"signature": signature.hex()})


def test_null_is_not_another_way_to_leave_a_key_out(tmp_path: Path) -> None:
    """One manifest has one file: its digest, which the signature is over, would be the same."""
    world = World.make(tmp_path)
    world.publish()
    told = json.loads(world.published())
    for place in (told["manifest"], told["manifest"]["coordinator"], told):
        name = "root_ml_dsa" if place is told["manifest"] else "ml_dsa" if place is told else "log_ml_dsa"
        place[name] = None
        with pytest.raises(ManifestRejected):
            unseal(rfc8785.dumps(told))
        del place[name]
    unseal(rfc8785.dumps(told))


def test_a_signature_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    manifest = world.publish()
    data = seal(manifest, sign(manifest, world.key), bytes(3309))
    with pytest.raises(ManifestRejected, match="ML-DSA"):
        world.identity("graz").check_manifest(data, now_ms=world.now)


def test_some_members_with_a_key_are_refused(on: World) -> None:
    manifest, _ = unseal(on.published())
    bare = manifest.coordinator.model_copy(update={"log_ml_dsa": None})
    with pytest.raises(ManifestRejected, match="for some members"):
        rules.check_ml_dsa(manifest.model_copy(update={"coordinator": bare}))
    with pytest.raises(ManifestRejected, match="for some members"):
        rules.check_ml_dsa(manifest.model_copy(update={"root_ml_dsa": None}))


def test_check_looks_for_the_listed_key(on: World, tmp_path: Path) -> None:
    shutil.copytree(on.folder / "graz", tmp_path / "graz")
    identity = Identity(folder=tmp_path / "graz")
    identity.install_manifest(on.published(), now_ms=on.now)

    def said() -> list[tuple[str, str]]:
        told = credentials.manifest(credentials.Credentials(identity, Role.SITE, on.clock, program="site-agent"))
        return [(str(line.verdict), line.what) for line in told if "ml-dsa" in line.what.lower()]

    assert [status for status, _ in said()] == ["ok"]
    identity.ml_dsa_path.unlink()
    assert [status for status, _ in said()] == ["problem"]
    shutil.copy(on.identity("linz").ml_dsa_path, identity.ml_dsa_path)
    ((status, text),) = said()
    assert status == "problem" and "not the key that the manifest lists" in text


def test_the_key_in_root_pem_is_one_ml_dsa_key(tmp_path: Path) -> None:
    pem = acceptance.public_pem(MLDSA65PrivateKey.generate().public_key())
    assert acceptance.key_in(b"", "x") is None
    for wrong in (pem + pem, pem.replace(b"M", b"N", 1), pem[:200] + pem[-30:], pem[:-10], pem.replace(b"A", b"-", 1)):
        with pytest.raises(ConfigError, match="no ML-DSA-65 key"):
            acceptance.key_in(wrong, "root.pem")


@pytest.mark.parametrize("given", ["none", "another"])
def test_a_log_whose_key_is_not_the_listed_one_stops(on: World, tmp_path: Path, given: str) -> None:
    manifest, _ = unseal(on.published())
    roster, identity = audit_roster(manifest), on.identity("graz")
    party = roster.by_name["graz"]
    other = on.identity("linz").log_ml_dsa(party.origin)
    with pytest.raises(AuditLogError, match="another ML-DSA key"):
        create_log(
            tmp_path / "log",
            tmp_path / "keys",
            party=party,
            roster=roster,
            manifest=on.published(),
            policy="0" * 64,
            root=identity.audit_root(subject("graz")),
            clock=ManualClock(wall=NOW),
            rng=CountedRandomness(b"x"),
            ml_dsa=None if given == "none" else lambda: other,
        )
