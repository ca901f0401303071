"""The agent of one hospital: it trains on local images and takes part in secure aggregation (docs/site-agent.md).

Benchmarks and scripts start it. Two processes: the agent has keys and
network and sees no image; the trainer (`trainer`) sees images and has neither. What crosses between them is in
`trainer.channel`. Only `outbox` makes bytes that leave, only `client` opens the stream to the coordinator, and nothing
leaves that is not in the privacy log first. Commands that speak with the hospital's own archive (`archive`) are a third
process: a network, and neither keys nor state.

Imported by: site_agent.archive, site_agent.checks, site_agent.page, site_agent.trainer.

    cli              the command `site-agent`
    options          options that several of its commands have
    setup_commands   `init`, `join`, `renew`, `draw`, `status`
    state_commands   `ledger`, `runs`, `accept`, `pause`, `permit`, `handover` and the log commands
    model_commands   `evaluate`, `predict` and `export`
    command_process  the isolated process in which those three see images; the one without keys for the archive
    config           `site.toml`
    policy           what this hospital permits
    assembly         from a configuration to a site that can run
    run              the shell: carries out effects in order
    session          the conversation with the coordinator, without sockets or files
    effects          what the session asks the shell to do
    local_work       what the training thread does: train, evaluate, vote
    next_run         a run that is offered: judged, its model fetched, begun
    client           the gRPC stream
    outbox           the egress filter: type, length, randomness, log, and then the bytes
    log_events       what a site writes into its privacy log
    witness          a site as a witness of other logs
    supervisor       the trainer's process: watched, started again, checked in all it says
    trainer_process  a trainer as a process: a child, or a service of its own
    trainer_start    how a trainer begins to work for an agent
    contribution     from a local round to the vector that is masked
    ready_slots      the public times at which an order may be answered, and what waits for them
    privacy          what a private federation costs this site
    budget           the privacy ledger of a running agent
    state_dir        the state folder
    backup           `backup`, `restore` and `state`: copies that cannot lead to a mask or a budget that is used twice
    state_writer     the write-ahead log, and the next model while it arrives
    status           `site-agent status`
    metrics          `/metrics` of an agent
    __main__         `python -m site_agent`
    checks           `site-agent check`
    page             the hospital's own page
    trainer          the process with torch and images
    archive          images from the hospital's archive (PACS), and reports to it
"""
