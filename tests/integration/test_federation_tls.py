"""The consortium's certificates over real gRPC on loopback: who gets a stream, and who is told apart."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from lazaret import files
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.identity import peers, pki
from security.identity.pki import Role
from security.secagg import relay
from tests.support.consortium_world import PLAN, World, write_initial_model

METHOD = "/lazaret.federation.v1.Federation/Converse"


def federation(folder: Path) -> World:
    """Enrolled today, since TLS looks at the real clock."""
    now = time.time_ns() // 1_000_000
    authority = Authority.create(folder / "consortium", "lesions", passphrase=None, now_ms=now)
    world = World(folder, authority, SystemClock())
    world.write_plan(PLAN)
    write_initial_model(authority.folder / "initial.safetensors")
    world.enroll("hub", Role.COORDINATOR, hosts=("localhost", "127.0.0.1"))
    for site in ("graz", "linz", "vienna"):
        world.enroll(site)
    world.publish()
    return world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return federation(tmp_path_factory.mktemp("ours"))


def credentials(world: World, member: str) -> tuple[bytes, bytes, bytes]:
    identity = world.identity(member)
    return (
        identity.root_path.read_bytes(),
        files.read_private(identity.tls_key_path()),
        identity.tls_path.read_bytes(),
    )


class Echo(grpc.GenericRpcHandler):
    """Answers every Ping-worthy parcel, after asking who is on the line."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.manifest = world.authority.latest(now_ms=world.now)
        self.seen: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self.converse) if details.method == METHOD else None

    def converse(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        pem = context.auth_context()["x509_pem_cert"][0]
        certificate = pki.read_certificate(pem)
        assert self.manifest is not None
        who = peers.check_tls_peer(self.manifest, self.world.authority.root, certificate, now_ms=self.world.now)
        self.seen.append(who.member)
        for data in incoming:
            parcel = FROM_SITE.decode(data)
            answer = relay.Ping(number=parcel.sequence)
            yield FROM_COORDINATOR.encode(Parcel(message=answer, sequence=1, log_head=parcel.log_head))


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[tuple[str, Echo]]:
    root, key, certificate = credentials(world, "hub")
    echo = Echo(world)
    running = grpc.server(futures.ThreadPoolExecutor(4), handlers=[echo])
    secure = grpc.ssl_server_credentials([(key, certificate)], root_certificates=root, require_client_auth=True)
    port = running.add_secure_port("127.0.0.1:0", secure)
    running.start()
    yield f"localhost:{port}", echo
    running.stop(grace=0).wait()


def converse(address: str, secure: grpc.ChannelCredentials) -> relay.Ping:
    signature = relay.HeadSignature(name="graz.lesions/audit", key_id=bytes(4), value=bytes(64))
    head = relay.SignedHead(origin="graz.lesions/audit", size=1, root=bytes(32), signatures=(signature,))
    with grpc.secure_channel(address, secure) as channel:
        call = channel.stream_stream(METHOD)
        data = FROM_SITE.encode(Parcel(message=relay.Pong(number=1), sequence=9, log_head=head))
        (answer,) = [FROM_COORDINATOR.decode(reply) for reply in call(iter([data]), timeout=20)]
    assert isinstance(answer.message, relay.Ping)
    return answer.message


def test_a_listed_site_talks_and_is_known(world: World, server: tuple[str, Echo]) -> None:
    address, echo = server
    root, key, certificate = credentials(world, "graz")
    assert converse(address, grpc.ssl_channel_credentials(root, key, certificate)).number == 9
    assert echo.seen[-1] == "graz"


def test_no_client_certificate_no_stream(world: World, server: tuple[str, Echo]) -> None:
    root, _, _ = credentials(world, "graz")
    with pytest.raises(grpc.RpcError) as caught:
        converse(server[0], grpc.ssl_channel_credentials(root))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_another_consortiums_site_gets_no_stream(world: World, server: tuple[str, Echo], tmp_path: Path) -> None:
    other = federation(tmp_path)
    root, _, _ = credentials(world, "graz")
    _, key, certificate = credentials(other, "graz")
    with pytest.raises(grpc.RpcError) as caught:
        converse(server[0], grpc.ssl_channel_credentials(root, key, certificate))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_signing_certificate_opens_no_stream(world: World, server: tuple[str, Echo]) -> None:
    identity = world.identity("graz")
    root, _, _ = credentials(world, "graz")
    certificate = identity.signing_path.read_bytes()
    (path,) = (identity.folder / "keys").glob("signing-*.key")
    with pytest.raises((grpc.RpcError, ValueError)):
        converse(server[0], grpc.ssl_channel_credentials(root, files.read_private(path), certificate))


def test_a_site_certificate_is_no_server(world: World) -> None:
    """A hospital cannot pose as the coordinator towards another hospital."""
    root, key, certificate = credentials(world, "linz")
    impostor = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Echo(world)])
    secure = grpc.ssl_server_credentials([(key, certificate)], root_certificates=root, require_client_auth=True)
    port = impostor.add_secure_port("127.0.0.1:0", secure)
    impostor.start()
    try:
        with pytest.raises(grpc.RpcError):
            converse(f"localhost:{port}", grpc.ssl_channel_credentials(*credentials(world, "graz")))
    finally:
        impostor.stop(grace=0).wait()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command as second opinion")
def test_openssl_agrees_on_chain_and_purpose(world: World) -> None:
    def verify(path: Path, purpose: str) -> bool:
        command = ["openssl", "verify", "-x509_strict", "-CAfile", str(world.authority.folder / "root.pem")]
        done = subprocess.run([*command, "-purpose", purpose, str(path)], capture_output=True, timeout=30, check=False)
        return done.returncode == 0

    graz, hub = world.identity("graz"), world.identity("hub")
    assert verify(graz.tls_path, "sslclient") and not verify(graz.tls_path, "sslserver")
    assert verify(hub.tls_path, "sslserver") and not verify(hub.tls_path, "sslclient")
    assert not verify(graz.signing_path, "sslclient") and not verify(graz.signing_path, "sslserver")
