"""Mechanisms that read patients under differential privacy (docs/spec/differential-privacy.md, sections 2 to 4).

Each mechanism takes sigma, rate, steps and noise from a `Reservation` of the ledger (`security.dp`), so that it can do
only what was booked. Nothing here chooses a parameter by looking at the data, and nothing unclipped or without noise is
returned for release.

Imported by: npr, npr.lab, site_agent.

    clipping       exact per-record gradient norms, and the sum of clipped gradients (section 3)
    engine         which models may be trained; closed formulas or Opacus, compared with autograd (sections 2 and 3)
    sgd            DP-SGD from a reservation, also with noise that the sites of a secure sum share (sections 3 and 4)
    releases       class counts, validation tables and prototypes (section 2)
    private_site   one round of a site under differential privacy
    federation     all sites in one process, for the laboratory
    audit          attacks on this pipeline: canaries and membership inference (section 7)
"""
