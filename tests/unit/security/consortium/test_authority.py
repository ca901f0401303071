"""The consortium's folder: who gets certificates, who loses them, and what is published."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lazaret import errors
from lazaret.errors import ConfigError, PolicyViolation
from security.consortium.authority import SPREAD_DAYS, SPREAD_STEP, Authority
from security.identity import membership, peers, pki
from security.identity.enrolment import Identity, renew
from security.identity.enrolment_files import EnrolmentRequest
from security.identity.membership import AuditMode
from security.identity.pki import Purpose, Role
from security.log.roster import audit_roster
from tests.support.consortium_world import DAY, NOW, PLAN, World, subject


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path)


def test_the_root_key_is_made_once(world: World) -> None:
    with pytest.raises(ConfigError, match="already holds a root key"):
        Authority.create(world.authority.folder, "lesions", passphrase=None, now_ms=NOW)
    with pytest.raises(ConfigError, match="no consortium here"):
        Authority.open(world.folder)


def test_a_passphrase_guards_the_root(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "lesions", passphrase=b"secret words", now_ms=NOW)
    assert authority.unlock(b"secret words").public_key() == authority.root.public_key()
    for wrong in (b"other words", None):
        with pytest.raises(ConfigError):
            authority.unlock(wrong)


def test_a_foreign_root_key_is_noticed(world: World, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", "lesions", passphrase=None, now_ms=NOW)
    (world.authority.folder / "root.key").write_bytes((other.folder / "root.key").read_bytes())
    with pytest.raises(ConfigError, match="do not belong together"):
        world.authority.unlock(None)


def test_nobody_is_enrolled_twice_or_with_used_keys(world: World, tmp_path: Path) -> None:
    again = Identity(folder=tmp_path / "again").create(subject("graz"))
    with pytest.raises(PolicyViolation, match="enrolled already"):
        world.authority.enroll(world.key, again, now_ms=NOW, days=30)
    old = EnrolmentRequest.read(world.identity("graz").request_path)
    world.authority.revoke("graz", "left", now_ms=NOW)
    with pytest.raises(PolicyViolation, match="reuses a key"):
        world.authority.enroll(world.key, old, now_ms=NOW, days=30)
    # A name is one log's for ever: who lost its folder takes another name, who has it comes back with new keys.
    with pytest.raises(PolicyViolation, match="the name of another member") as caught:
        world.authority.enroll(world.key, again, now_ms=NOW, days=30)
    assert "graz-2" in str(caught.value.hint)
    world.authority.enroll(world.key, renew(world.identity("graz"), Role.SITE), now_ms=NOW, days=30)
    assert world.authority.member("graz").active


def test_requests_for_other_federations_or_without_hosts_are_refused(world: World, tmp_path: Path) -> None:
    elsewhere = Identity(folder=tmp_path / "a").create(subject("salzburg", federation="ct-scans"))
    with pytest.raises(ConfigError, match="ct-scans"):
        world.authority.enroll(world.key, elsewhere, now_ms=NOW, days=30)
    nowhere = Identity(folder=tmp_path / "b").create(subject("hub-2", Role.COORDINATOR))
    with pytest.raises(ConfigError, match="hosts"):
        world.authority.enroll(world.key, nowhere, now_ms=NOW, days=30)


def test_unknown_members_are_named(world: World) -> None:
    with pytest.raises(ConfigError, match="salzburg is not enrolled") as caught:
        world.authority.member("salzburg")
    assert "graz, hub, linz, vienna" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="not allowed"):
        world.authority.member("../root")


def test_a_revoked_site_is_out_of_the_next_manifest(world: World) -> None:
    world.enroll("salzburg")
    before = world.publish()
    lost = world.identity("graz").tls_certificate()
    world.authority.revoke("graz", "stolen server", now_ms=NOW)
    after = world.publish()
    assert "graz" in before.sites and "graz" not in after.sites
    assert {entry.member for entry in after.revocations} == {"graz"} and len(after.revocations) == 2
    assert pki.fingerprint(lost) in after.revoked
    with pytest.raises(errors.CertificateRevoked):
        peers.check_tls_peer(after, world.authority.root, lost, now_ms=NOW)
    with pytest.raises(ConfigError, match="no valid certificate"):
        world.authority.revoke("graz", "again", now_ms=NOW)
    with pytest.raises(PolicyViolation, match="revoked"):
        world.authority.renew(world.key, "graz", None, now_ms=NOW, days=30)
    # An expired certificate needs no revocation any more, so the list does not grow for ever.
    world.clock.advance(366 * DAY)
    assert world.authority.revocations(world.now) == []


def test_one_lost_tls_key_can_be_revoked_alone(world: World) -> None:
    lost = world.identity("graz").tls_certificate()
    request = world.identity("graz").renew(subject("graz"))
    world.authority.renew(world.key, "graz", request, now_ms=NOW, days=365)
    record = world.authority.revoke("graz", "old disk sold", certificate=pki.fingerprint(lost), now_ms=NOW)
    assert record.active
    manifest = world.publish()
    assert manifest.site("graz").tls_keys == (
        pki.key_fingerprint(pki.certificate_key(record.unrevoked(Purpose.TLS)[-1].parsed)),
    )
    with pytest.raises(ConfigError, match="no such certificate"):
        world.authority.revoke("graz", "x", certificate="00" * 32, now_ms=NOW)


def test_a_lost_key_is_revoked_in_all_its_certificates(world: World) -> None:
    lost = world.identity("graz").tls_certificate()
    world.authority.renew(world.key, "graz", None, now_ms=NOW, days=365)
    record = world.authority.revoke("graz", "key copied", certificate=pki.fingerprint(lost), now_ms=NOW)
    assert len([entry for entry in record.issued if entry.revoked_at_ms]) == 2
    assert not record.active and len(record.unrevoked(Purpose.SIGNING)) == 2


def test_versions_are_chained_and_kept(world: World) -> None:
    first, second = world.publish(), world.publish()
    assert (first.version, second.version) == (1, 2)
    assert second.previous == first.digest.hex()
    kept = sorted(path.name for path in (world.authority.folder / "history").iterdir())
    assert kept == ["manifest-000001.json", "manifest-000002.json"]


def test_a_version_number_is_never_given_twice(world: World) -> None:
    """The machine stops between the two writes of `publish`."""
    world.publish()
    handed_out = world.published()
    signed = world.publish()
    world.authority.manifest_path.write_bytes(handed_out)
    third = world.publish()
    assert (third.version, third.previous) == (3, signed.digest.hex())


def test_a_left_run_does_not_come_back(world: World) -> None:
    world.publish()
    world.write_plan(PLAN.replace("run-1", "run-2"))
    world.publish()
    world.write_plan(PLAN)
    with pytest.raises(PolicyViolation, match="ended by a later one"):
        world.publish()


def test_a_changed_model_needs_a_new_run(world: World) -> None:
    world.publish()
    world.write_plan(PLAN.replace('"tiny"', '"tinier"'))
    with pytest.raises(errors.ManifestRejected, match="changes the model"):
        world.publish()
    latest = world.authority.latest(now_ms=NOW)
    assert latest is not None and latest.version == 1


def test_a_renewal_is_of_the_member_it_is_asked_for(world: World) -> None:
    request = world.identity("linz").renew(subject("linz"))
    with pytest.raises(ConfigError, match="request is of site linz"):
        world.authority.renew(world.key, "graz", request, now_ms=NOW, days=30)


def test_a_coordinator_is_needed(world: World) -> None:
    world.authority.revoke("hub", "moved", now_ms=NOW)
    with pytest.raises(PolicyViolation, match="0 coordinators"):
        world.publish()


def test_the_aggregation_policy_is_the_manifests(world: World) -> None:
    world.enroll("salzburg", days=10)
    manifest = world.publish()
    policy = membership.aggregation_policy(manifest, now_ms=NOW)
    assert policy.manifest_hash == manifest.digest
    assert [entry.site for entry in policy.roster] == ["graz", "linz", "salzburg", "vienna"]
    assert (policy.c, policy.m, policy.audit, policy.least_cohort) == (1, 3, AuditMode.COVERED, 3)
    assert policy.entry("salzburg").key.raw == manifest.site("salzburg").signing_key
    assert policy.layout.layout_hash == manifest.aggregation.layout.layout_hash
    lapsed = membership.aggregation_policy(manifest, now_ms=NOW + 11 * DAY)
    assert lapsed.lists("graz") and not lapsed.lists("salzburg")
    with pytest.raises(PolicyViolation, match="revoked"):
        lapsed.entry("salzburg")
    assert lapsed.coordinator_entry() == lapsed.coordinator and lapsed.expires_ms == manifest.expires_at_ms
    with pytest.raises(PolicyViolation, match="coordinator's signing certificate has expired"):
        membership.aggregation_policy(manifest, now_ms=NOW + 366 * DAY).coordinator_entry()
    with pytest.raises(PolicyViolation, match="has expired"):
        policy.check_fresh(manifest.expires_at_ms)


def test_the_audit_roster_is_the_manifests(world: World) -> None:
    manifest = world.publish()
    roster = audit_roster(manifest)
    assert [party.name for party in roster.sites] == ["graz", "linz", "vienna"]
    signer = world.identity("graz").audit_root(subject("graz"))
    assert roster.by_name["graz"].root == signer.key
    assert roster.by_name["graz"].origin == "graz.lesions/audit"


def test_certificates_of_a_roster_do_not_end_together(world: World) -> None:
    """Thirteen that are enrolled on one day, and all of them renewed on one day again."""

    def ends() -> list[int]:
        records = [record for record in world.authority.members() if record.active]
        return sorted(pki.days_left(record.unrevoked(Purpose.SIGNING)[-1].parsed, world.now) for record in records)

    for number in range(9):
        world.enroll(f"site-{number}", days=world.authority.spread_days(world.now))
    for record in world.authority.members():
        days = world.authority.spread_days(world.now, beside=record.member)
        world.authority.renew(world.key, record.member, None, now_ms=world.now, days=days)
    found = ends()
    assert len(found) == 13 and max(found) <= pki.MEMBER_DAYS and min(found) > pki.MEMBER_DAYS - SPREAD_DAYS
    assert min(later - earlier for earlier, later in pairwise(found)) >= SPREAD_STEP
