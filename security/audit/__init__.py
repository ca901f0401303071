"""The audit: what an auditor runs on copies of privacy logs, offline, with nothing but the consortium's root key.

Everything rests on `security.log.reader` and on the formats in docs/spec/audit-log.md. What is wrong in a log is a
finding with a code, never an exception: one damaged log must not hide what the others say.

`site-agent export` imports it, to verify the hospital's own log for the model card. What it never does: write to a log
folder (a contract in pyproject.toml keeps the writer out; only `bench` makes logs of its own, in a temporary folder),
connect to a network (except `forward`, to the one collector that it is given), or accept an entry because it is well
formed.

Imported by: site_agent.

    cli             the group of commands, and what they share: options, and how they end
    commands        commands that judge: verify, cross, egress, epsilon, heads, proofs, report
    verify          one log: every check
    agreement       every manifest version of a log folder: keys to believe and rules to judge by
    conformance     the rules, one small function each
    completeness    the steps of a round, the isolation of what trained, and settings that changed
    scan            the pass over all entries: form, order, time, tree, what left, and the rules in force
    safe_files      files of a folder that somebody else made
    checkpoints     the checkpoints of one log and who signed them
    egress_ledger   bytes that left, against the kernel's count
    facts           the history in a log, and one round in all logs together
    compare         many logs side by side
    epsilon         the privacy spent, computed again
    findings        every code, what it means and what to ask next
    text            what was found, for a terminal and as JSON; why "prototypes never left" holds
    report          what was found, as a page
    pages           templates that escape everything, and charts as geometry
    proof           one entry with everything needed to check it, and the check of every kind of evidence
    claim           one page about one round, with the proof of every sentence
    export          what left as a table or events, and one log as static files for everybody (C2SP tlog-tiles)
    forward         entries of a live log to a log collector
    timestamps      checkpoints with a time stamp of an authority (RFC 3161)
    visits          logs against those of the last visit; witnesses without a log
    drafts          documents drafted from logs, each sentence with its entries
    bench           what logging and verifying cost
"""
