"""TLS 1.3 or nothing, asked by openssl and by Python's ssl: no application byte comes back from anything less."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from lazaret.errors import CertificateError, LocalProtocolError
from protos import tls
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.identity import pki
from security.identity.pki import Role
from tests.support.consortium_world import PLAN, World, write_initial_model

import grpc  # isort: skip  # after protos.tls, as everywhere


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("tls")
    clock = SystemClock()
    authority = Authority.create(folder / "consortium", "lesions", passphrase=None, now_ms=clock.now_ms())
    world = World(folder, authority, clock)
    world.write_plan(PLAN)
    write_initial_model(authority.folder / "initial.safetensors")
    world.enroll("hub", Role.COORDINATOR, hosts=("localhost", "127.0.0.1"))
    world.enroll("graz")
    return world


class Names(grpc.GenericRpcHandler):
    """Answers with what it has learnt of its peer."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self.converse) if details.method == tls.METHOD else None

    def converse(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in incoming:
            certificate = tls.peer_certificate(context)
            pin = pki.key_fingerprint(pki.certificate_key(certificate))
            yield f"{pki.subject_of(certificate).member} {pin}".encode()


@pytest.fixture(scope="module")
def port(world: World) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Names()], options=tls.OPTIONS)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials(world.identity("hub")))
    server.start()
    yield port
    server.stop(grace=0).wait()


def test_a_member_is_named_by_its_certificate(world: World, port: int) -> None:
    with grpc.secure_channel(f"localhost:{port}", tls.channel_credentials(world.identity("graz"))) as channel:
        (answer,) = channel.stream_stream(tls.METHOD)(iter([b"?"]), timeout=20)
    path = world.identity("graz").tls_key_path()
    member, key = answer.decode().split()
    assert member == "graz" and path.name == f"tls-{key[:16]}.key"


def context_of(world: World, version: ssl.TLSVersion, *, certificate: bool) -> ssl.SSLContext:
    identity = world.identity("graz")
    context = ssl.create_default_context(cafile=str(identity.root_path))
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    if certificate:
        context.load_cert_chain(identity.tls_path, identity.tls_key_path())
    return context


def bytes_back(context: ssl.SSLContext, port: int) -> bytes:
    """What the server answers to the beginning of an HTTP/2 connection."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as secure,
    ):
        secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
        return secure.recv(64)


def test_tls_1_3_with_a_certificate_is_answered(world: World, port: int) -> None:
    assert bytes_back(context_of(world, ssl.TLSVersion.TLSv1_3, certificate=True), port)


def test_tls_1_2_is_refused_in_the_handshake(world: World, port: int) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        bytes_back(context_of(world, ssl.TLSVersion.TLSv1_2, certificate=True), port)


def test_without_a_certificate_no_byte_comes_back(world: World, port: int) -> None:
    try:
        answer = bytes_back(context_of(world, ssl.TLSVersion.TLSv1_3, certificate=False), port)
    except (ssl.SSLError, ConnectionError):
        answer = b""
    assert answer == b""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command as second opinion")
@pytest.mark.parametrize(("flag", "good"), [("-tls1_3", True), ("-tls1_2", False), ("-tls1_1", False)])
def test_openssl_gets_the_same_answer(world: World, port: int, flag: str, good: bool) -> None:
    identity = world.identity("graz")
    files = ["-cert", str(identity.tls_path), "-key", str(identity.tls_key_path()), "-CAfile", str(identity.root_path)]
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", flag, "-alpn", "h2", "-brief", *files]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=30, check=False)
    assert (b"CONNECTION ESTABLISHED" in done.stderr + done.stdout) is good


TWIN = """
import sys, time
from pathlib import Path
import grpc
from concurrent import futures
root, key, certificate = (Path(name).read_bytes() for name in sys.argv[1:])
server = grpc.server(futures.ThreadPoolExecutor(2))
secure = grpc.ssl_server_credentials([(key, certificate)], root_certificates=root, require_client_auth=True)
print(server.add_secure_port("127.0.0.1:0", secure), flush=True)
server.start()
sys.stdin.read()
"""


def test_twin_without_the_variable_tls_1_2_gets_through(world: World) -> None:
    hub = world.identity("hub")
    command = [sys.executable, "-c", TWIN, str(hub.root_path), str(hub.tls_key_path()), str(hub.tls_path)]
    clean = {name: value for name, value in os.environ.items() if name != tls.SUITES}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            port = int(process.stdout.readline())
            assert bytes_back(context_of(world, ssl.TLSVersion.TLSv1_2, certificate=True), port)
        finally:
            process.stdin.close()


def test_grpc_imported_first_is_an_error_and_not_a_silent_tls_1_2(world: World) -> None:
    code = "import grpc, sys; from pathlib import Path; from protos import tls; "
    code += (
        "from security.identity.enrolment import Identity; tls.server_credentials(Identity(folder=Path(sys.argv[1])))"
    )
    clean = {name: value for name, value in os.environ.items() if name != tls.SUITES}
    folder = str(world.identity("hub").folder)
    done = subprocess.run([sys.executable, "-c", code, folder], env=clean, capture_output=True, timeout=60, check=False)
    assert done.returncode != 0 and LocalProtocolError.__name__ in done.stderr.decode()


def test_a_call_without_certificate_has_no_name() -> None:
    class Plain:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {}

    with pytest.raises(CertificateError):
        tls.peer_certificate(Plain())


def test_key_files_open_to_others_are_refused(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.identity("graz").folder, tmp_path / "graz")
    identity = type(world.identity("graz"))(folder=tmp_path / "graz")
    identity.tls_key_path().chmod(0o644)
    with pytest.raises(Exception, match="open to others"):
        tls.channel_credentials(identity)
