"""Who is who in a federation: keys, certificates, the signed manifest, and the policy that follows from it.

A site takes members, thresholds, model, code and settings from the manifest alone, never from the coordinator
(docs/spec/secure-aggregation.md, section 2). No private key leaves the folder, or the token, in which it was made.

Imported by: coordinator, npr, protos, security.audit, security.consortium, security.log, security.secagg,
  security.secagg.coordinator, security.secagg.site, site_agent.

    pki             certificates of one federation: one root; TLS and signing kept apart; fingerprints for people
    keystore        private keys and secrets on disk
    token           private keys that stay in a PKCS#11 token
    enrolment_files  request, answer and kit: what a member and the consortium send each other
    enrolment       how a member joins: its folder, keys, certificates and manifest
    member_copies   whose copy a backup is, and the new member that it becomes
    manifest        the signed manifest as a value
    rules           what a manifest must be in itself, one function for each rule
    acceptance      which manifests a party accepts: their file, the root's signatures, and which one may follow another
    peers           who is at the other end of a connection, by the root or by a site's own authority
    membership      what the other packages need of a manifest
    pinned_files    the first model, with its layout, and a method's own file
    credentials     checks of an identity folder, for the `check` commands
    tls_probe       one TLS connection to a coordinator, opened and closed to look at its certificate
"""
