"""Secure aggregation (docs/spec/secure-aggregation.md): messages, certificates, numbers and the two machines.

The machines have no socket and no file; only `coordinator/spool` and `handover` write. A machine takes an event and
returns effects, and the shell around it writes, sends and asks again. No message of a site holds a vector that is not
masked. Start reading with `transitions`: it explains both machines.

Imported by: coordinator, npr, protos, security.audit, security.consortium, security.dp, security.identity,
  security.log, security.secagg.coordinator, security.secagg.site, site_agent.

    transitions          both state machines: theory of operation, then the tables
    site                 the machine of a site, and every check it makes
    coordinator          the machine of the coordinator for one attempt, and the planning of a round
    registry             what each message states of itself: number, sender, data class, size rule
    messages             the messages of the protocol
    relay                the messages around it: opening a stream, manifest, receipts, checkpoints
    fields               how a message type states the bytes of its fields
    sizes                the length of each outgoing message, from public numbers
    context              what an attempt is bound to: CTX, KX, D, U and R (section 4)
    statements           everything that is ever signed (section 5)
    thresholds           quorums from the roster and the colluder bound (section 2)
    certificates         sets of signed statements that are passed on
    certificate_checks   what makes such a set valid
    layout               where each tensor is in the vector, and its clip (section 7)
    clips                clips and movement caps, from the training schedule (section 7)
    fixed_point          from floats to ring elements and back (section 7)
    scores               sites' scores in the sum, where enough of them consent, and the best round by them (section 7)
    state                the next model from a sum, with the same bytes at every site (section 10)
    groups               groups of sites whose sums are opened apart and combined by a median (section 10)
    handover             a covered result and its model in one file, for a replacement of a lost coordinator
    published            what a published result says by itself: digests, and the masks of its opened secrets
    records              what a party writes to disk before it sends (section 9)
    effects              what a machine asks its shell to do
"""
