"""The privacy log: what a running party writes about what it does and about every message that leaves.

The rule of this package is *log, sync, then send*: `AuditLog.append` returns when the entry is on stable storage, and
no byte leaves before that. A log that could not be written once takes nothing more, and its agent stops.

What it never does: import `security.audit` (a party does not audit itself; a contract in pyproject.toml holds this),
change or remove an entry, send anything, or put into an entry what the docstring of `events` forbids.

Imported by: coordinator, protos, security.audit, security.identity, security.secagg, security.secagg.site,
  site_agent.

    events        what a party writes; a new event is added here
    schema        the kinds of value in an event, the form of an entry, the registry of event types
    machine       events in, entries and checkpoints out, without files, clocks or randomness; what a log says of itself
    writer        `AuditLog`: the machine, its folder, its keys and its clock put together
    opening       how a log begins and goes on: a sound folder, a torn write, or damage; the first entries of a start
    store         the files of a log folder; `DurableFolder.append` is where an entry is made durable
    reader        the one reader of logs, for everybody who looks at the past
    note          signed notes, checkpoints and cosignatures in the formats of C2SP
    keys          the keys of a log by epoch
    roster        the parties, and which cosignatures make a quorum
    witness       checkpoints that a party holds of the others' logs, and proofs that a log forked
    egress        the filter that every outgoing message passes, and the kernel's count of bytes beside it
    log_commands  `log-export`, `log-note`, `log-erase` and `log-archive` of both parties
"""
