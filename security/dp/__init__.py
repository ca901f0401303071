"""Differential privacy at a site, without torch: accounting, the ledger, noise and sampling.

The mechanisms that read patients are in `npr.dp`. It reads no image and no label, and it never releases anything
itself. Section numbers below are those of docs/spec/differential-privacy.md.

Imported by: npr, security.audit, security.consortium, security.identity, site_agent.

    accountant     what is booked (events), and epsilon from a list of events (sections 2 and 6)
    filter         the rule that stops a site before its cap, and a run before its limit (section 6)
    ledger         lines, chain, reservations (section 5)
    ledger_store   the ledger and its anchor on disk (section 5)
    noise          the secret generator, both kinds of Gaussian noise, sampling, noise that sites share (section 4)
    planner        what a schedule will cost, and which noise fits a wanted epsilon (section 6)

Theory of operation
-------------------

What is booked. Every operation that reads patients and influences what leaves the site is one `MechanismEvent`: kind,
sigma, sensitivity, rate, steps (section 2). An event states its mechanism completely, so that epsilon follows from the
list of events alone. What is computed from a released value costs nothing. What is neither public nor booked must not
be read by a gradient or a released sum (the upstream rule, section 2).

When it is booked. `Ledger.reserve` asks the filter, appends one line, syncs it, writes the anchor, and only then
returns a `Reservation`. The agent then logs `dp.reserved`, and only then are data read: ledger, log, data. A
reservation is the permission to train. Release functions take sigma, rate, steps and noise from the events in it, and
each event can be claimed once, so what is done is what was paid for. `Ledger.commit` notes that the round is trained,
before anything of it leaves; it changes no cost.

Why nothing is refunded. After a crash, an abort or a lost round nobody can show what an observer has seen: masked
vectors may have left, and a sum may exist that this site never received. A refund would also let a coordinator spend a
budget several times by letting rounds fail. So a reservation counts from the moment it is written (section 5).

How a limit is judged. A filter has several tests, each with its share of delta: the PLD of a plan that was fixed before
anything was read, Renyi divergence at the order that was chosen for the plan, and at a list of public orders. One
passed test is enough (section 6). The ledger's first line fixes plan and order for its cap, and a line before the first
booking of each run fixes them for the limit of that run. Nothing else may be enforced: there is no proof for the best
order in hindsight, or for PLD of parameters that depend on results.

What a restart may do. It reads the chain from the first line, and it checks that the chain contains the anchor and
every reservation that the privacy log names. It may remove an incomplete last line after the anchor: the write never
returned, so nothing was trained on it. A complete line after the anchor counts. It may send bytes that are already
stored: sending again is no new release.

What a restart may not do. It may not use an old reservation: the permission was in memory, and training again is a new
reservation. It may not continue with a ledger that is missing, shortened, changed or restored from an old copy, and the
agent may not create a new one: that is an operator's command. A process whose write failed does not know what is on
disk, so it books nothing more (section 5).

Where randomness comes from. Noise and sampling use one `NoiseSource`: AES-256 in counter mode with a key from the
operating system. Whoever can repeat its stream can subtract the noise and knows which patients were drawn. So its state
is never saved or copied, a forked process refuses it, the experiment's seed does not reach it, and the ledger refuses a
reservation with a seeded source (section 4). Gradients get continuous noise and are rounded to a public grid; counts,
prototypes and validation tables are whole numbers on a lattice and get the exact discrete Gaussian.
"""
