"""Which key agreement a TLS server chooses, asked without a handshake; and that gRPC offers the hybrid one."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from security.identity.tls_probe import GROUPS, HYBRID, Destination, ask_group


@pytest.fixture(scope="module")
def pair() -> tuple[bytes, bytes]:
    """A key and a certificate for localhost, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    start = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, start, start + dt.timedelta(days=36500))
    certificate = builder.sign(key, hashes.SHA256())
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return pem, certificate.public_bytes(serialization.Encoding.PEM)


def test_a_grpc_server_chooses_the_hybrid_group(pair: tuple[bytes, bytes]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        assert ask_group(Destination(host="127.0.0.1", port=port)) == HYBRID
    finally:
        server.stop(None)


@contextmanager
def answering(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that takes one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def take() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                serve(connection)

        thread = threading.Thread(target=take)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(10)


def test_a_server_without_it_says_what_it_chooses(pair: tuple[bytes, bytes], tmp_path: Path) -> None:
    (tmp_path / "pair.pem").write_bytes(b"".join(pair))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    context.set_ecdh_curve("prime256v1")

    def serve(connection: socket.socket) -> None:
        context.wrap_socket(connection, server_side=True)

    with answering(serve) as port:
        assert ask_group(Destination(host="127.0.0.1", port=port)) == "P-256"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 40, b"\x15\x03\x03\x00\x02\x02\x28"])
def test_an_answer_that_says_nothing_is_empty(answer: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)

    with answering(serve) as port:
        assert ask_group(Destination(host="127.0.0.1", port=port), seconds=5) == ""


def test_a_channel_offers_these_groups_and_a_hybrid_share(pair: tuple[bytes, bytes]) -> None:
    """What we ask a server with `ask_group` is what a channel of ours asks it with."""
    heard: list[bytes] = []
    with answering(lambda connection: heard.append(connection.recv(16384))) as port:
        credentials = grpc.ssl_channel_credentials(pair[1])
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel, suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=2)
    found = dict(extensions(heard[0]))
    offered = struct.unpack(f">{(len(found[10]) - 2) // 2}H", found[10][2:])
    assert list(offered) == list(GROUPS)
    assert struct.unpack(">H", found[51][2:4]) == (next(iter(GROUPS)),), "the share of the hybrid group comes first"


def extensions(record: bytes) -> Iterator[tuple[int, bytes]]:
    at = 5 + 4 + 2 + 32
    at += 1 + record[at]
    at += 2 + int.from_bytes(record[at : at + 2], "big")
    at += 1 + record[at]
    end = at + 2 + int.from_bytes(record[at : at + 2], "big")
    at += 2
    while at < end:
        kind, length = struct.unpack(">HH", record[at : at + 4])
        yield kind, record[at + 4 : at + 4 + length]
        at += 4 + length
