"""`site-agent check`: everything that can be known before the start. Trains nothing that is kept, sends no message."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from security.preflight.lines import Check, Line, ok, run
from site_agent.checks import agreement, images, network, room
from site_agent.checks.context import Context
from site_agent.config import SiteConfig


def _configuration(context: Context) -> Iterator[Line]:
    yield ok(f"{context.config.path} is whole")


def _trial(context: Context) -> Iterator[Line]:
    from site_agent.checks.trial import trial  # imports torch

    yield from trial(context)


# In this order: what others depend on first, what takes long last.
CHECKS: Final[Mapping[str, Check[Context]]] = {
    "configuration": _configuration,
    "certificates": agreement.certificates,
    "keys": agreement.keys,
    "manifest": agreement.manifest,
    "policy": agreement.policy,
    "coordinator": network.coordinator,
    "clock": network.clock,
    "state": agreement.state,
    "model": agreement.model,
    "disk": room.disk,
    "device": room.device,
    "privacy": agreement.privacy,
    "data": images.data,
    "images": images.images,
    "code": agreement.code,
    "trial": _trial,
}


def look(config_path: Path, *, skip: Collection[str] = ()) -> Iterator[Line]:
    """Every check, whatever the others say.

    :raises ConfigError: if the configuration itself cannot be read.
    """
    return run(CHECKS, Context(config=SiteConfig.read(config_path)), skip=skip)
