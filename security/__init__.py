"""Cryptography, identities, secure aggregation, differential privacy and the privacy log.

It imports `lazaret` only. It knows neither torch nor grpc: its machines take a message and return effects, and the two
parties carry them out. Nothing here reads an image. No message of a site holds a vector that is not masked; the
coordinator sends sums and models.

Imported by: coordinator, npr, protos, security.audit, security.consortium, security.crypto, security.dp,
  security.identity, security.log, security.secagg, security.secagg.coordinator, security.secagg.site, site_agent.

    clock        time, passed in as an object
    labels       every domain-separation string, each for one purpose
    rng          randomness of the operating system, for all but the keys of certificates
    secrets      bytes that must not get into a log, a traceback or a pickle
    crypto       primitives: rings, masks, shares, signatures, Merkle trees
    identity     keys, certificates, the manifest and what follows from it
    secagg       the protocol of secure aggregation, both sides
    dp           accounting, noise and the privacy ledger
    log          the privacy log, as a running party writes it
    audit        the checks of logs, as an auditor runs them
    consortium   the offline authority: root key, certificates, manifests
"""
