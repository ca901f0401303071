"""The audit: what an auditor runs on copies of privacy logs, offline, with nothing but the consortium's root key.

Everything rests on `security.log.reader` and on the formats in docs/spec/audit-log.md. What is wrong in a log is a
finding with a code, never an exception: one damaged log must not hide what the others say.

`site-agent export` imports it, to verify the hospital's own log for the model card. What it never does: write to a log
folder (a contract in pyproject.toml keeps the writer out; only `bench` makes logs of its own, in a temporary folder),
connect to a network (except `forward`, to the one collector that it is given), or accept an entry because it is well
formed.

Imported by: site_agent.

    cli             the commands
    tools           commands that lead to the tools auditors use, such as export, forward, claim and timestamp
    options         what the commands share
    verify          one log: every check
    agreement       every manifest version of a log folder: keys to believe and rules to judge by
    vouching        which of them count where the consortium has turned on ML-DSA
    conformance     the rules, one small function each
    completeness    the steps of a round, the isolation of what trained, and settings that changed
    scan            the pass over all entries: form, order, time, tree, what left, and the rules in force
    safe_files      files of a folder that somebody else made
    checkpoints     the checkpoints of one log and who signed them
    egress_ledger   bytes that left, against the kernel's count
    facts           the history in a log, and what all logs say about one round
    compare         many logs side by side
    joint_rounds    one round in all logs together
    epsilon         the privacy spent, computed again
    proof           one entry with everything needed to check it
    tiles           one log as static files for everybody (C2SP tlog-tiles)
    timestamps      checkpoints with a time stamp of an authority (RFC 3161)
    claim           one page about one round, with the proof of every sentence
    forward         entries of a live log to a log collector
    findings        every code, what it means and what to ask next
    text            what was found, for a terminal
    report          what was found, as a page
    conditions      why "prototypes never left" holds, and pieces of the page
    charts          the charts of the page
    pages           templates that escape everything, and charts as geometry
    drafts          documents drafted from logs, each sentence with its entries
    bench           what logging and verifying cost
"""
