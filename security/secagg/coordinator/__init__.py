"""The coordinator's side of secure aggregation: one machine for each attempt, and the planning of a round.

Nothing in it is secret: all data are public or masked until a quorum releases shares for one set. It never holds both
kinds of share of one site, and after a restart it repeats what it has shown and never shows a second version
(docs/spec/secure-aggregation.md, sections 1 and 9).

Imported by: coordinator, protos.

    attempt       the machine of one attempt
    uploads       adverts, share lists and uploads as they arrive; timeouts
    disputes      accusations about share boxes, and their answers
    unmasking     released shares: checked, combined, and proofs against dishonest dealers
    publication   the result, its acknowledgements, and chunks for the sites that check it
    rounds        the attempts of one round: cohorts, certificates, exclusions
    earlier       what is left of attempts of earlier rounds on the same model
    recovery      attempts rebuilt from the records after a restart
    spool         uploads and sums on disk
"""
