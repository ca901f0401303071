"""This process's place among several that train together, from the environment that torchrun (or the operator) sets."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lazaret.errors import ConfigError

# Why processes that train together have a network: the one exception from isolation, and its name in the log.
RANKS: Final = "training in several processes"


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Which of the processes on this machine this is; torchrun counts them, so that each takes its own card."""
    found = environment.get("LOCAL_RANK", "")
    return int(found) if found.isdigit() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Rank 0 is the agent's trainer, all others are workers.

    :ivar torchrun: the meeting point at host:port is torchrun's own; else the first process opens it.
    """

    rank: int
    size: int
    host: str
    port: int
    torchrun: bool = False

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> RankPlace | None:
        """None for the usual case of one process."""
        if environment.get("WORLD_SIZE", "1") == "1":
            return None
        try:
            place = cls(
                rank=int(environment["RANK"]),
                size=int(environment["WORLD_SIZE"]),
                host=environment["MASTER_ADDR"],
                port=int(environment["MASTER_PORT"]),
                torchrun=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"WORLD_SIZE is set, but {error.args[0]} cannot be used",
                where="environment",
                hint="start through torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            ) from error
        if not 0 <= place.rank < place.size:
            raise ConfigError(f"RANK = {place.rank} is not below WORLD_SIZE = {place.size}", where="environment")
        return place
