"""`site-agent check`: everything that can be found out before a start (docs/hospitals.md).

Only the command imports this package. It changes nothing, keeps nothing of the trial round, and sends no message: it
opens and closes one TLS connection to the coordinator. What sees images runs in a trainer's process, without network
and keys (`site_agent.trainer.data_checks`). The names of the checks are in `site_agent/config.py`, since
every command offers them behind `--skip` and the functions take long to import.

Imported by: nothing; it is run.

    command     `site-agent check`
    run         the checks: what was agreed, the coordinator, this machine, the data set
    context     what the checks look at, made once; and the process that looks at images
"""
