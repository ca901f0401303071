"""Who is at the other end of a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazaret import errors
from security.identity import acceptance, peers, pki
from security.identity.manifest import Manifest, Revocation
from security.identity.pki import Purpose, Role
from tests.support.consortium_world import DAY, NOW, World, subject


def issued(world: World, member: str) -> Any:
    key = pki.new_tls_key().public_key()
    return pki.issue(world.key, world.authority.root, subject(member), Purpose.TLS, key, now_ms=NOW)


def tls_certificate(world: World, member: str) -> Any:
    return world.identity(member).tls_certificate()


def test_a_tls_peer_is_known_by_its_certificate(world: World, manifest: Manifest) -> None:
    root = world.authority.root
    assert peers.check_tls_peer(manifest, root, tls_certificate(world, "graz"), now_ms=NOW) == subject("graz")
    hub = peers.check_tls_peer(manifest, root, tls_certificate(world, "hub"), now_ms=NOW)
    assert hub == subject("hub", Role.COORDINATOR)


def unlisted(world: World) -> Any:
    return issued(world, "salzburg")


def unpublished_key(world: World) -> Any:
    return issued(world, "graz")


@pytest.mark.parametrize("peer", [unlisted, unpublished_key])
def test_a_tls_peer_outside_the_roster_is_refused(world: World, manifest: Manifest, peer: Any) -> None:
    with pytest.raises(errors.CertificateNameMismatch, match="not in the roster"):
        peers.check_tls_peer(manifest, world.authority.root, peer(world), now_ms=NOW)


@pytest.mark.parametrize("peer", [unlisted, unpublished_key])
def test_a_tls_peer_outside_the_roster_is_refused_twin(
    world: World, manifest: Manifest, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "check_pinned", lambda *args: None)
    peers.check_tls_peer(manifest, world.authority.root, peer(world), now_ms=NOW)


def test_other_wrong_peers_get_their_own_error(world: World, foreign: World, manifest: Manifest) -> None:
    root = world.authority.root
    with pytest.raises(errors.CertificateUntrusted):
        peers.check_tls_peer(manifest, root, tls_certificate(foreign, "graz"), now_ms=NOW)
    with pytest.raises(errors.CertificateExpired):
        peers.check_tls_peer(manifest, root, tls_certificate(world, "graz"), now_ms=NOW + 400 * DAY)
    signing = manifest.site("graz").certificate
    with pytest.raises(errors.CertificatePurposeMismatch):
        peers.check_tls_peer(manifest, root, signing, now_ms=NOW)
    certificate = tls_certificate(world, "graz")
    entry = Revocation(certificate=pki.fingerprint(certificate), member="graz", reason="lost laptop", at_ms=NOW)
    with pytest.raises(errors.CertificateRevoked):
        peers.check_tls_peer(manifest.model_copy(update={"revocations": (entry,)}), root, certificate, now_ms=NOW)


def test_one_lapsed_certificate_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World.make(tmp_path, sites=("graz", "linz"))
    world.enroll("vienna", days=10)
    manifest = world.publish()
    later = NOW + 20 * DAY
    opened = acceptance.open_manifest(world.published(), world.authority.root, now_ms=later)
    pki.check_dates(opened.site("graz").certificate, later, "graz")
    with pytest.raises(errors.CertificateExpired, match="vienna"):
        pki.check_dates(manifest.site("vienna").certificate, later, "vienna")
