"""What a trainer keeps from round to round: personal memory and models. No other process writes these files; and what
a process that only uses the model is told beside them.

memory/<round>.safetensors   personal head, prototypes and optimiser after a round; never leaves
models/best.safetensors      the best personal model by local validation
models/*-companion.safetensors   temperature and prototypes that belong to one model; never leaves
models/alone.json            figures of training without the federation, for comparison; never leaves
models/evaluation.json       figures of the last `site-agent evaluate`, for the hospital's page; never leaves
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lazaret import files
from security.identity.manifest import Manifest
from security.log.reader import Record
from security.secagg.layout import Vector

# A round can be trained again as long as the next one has no result, and the newest memory may be torn off by a kill.
KEPT_MEMORIES: Final = 3
EVALUATION: Final = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run in this site's privacy log up to its newest checkpoint, after every check of `privacy-audit verify` on it.

    :ivar findings: what the verifier found, as `code: detail`; empty for a clean log.
    """

    origin: str
    size: int
    root: str
    witnessed: int
    findings: tuple[str, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """What a command's process that sees images is told, by one that reads keys and the agent's files.

    :ivar data_key: names this site's own artefacts; no other key crosses.
    :ivar round: the newest round with a result here; 0 before the first.
    :ivar state: the shared model after it; None before the first.
    :ivar log: for those that tell of it.
    """

    site: str
    manifest: Manifest
    data_key: bytes = field(repr=False)
    round: int
    state: Vector | None
    log: LoggedRun | None = None


class PersonalState:
    """The two folders of a site's state that belong to its trainer.

    :param folder: the state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.memory = folder / "memory"
        self.models = folder / "models"

    def hold(self) -> int:
        """Until this process ends, the agent sets nothing aside here for a new run: it waits for the end.

        :returns: the descriptor, which stays open.
        """
        descriptor = os.open(self.memory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor

    def tidy(self) -> None:
        """Remove what writes left behind that a kill cut short. For the one trainer of this folder."""
        for folder in (self.memory, self.models):
            for leftover in folder.glob(".*.new"):
                leftover.unlink()

    def _memories(self) -> list[int]:
        found = (re.fullmatch(r"([0-9]+)\.safetensors", path.name) for path in self.memory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def remember(self, round_number: int, content: bytes) -> None:
        """Keep what the next round needs, on disk when this returns; and erase what no round can go back to."""
        files.write_atomically(self.memory / f"{round_number}.safetensors", content, mode=0o600)
        for number in self._memories()[:-KEPT_MEMORIES]:
            (self.memory / f"{number}.safetensors").unlink()

    def memory_before(self, round_number: int) -> tuple[int, bytes] | None:
        """The newest memory of an earlier round; None stands for the initial model."""
        earlier = [number for number in self._memories() if number < round_number]
        if not earlier:
            return None
        return earlier[-1], files.read_private(self.memory / f"{earlier[-1]}.safetensors")

    @property
    def alone(self) -> Path:
        return self.models / "alone.json"

    @property
    def evaluation(self) -> Path:
        return self.models / EVALUATION

    def keep_model(self, name: str, content: bytes) -> None:
        files.write_atomically(self.models / f"{name}.safetensors", content, mode=0o600)
