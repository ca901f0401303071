"""Who is who in a federation: keys, certificates, the signed manifest, and the policy that follows from it.

A site takes members, thresholds, model, code and settings from the manifest alone, never from the coordinator
(docs/spec/secure-aggregation.md, section 2). No private key leaves the folder, or the token, in which it was made.

Imported by: coordinator, npr, protos, security.audit, security.consortium, security.log, security.secagg,
  security.secagg.coordinator, security.secagg.site, site_agent.

    pki             certificates of one federation: one root; TLS and signing kept apart
    keystore        private keys and secrets on disk
    token           private keys that stay in a PKCS#11 token
    request         what a member asks the consortium for, and the answer
    enrolment       how a member joins: its folder, keys, certificates and manifest
    fingerprints    digits and phrases that two people compare over the telephone
    kit             all that a member needs from the consortium, in one file
    member_copies   whose copy a backup is, and the new member that it becomes
    manifest        the signed manifest as a value
    second_signature  ML-DSA-65 beside the root's ECDSA signature, where the consortium has turned it on
    rules           which manifests are accepted, one function for each rule
    succession      which manifest may follow another
    own_issuer      TLS certificates of a site's own authority
    peers           who is at the other end of a connection
    membership      what the other packages need of a manifest
    plugin_file     the file of a method of one's own, read once and compared with the manifest
    initial_model   the file of the first model, and its layout
    credentials     checks of an identity folder, for the `check` commands
    tls_probe       one TLS connection to a coordinator, opened and closed to look at its certificate
"""
