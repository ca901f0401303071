"""The upstream rule: what a clipped gradient reads, apart from its own patient, must be public or already booked.

This is the list of ordinary settings that break it. Each is refused with the reason, before the data are read.
"""

from __future__ import annotations

from npr.config import TrainConfig
from security.errors import PolicyViolation

SUPPORTED_METHODS = frozenset({"local", "fedavg", "fedprox", "fednpr", "fedper", "fednpr-per"})
"""One clipped vector over head and body, per-record losses. Methods that fit a head apart or match features are out."""

PERSONAL_HEAD = "head and body are clipped together and get the same noise, so the head is private too"


def violations(config: TrainConfig) -> list[str]:
    """Every setting that would void epsilon, with the reason and what to set instead."""
    found = []
    if config.method not in SUPPORTED_METHODS:
        found.append(f"method = {config.method!r}: no private form; use one of {', '.join(sorted(SUPPORTED_METHODS))}")
    if config.assign != "nearest":
        found.append(
            f"assign = {config.assign!r}: one record moves others to other sub-clusters, without bound; use 'nearest'"
        )
    if config.prototype_source != "exact":
        found.append("prototype_source: features of drawn records would be used a second time; use 'exact'")
    if config.personal_start == "prototypes":
        found.append("personal_start = 'prototypes': seeds the head on records; use 'shared'")
    if config.predict_present_only:
        found.append("predict_present_only: tells exactly which classes a site lacks; switch it off")
    if config.predict != "head":
        found.append(f"predict = {config.predict!r}: needs prototypes that are not booked; use 'head'")
    if config.local_bn:
        found.append("local_bn: there is no BatchNorm under DP; switch it off")
    if config.npr_balance != "none":
        found.append(f"npr_balance = {config.npr_balance!r}: reads exact counts; use 'none'")
    return found


def check_upstream(config: TrainConfig) -> None:
    """Raises PolicyViolation naming every violation."""
    if found := violations(config):
        raise PolicyViolation("; ".join(found), where="differential privacy", hint="see the spec's upstream rule")
