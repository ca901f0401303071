"""TLS with a key that stays in a PKCS#11 token: it connects, the other end knows whose it is, and the process ends."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from lazaret.errors import ConfigError, KeyUnavailable
from protos import tls  # before grpc, as in every command
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.identity import keystore, pki, token
from security.identity.pki import Role
from security.identity.token import TokenTlsKey, TokenUri
from security.rng import SystemRandomness
from tests.support.consortium_world import World, subject
from tests.support.soft_token import needs_softhsm, soft_tokens

import grpc  # isort: skip

pytestmark = needs_softhsm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Enrolled today, since TLS looks at the real clock."""
    folder = tmp_path_factory.mktemp("tokens")
    authority = Authority.create(
        folder / "consortium", "lesions", passphrase=None, now_ms=time.time_ns() // 1_000_000
    )
    made = World(folder, authority, SystemClock())
    made.enroll("hub", Role.COORDINATOR, hosts=("localhost", "127.0.0.1"))
    place = TokenUri.parse(soft_tokens().uri(), "test")
    request = made.identity("graz").create(subject("graz"), place=place)
    authority.enroll(made.key, request, now_ms=made.now, days=30)
    made.install("graz")
    return made


async def who_calls(world: World) -> tuple[str, str]:
    """What a coordinator sees of a site that dials."""
    seen: list[tuple[str, str]] = []

    async def converse(requests: object, context: grpc.aio.ServicerContext) -> None:
        certificate = tls.peer_certificate(context)
        pin = pki.key_fingerprint(pki.certificate_key(certificate))
        seen.append((pki.subject_of(certificate).member, pin))
        await context.write(b"heard")

    handler = grpc.stream_stream_rpc_method_handler(converse)
    server = grpc.aio.server(options=tls.COORDINATOR_OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Who", {"Converse": handler})])
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials(world.identity("hub")))
    await server.start()
    try:
        options, made = tls.channel_options(None), tls.channel_credentials(world.identity("graz"))
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", made, options=options) as channel:
            del made
            assert await asyncio.wait_for(channel.stream_stream("/test.Who/Converse")().read(), 20) == b"heard"
    finally:
        await server.stop(None)
    return seen[0]


def test_a_site_connects_with_a_key_that_stays_in_its_token(world: World) -> None:
    before = set(threading.enumerate())
    member, pin = asyncio.run(who_calls(world))
    certificate = world.identity("graz").tls_certificate()
    assert (member, pin) == ("graz", pki.key_fingerprint(pki.certificate_key(certificate)))
    # A thread of gRPC's that stays would keep the process from ending; it goes when gRPC has let go of the connection.
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(timeout=30)
            assert not thread.is_alive()


def test_a_handshake_with_another_key_of_the_token_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is graz's, the key is not: what a thief of certificates could try."""
    place = TokenUri.parse(soft_tokens().uri(), "test")
    other = token.make_tls_key(place, "another", SystemRandomness())
    monkeypatch.setattr(type(world.identity("graz")), "tls_key", lambda self: other)
    with pytest.raises((grpc.RpcError, TimeoutError, AssertionError)):
        asyncio.run(asyncio.wait_for(who_calls(world), 8))


def test_a_coordinator_is_told_that_its_tls_key_must_be_a_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = world.identity("hub")
    address = keystore.token_of(world.identity("graz").tls_key_path())
    monkeypatch.setattr(keystore, "token_of", lambda path: address)
    with pytest.raises(ConfigError, match="gRPC cannot accept connections with a TLS key in a token"):
        tls.server_credentials(hub)


def test_a_token_that_is_gone_is_reported_before_the_handshake(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: TokenTlsKey) -> None:
        raise KeyUnavailable("token hospital cannot be searched")

    monkeypatch.setattr(TokenTlsKey, "check_present", gone)
    with pytest.raises(KeyUnavailable):
        tls.channel_credentials(world.identity("graz"))


def test_the_signer_is_of_this_version_of_grpc(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpc import experimental

    monkeypatch.delattr(experimental, "ssl_channel_credentials_with_custom_signer")
    with pytest.raises(ConfigError, match="this version of gRPC cannot use a TLS key in a token"):
        tls.channel_credentials(world.identity("graz"))
