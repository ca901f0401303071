"""`site-agent check`: what a start needs, looked at before it.

Only the names are here, since every command offers them behind `--skip`; the functions take long to import.
"""

from __future__ import annotations

from typing import Final

# In this order: what others depend on first, what takes long last.
CHECK_NAMES: Final = (
    "configuration", "certificates", "keys", "manifest", "policy", "coordinator", "clock", "state", "model", "disk",
    "device", "privacy", "data", "images", "code", "trial",
)  # fmt: skip
