"""The coordinator: it forwards messages, adds masked vectors and publishes sums (docs/operators.md).

Benchmarks and scripts start it. It is untrusted: it holds no secret of a site, cannot choose a model, and sites
recompute what it publishes. A service that never exports does not load torch.

Imported by: coordinator.dashboard.

    cli             the command `coordinator`
    commands        its commands beside the service: init, join, renew, check, status, export and others
    checks          `coordinator check`
    config          `coordinator.toml`
    assembly        from a configuration to a coordinator that can run
    run             the shell: carries out effects in order
    rounds          the run, round after round, as a machine
    phases          the phases of a run, and how one follows another
    attendance      the sites that are connected, and who of them can be in a cohort
    effects         what the round machine asks the shell to do
    service         gRPC
    run_queue       runs that wait, and the operator's order that one ends
    send_queue      what is to be sent to each connected site
    storage         writes the SQLite file, models and records
    database        the tables of the SQLite file, and its errors in words
    results         the chain of published results, and how a site catches up
    round_history   the one reader of the database
    ingress_log     the privacy log of the coordinator, and receipts
    witness         witness of the sites' logs, and forwarder between them
    status          `coordinator status`
    export          `coordinator export`
    backup          `backup`, `restore`, `recover` and `state`
    __main__        `python -m coordinator`
    dashboard       the operator's page
"""
