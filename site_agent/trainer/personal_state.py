"""What a trainer keeps from round to round: personal memory and models. No other process writes these files.

memory/<round>.safetensors   personal head, prototypes and optimiser after a round; never leaves
models/best.safetensors      the best personal model by local validation
models/*-companion.safetensors   temperature and prototypes that belong to one model; never leaves
models/alone.json            figures of training without the federation, for comparison; never leaves
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from lazaret import files

# A round can be trained again as long as the next one has no result, and the newest memory may be torn off by a kill.
KEPT_MEMORIES: Final = 3


class PersonalState:
    """The two folders of a site's state that belong to its trainer.

    :param folder: the state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.memory = folder / "memory"
        self.models = folder / "models"

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

    def keep_model(self, name: str, content: bytes) -> None:
        files.write_atomically(self.models / f"{name}.safetensors", content, mode=0o600)
