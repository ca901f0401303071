"""A round in which one site connects with a certificate of its hospital's own authority; and who else has one of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from protos import tls
from scripts.local_federation.federation import HOST as LOOPBACK
from security.identity import pki
from security.identity.enrolment import Identity
from tests.support.federation import NumberFederation
from tests.support.own_authority import HOST, OwnAuthority

import grpc  # isort: skip  # after protos.tls, as everywhere


@pytest.fixture(scope="module")
def authority() -> OwnAuthority:
    return OwnAuthority(now_ms=time.time_ns() // 1_000_000)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, authority: OwnAuthority) -> Iterator[NumberFederation]:
    folder = tmp_path_factory.mktemp("own")
    issuer = folder / "hospital-ca.pem"
    issuer.write_text(pki.to_pem(authority.certificate))
    words = {"site0": ["--tls-issuer", str(issuer), "--tls-name", HOST]}
    made = NumberFederation(folder, sites=3, rounds=2, words=3_000, init_words=words)
    identity = identity_of(made)
    identity.own_tls_path.write_text(pki.to_pem(authority.issue(identity.tls_certificate().public_key(), HOST)))
    with made.running():
        made.wait_published(2)
        yield made


def identity_of(federation: NumberFederation) -> Identity:
    return Identity(folder=federation.folders.site("site0") / "identity")


def knock(federation: NumberFederation, key: ec.EllipticCurvePrivateKey, certificate: bytes) -> grpc.StatusCode:
    """How a conversation ends in which nothing is said."""
    identity = identity_of(federation)
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    credentials = grpc.ssl_channel_credentials(identity.root_path.read_bytes(), plain, certificate)
    address = f"{LOOPBACK}:{federation.folders.port}"
    with grpc.secure_channel(address, credentials, options=tls.channel_options(None)) as channel:
        call = channel.stream_stream(tls.METHOD)(iter(()), timeout=10)
        with suppress(grpc.RpcError):
            list(call)
        code: grpc.StatusCode = call.code()
        return code


def test_a_site_takes_part_with_a_certificate_of_its_own_authority(federation: NumberFederation) -> None:
    identity = identity_of(federation)
    assert identity.shown_tls_path() == identity.own_tls_path
    assert [survivors for _, survivors in federation.check_sums()] == [("site0", "site1", "site2")] * 2
    assert knock(federation, identity.tls_key(), identity.own_tls_path.read_bytes()) is grpc.StatusCode.OK


def test_others_with_a_certificate_of_that_authority_are_refused(
    federation: NumberFederation, authority: OwnAuthority
) -> None:
    key = pki.new_tls_key()
    for names in ((HOST,), ("printer.graz.example",), ()):
        shown = pki.to_pem(authority.issue(key.public_key(), *names)).encode()
        assert knock(federation, key, shown) is grpc.StatusCode.PERMISSION_DENIED, names
    own = identity_of(federation).tls_key()
    shown = pki.to_pem(authority.issue(own.public_key(), "printer.graz.example")).encode()
    assert knock(federation, own, shown) is grpc.StatusCode.PERMISSION_DENIED
    assert federation.coordinator.text().count("a peer was refused") >= 4


def test_another_authority_does_not_get_through_the_handshake(federation: NumberFederation) -> None:
    stranger = OwnAuthority(now_ms=time.time_ns() // 1_000_000)
    own = identity_of(federation).tls_key()
    shown = pki.to_pem(stranger.issue(own.public_key(), HOST)).encode()
    assert knock(federation, own, shown) is grpc.StatusCode.UNAVAILABLE
