"""TLS 1.3 with a certificate on both sides, and nothing else; the one place where gRPC's credentials are made.

gRPC's Python API cannot name a least version. Its one switch for ciphers, an environment variable that is read once, is
set here to a TLS 1.2 suite that needs an RSA certificate. All our certificates are ECDSA, so TLS 1.2 finds no cipher in
common and ends in the handshake; TLS 1.3 has suites of its own, which the variable does not touch. Import this module
before grpc.
"""

from __future__ import annotations

import os
import resource
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from lazaret import files
from lazaret.errors import CertificateError, ConfigError, LocalProtocolError
from security.crypto.ring import MAX_PARCEL
from security.identity import keystore, pki
from security.identity.enrolment import Identity
from security.identity.enrolment_files import read_file
from security.identity.token import TokenTlsKey

SUITES: Final = "GRPC_SSL_CIPHER_SUITES"
RSA_ONLY: Final = "ECDHE-RSA-AES256-GCM-SHA384"
_TOO_LATE: Final = "grpc" in sys.modules and os.environ.get(SUITES) != RSA_ONLY
os.environ[SUITES] = RSA_ONLY
# What goes wrong on the network is told by our own commands, in one line; the library would add several of its own.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc  # noqa: E402  # it reads the variable when it starts

METHOD: Final = "/lazaret.federation.v1.Federation/Converse"
# A parcel has a bound of its own; gRPC only needs to let it through. Pings keep firewalls from forgetting the stream
# during an hour of training, and tell a dead peer from a silent one.
OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_PARCEL + 1024),
    ("grpc.max_send_message_length", MAX_PARCEL + 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Fixed windows: left to themselves they grow to many megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_retries", 0),
    ("grpc.so_reuseport", 0),
)
# A coordinator has as many windows as sites, and gRPC opens each by a whole frame more while one is being read. After
# that it would keep a buffer of a frame's length for every connection, were there no bound. A site has one window only,
# and may have a slow way to its coordinator.
COORDINATOR_OPTIONS: Final = (
    *OPTIONS,
    ("grpc.http2.lookahead_bytes", (1 << 16) - 1),
    ("grpc.experimental.tcp_max_read_buffer_size", 12_288),
    # Anybody can open a connection. One that does not become TLS, or has no stream, is closed: else a few thousand of
    # them would take every file descriptor, and the coordinator could not write its own files. A site has one stream,
    # and tries for 20 s to begin TLS: on a busy machine or a bad line it may need them.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_concurrent_streams", 8),
)
OWN_DESCRIPTORS: Final = 192  # database, log, spool, pages: what connections must leave free
MOST_CONNECTIONS: Final = 2048  # many times as many as a roster has
LEAST_CONNECTIONS: Final = 32
SITE_OPTIONS: Final = (*OPTIONS, ("grpc.http2.lookahead_bytes", 1 << 18))

# The coordinator's clock in milliseconds, before its first message: for a site's own check, nothing else reads it.
TIME_KEY: Final = "lazaret-time-ms"


def coordinator_options() -> list[tuple[str, int]]:
    """For the coordinator's server: connections leave it the descriptors that it needs itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OWN_DESCRIPTORS
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, soft - OWN_DESCRIPTORS))
    return [*COORDINATOR_OPTIONS, ("grpc.max_allowed_incoming_connections", most)]


def channel_options(proxy: str | None) -> list[tuple[str, int | str]]:
    """For a site's channel: proxies that the environment names are not looked at."""
    options: list[tuple[str, int | str]] = [*SITE_OPTIONS, ("grpc.enable_http_proxy", int(proxy is not None))]
    return options if proxy is None else [*options, ("grpc.http_proxy", proxy)]


def server_credentials(identity: Identity, issuers: Sequence[x509.Certificate] = ()) -> grpc.ServerCredentials:
    """The coordinator's side: a client without a certificate of this federation's root gets no stream.

    :param issuers: own authorities of sites. Who comes with a certificate of theirs is looked at by `peers`.
    """
    _check_order()
    path = identity.tls_key_path()
    if keystore.token_of(path) is not None:
        raise ConfigError(
            "gRPC cannot accept connections with a TLS key in a token",
            where=str(path),
            hint="`coordinator renew` makes a TLS key in a file; the signing key may stay in the token",
        )
    pair = (files.read_private(path), read_file(identity.tls_path))
    anchors = read_file(identity.root_path) + b"".join(pki.to_pem(issuer).encode() for issuer in issuers)
    return grpc.ssl_server_credentials([pair], root_certificates=anchors, require_client_auth=True)


def channel_credentials(identity: Identity, only: x509.Certificate | None = None) -> grpc.ChannelCredentials:
    """A site's side: the coordinator must show a certificate of this federation's root for the host dialled.

    :param only: the one certificate that is accepted. It is the only trust anchor then, so that no other certificate
        of the same root will do.
    """
    _check_order()
    anchor = read_file(identity.root_path) if only is None else pki.to_pem(only).encode()
    certificate, path = read_file(identity.shown_tls_path()), identity.tls_key_path()
    if keystore.token_of(path) is None:
        return grpc.ssl_channel_credentials(anchor, files.read_private(path), certificate)
    key = identity.tls_key()
    if not isinstance(key, TokenTlsKey):
        raise LocalProtocolError("the address of a key has led to no token", where=str(path))
    return _signed_by_token(key, anchor, certificate)


def peer_certificate(context: Any) -> x509.Certificate:
    """The client certificate of a call, from a server's context (grpc or grpc.aio); give it to `peers.check_tls_peer`.

    :raises CertificateError: if the call has none, which the handshake should have prevented.
    """
    found = context.auth_context().get("x509_pem_cert", ())
    if len(found) != 1:
        raise CertificateError("the peer showed no certificate", where="TLS")
    return pki.read_certificate(found[0], "TLS certificate of the peer")


def _check_order() -> None:
    if _TOO_LATE:
        raise LocalProtocolError("grpc was imported before protos.tls, so TLS 1.2 could not be switched off")


def _signed_by_token(key: TokenTlsKey, anchor: bytes, certificate: bytes) -> grpc.ChannelCredentials:
    """The handshake asks the token for its one signature. The part of gRPC that can do it is called experimental.

    It starts a thread that ends with the credentials, and no program ends before it. So they are given to a channel at
    once and kept in no variable: the traceback of an error would hold them, and a process with an error would stay.
    """
    from grpc import experimental

    key.check_present()
    offload = getattr(experimental, "ssl_channel_credentials_with_custom_signer", None)
    if offload is None:
        raise ConfigError("this version of gRPC cannot use a TLS key in a token", hint="install the one that is pinned")

    def sign(data: bytes, algorithm: Any, _: Any) -> bytes:
        if algorithm != experimental.PrivateKeySignatureAlgorithm.ECDSA_SECP256R1_SHA256:
            raise LocalProtocolError("TLS asks for another signature than ECDSA P-256", where="TLS")
        return key.sign(data, ec.ECDSA(hashes.SHA256()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", experimental.ExperimentalApiWarning)
        return offload(private_key_sign_fn=sign, root_certificates=anchor, certificate_chain=certificate)
