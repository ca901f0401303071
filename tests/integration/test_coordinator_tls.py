"""Who gets a word out of the real coordinator: nobody without a certificate of its root over TLS 1.3."""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stress.verdict import Reading
from protos import tls
from scripts.local_federation.federation import HOST, Party, command
from security.consortium.cli import cli as consortium_command
from security.identity.enrolment import Identity
from security.identity.pki import fingerprint
from site_agent.cli import cli as site_command
from tests.support.federation import NumberFederation
from tests.support.tls_client import PREFACE, bytes_back, context_of

import grpc  # isort: skip  # after protos.tls, as everywhere
from grpc_health.v1 import health_pb2, health_pb2_grpc  # isort: skip


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumberFederation]:
    """A federation of which only the coordinator runs."""
    made = NumberFederation(tmp_path_factory.mktemp("tls"))
    made.coordinator.start()
    try:
        made.coordinator.wait_for("listening", seconds=60)
        yield made
    finally:
        made.coordinator.stop()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """A site of another consortium that happens to have the same names."""
    return Identity(folder=NumberFederation(tmp_path_factory.mktemp("other")).folders.site("site0") / "identity")


def identity_of(federation: NumberFederation, name: str = "site0") -> Identity:
    return Identity(folder=federation.folders.site(name) / "identity")


def address(federation: NumberFederation) -> str:
    return f"{HOST}:{federation.folders.port}"


def health(federation: NumberFederation, credentials: grpc.ChannelCredentials) -> int:
    with grpc.secure_channel(address(federation), credentials, options=tls.OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=10).status)


def converse(federation: NumberFederation, credentials: grpc.ChannelCredentials) -> list[bytes]:
    with grpc.secure_channel(address(federation), credentials, options=tls.OPTIONS) as channel:
        return list(channel.stream_stream(tls.METHOD)(iter([b"?"]), timeout=10))


def test_a_member_may_ask_how_the_service_is(federation: NumberFederation) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    assert health(federation, tls.channel_credentials(identity_of(federation))) == serving


def test_a_member_gets_no_answer_to_what_is_no_message(federation: NumberFederation) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        converse(federation, tls.channel_credentials(identity_of(federation)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_there_is_no_reflection(federation: NumberFederation) -> None:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    credentials = tls.channel_credentials(identity_of(federation))
    with grpc.secure_channel(address(federation), credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(method)(iter([b""]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("call", [health, converse])
def test_no_rpc_completes_without_a_certificate(federation: NumberFederation, call: object) -> None:
    root = identity_of(federation).root_path.read_bytes()
    with pytest.raises(grpc.RpcError) as caught:
        call(federation, grpc.ssl_channel_credentials(root))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("call", [health, converse])
def test_no_rpc_completes_with_another_consortiums_certificate(
    federation: NumberFederation, stranger: Identity, call: object
) -> None:
    root = identity_of(federation).root_path.read_bytes()
    pair = stranger.tls_key_path().read_bytes(), stranger.tls_path.read_bytes()
    with pytest.raises(grpc.RpcError) as caught:
        call(federation, grpc.ssl_channel_credentials(root, *pair))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_no_byte_comes_back_without_a_certificate(federation: NumberFederation) -> None:
    context = context_of(identity_of(federation), ssl.TLSVersion.TLSv1_3, certificate=False)
    assert _nothing(context, federation.folders.port)


def test_no_byte_comes_back_over_tls_1_2(federation: NumberFederation) -> None:
    context = context_of(identity_of(federation), ssl.TLSVersion.TLSv1_2, certificate=True)
    assert _nothing(context, federation.folders.port)


def test_bytes_do_come_back_to_a_member(federation: NumberFederation) -> None:
    context = context_of(identity_of(federation), ssl.TLSVersion.TLSv1_3, certificate=True)
    assert bytes_back(context, federation.folders.port)


def _nothing(context: ssl.SSLContext, port: int) -> bool:
    try:
        return bytes_back(context, port) == b""
    except (ssl.SSLError, ConnectionError):
        return True


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command as second opinion")
@pytest.mark.parametrize(
    ("who", "version", "answered"),
    [
        ("member", "-tls1_3", True),
        ("member", "-tls1_2", False),
        ("nobody", "-tls1_3", False),
        ("stranger", "-tls1_3", False),
    ],
)
def test_openssl_finds_the_same(
    federation: NumberFederation, stranger: Identity, who: str, version: str, answered: bool
) -> None:
    member = identity_of(federation)
    shown = {"member": member, "stranger": stranger, "nobody": None}[who]
    words = ["openssl", "s_client", "-connect", address(federation), version, "-alpn", "h2", "-quiet"]
    words += ["-CAfile", str(member.root_path)]
    if shown is not None:
        words += ["-cert", str(shown.tls_path), "-key", str(shown.tls_key_path())]
    assert bool(_said_to_openssl(words)) is answered


def _said_to_openssl(words: list[str]) -> bytes:
    """Application bytes that the server sends after the beginning of an HTTP/2 connection."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(PREFACE)
            process.stdin.flush()
            end = time.monotonic() + 3
            while time.monotonic() < end and process.poll() is None:
                if select.select([process.stdout], [], [], 0.1)[0]:
                    return process.stdout.read1(64)
            return b""
        except BrokenPipeError:
            return b""
        finally:
            process.kill()


def enrolled_late(federation: NumberFederation, folder: Path) -> Identity:
    """A certificate of the right root for a site that no manifest lists."""
    folders = federation.folders
    command(
        site_command, "init", folder, "--federation", folders.federation, "--name", "late",
        "--address", address(federation), "--data", "generated",
    )  # fmt: skip
    request = folder / "identity" / "request.json"
    command(consortium_command, "enroll", request, "--yes", "--dir", folders.consortium, "--no-passphrase")
    root = Identity(folder=folders.coordinator / "identity").root()
    answer = folders.consortium / "answers" / "late.json"
    command(site_command, "--config", folder / "site.toml", "join", answer, "--root-fingerprint", fingerprint(root))
    return Identity(folder=folder / "identity")


def test_a_site_that_is_not_in_the_roster_is_turned_away(federation: NumberFederation, tmp_path: Path) -> None:
    late = enrolled_late(federation, tmp_path / "late")
    with pytest.raises(grpc.RpcError) as caught:
        converse(federation, tls.channel_credentials(late))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    federation.coordinator.wait_for("a peer was refused", seconds=5)


def test_connections_of_strangers_leave_it_its_descriptors(federation: NumberFederation, tmp_path: Path) -> None:
    """Found by fuzzing: 300 connections that never began TLS took every descriptor, and no file could be written."""
    folders = NumberFederation(tmp_path / "few", words=10).folders
    words = ["scripts.local_federation.party", "coordinator", "--config", folders.coordinator / "coordinator.toml"]
    few = ("prlimit", "--nofile=300")
    coordinator = Party("coordinator", words, tmp_path / "few.log", folders.coordinator, prefix=few)
    held = []
    try:
        coordinator.start()
        coordinator.wait_for("listening", seconds=60)
        held = [socket.create_connection((HOST, folders.port), timeout=10) for _ in range(400)]
        time.sleep(1.0)
        assert Reading.of(coordinator.pid).descriptors < 200
        # They are closed when they do not begin TLS in time, and then a member is answered again.
        credentials = tls.channel_credentials(Identity(folder=folders.site("site0") / "identity"))
        with grpc.secure_channel(f"{HOST}:{folders.port}", credentials, options=tls.OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        assert coordinator.code is None
    finally:
        for connection in held:
            connection.close()
        coordinator.stop()
