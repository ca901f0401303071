"""The upstream rule: what a clipped gradient reads, apart from its own patient, must be public or already booked.

This is the list of ordinary settings that break it, or that the private round has no form for. Each is refused with
the reason, before the data are read. Batch size and epochs are not looked at: the schedule has its own.
"""

from __future__ import annotations

from typing import Any, Final

from npr.config import TrainConfig
from npr.methods import registry
from security.errors import PolicyViolation

SUPPORTED_METHODS: Final = frozenset({"local", "fedavg", "fednpr", "fedper", "fednpr-per"})
"""One clipped vector over head and body, per-record losses. Methods that fit a head apart or match features are out."""

PERSONAL_HEAD: Final = "head and body are clipped together and get the same noise, so the head is private too"

# Key, the one value that is allowed, and what any other value would do.
_ALLOWED: Final[tuple[tuple[str, Any, str], ...]] = (
    ("assign", "nearest", "one record moves others to other sub-clusters, without bound"),
    ("prototype_source", "exact", "features of drawn records would be used a second time"),
    ("prototype_momentum", 0.0, "has no private form"),
    ("personal_start", "shared", "seeds the head on records"),
    ("predict_present_only", False, "tells exactly which classes a site lacks"),
    ("local_bn", False, "there is no BatchNorm under DP"),
    ("npr_balance", "none", "reads exact counts"),
    ("prior_floor", None, "the floor of the private prior comes from its noise"),
    ("supervision", "bsm", "has no private form"),
    ("logit_norm", "none", "has no private form"),
    ("lambda_added", False, "has no private form"),
)


def violations(config: TrainConfig) -> list[str]:
    """Every setting that would void epsilon or be ignored, with the reason and what to set instead."""
    found = [
        f"{key} = {getattr(config, key)!r}: {reason}; use {allowed!r}"
        for key, allowed, reason in _ALLOWED
        if getattr(config, key) != allowed
    ]
    if config.method not in SUPPORTED_METHODS:
        found.append(f"method = {config.method!r}: no private form; use one of {', '.join(sorted(SUPPORTED_METHODS))}")
    elif registry.build(config).prototype_share > 0.0:
        found.append(f"predict = {config.predict!r}: needs prototypes that are not booked; use 'head'")
    return found


def check_upstream(config: TrainConfig) -> None:
    """Raises PolicyViolation naming every violation."""
    if found := violations(config):
        raise PolicyViolation("; ".join(found), where="differential privacy", hint="see the spec's upstream rule")
