"""The site's side of secure aggregation: one machine over all rounds, and every check that it makes.

`site_agent` runs it; the coordinator's machine shares some checks of signed pieces. It has no socket, no file and no
clock of its own. In one attempt it records at most one AGREE, and after that RELEASE or ABORT, never both, each before
it is sent (docs/spec/secure-aggregation.md, section 8). Keys, seeds and shares are never written to disk, except the
one sealed answer that AGREE promises.

Imported by: coordinator, protos, security.audit, security.secagg.coordinator, site_agent.

    machine         events in, effects out: routing, start, aborts, halts
    aggregation     one attempt from Plan to Unmask
    attempt         what is in memory during an attempt, and who the site is
    checks          the checks of C0 to C4, one function for each rule
    earlier         what became of earlier attempts on the same model, before the next one
    differences     what several sums together tell of one site
    results         how a published result is taken over, audited and acknowledged
    result_checks   the checks of C5, one function for each rule
    entries         the log entries of the machine
    journal         what the site remembers, rebuilt from its write-ahead log
"""
