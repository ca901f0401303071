"""`site-agent check`: everything that can be found out before a start (docs/hospitals.md).

Only the command imports this package. It changes nothing, keeps nothing of the trial round, and sends no message: it
opens and closes one TLS connection to the coordinator.

    run         which checks there are, in which order
    context     what the checks look at, made once
    agreement   certificates, manifest, policy, model, code, privacy
    trial       a short local round: time and memory

Only the names of the checks are defined here, since every command offers them behind `--skip`; the functions take long
to import.
"""

from __future__ import annotations

from typing import Final

# In this order: what others depend on first, what takes long last.
CHECK_NAMES: Final = (
    "configuration", "certificates", "keys", "manifest", "policy", "coordinator", "clock", "state", "model", "disk",
    "device", "privacy", "data", "images", "code", "trial",
)  # fmt: skip
