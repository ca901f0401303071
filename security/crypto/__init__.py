"""Cryptographic primitives with this project's encodings. Pure functions and small values; no protocol.

It imports only `lazaret`, `security.labels`, `security.rng` and `security.secrets`. It reads no file and no clock, and
it never decides what follows from a failed check: it raises, and the error says only that the check failed. Sections
are those of docs/spec/secure-aggregation.md.

Imported by: coordinator, npr, protos, security.audit, security.consortium, security.identity, security.log,
  security.secagg, security.secagg.coordinator, security.secagg.site, site_agent.

    encoding        the strict length-prefixed encoding of what is signed or hashed (section 3)
    signing         Ed25519 over labelled statements (section 5)
    key_agreement   X25519 and the keys that HKDF derives from it (section 4)
    aead            sealed boxes for shares
    shamir          t-of-n sharing of 32-byte secrets (section 6)
    prg             mask streams (section 6)
    ring            numbers modulo 2^24, 2^32 and 2^64, and how they are packed (section 7)
    masking         masks on vectors: added by a site, removed by the coordinator (section 6)
    merkle          RFC 6962 trees: roots, inclusion and consistency proofs
"""
