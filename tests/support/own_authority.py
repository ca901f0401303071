"""A hospital's own certificate authority."""

from __future__ import annotations

import datetime as dt
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from security.identity import pki
from security.identity.manifest import TlsIssuer
from tests.support.consortium_world import NOW

HOST = "lazaret.graz.example"


class OwnAuthority:
    """A hospital's: it knows nothing of federations."""

    def __init__(self, name: str = "Hospital CA", now_ms: int = NOW) -> None:
        self.key, self.now_ms = ec.generate_private_key(ec.SECP384R1()), now_ms
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._builder(self.name, self.key.public_key(), 3650)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = built.sign(self.key, hashes.SHA384())

    def _builder(self, whose: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
        now = dt.datetime.fromtimestamp(self.now_ms / 1000, dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(whose)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=days))
        )

    def issue(
        self, key: Any, *names: str, usage: Any = ExtendedKeyUsageOID.CLIENT_AUTH, urn: str | None = None, days: int = 1
    ) -> x509.Certificate:
        whose = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0] if names else "nobody")])
        listed: list[x509.GeneralName] = [x509.DNSName(name) for name in names]
        listed += [x509.UniformResourceIdentifier(urn)] if urn else []
        built = self._builder(whose, key, days).add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if listed:
            built = built.add_extension(x509.SubjectAlternativeName(listed), critical=False)
        return built.sign(self.key, hashes.SHA384())

    def listed(self, name: str = HOST) -> TlsIssuer:
        return TlsIssuer(certificate=pki.to_pem(self.certificate), name=name)
