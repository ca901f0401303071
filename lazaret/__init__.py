"""What every command of the toolkit shares, and nothing that is particular to one of them.

It imports no other package. It knows neither torch nor grpc, holds no key, and knows nothing of rounds, models or
patients.

Imported by: coordinator, lazaret.web, npr, protos, security, site_agent.

    commands   the five commands as they are installed, each with the extra that it needs
    errors     one tree of errors with stable codes; each has a message, a place and a hint
    alerts     hooks of the operator that hear when something needs a person
    control    a state folder beside the process that uses it: pauses, its present state, finished runs, copies
    files      reading and writing so that a refusal of the disk names the file
    archive    archives of a party's files, checked when they are unpacked; the mark of one that has moved
    settings   TOML files of people, read strictly into pydantic models
    terminal   output, logs, progress, questions and exit codes of all commands
    checks     the lines of a `check` command and how they are run; disk and memory
    process    how a process ends on a signal, tells systemd that it is alive, and keeps its memory small
    software   digests of the running code and its dependencies, for the privacy log
    kernel_bytes  what the kernel has sent and received for this process, and for its network namespace
    web        the read-only pages: server, access, paths
"""
