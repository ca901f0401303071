"""What all logs together say about one round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from security.audit.facts import History

Round = tuple[str | None, int]


class RoundFacts:
    """What all logs say about one round."""

    def __init__(self, histories: Sequence[History], key: Round) -> None:
        self.models: set[str] = set()
        self.cohorts: set[str] = set()
        self.cohort_size = 0
        self.uploads: set[str] = set()
        self._dropouts: dict[int, set[str]] = {}
        self.bytes: Counter[str] = Counter()
        self.surplus = 0
        self.unmasked = 0
        for history in histories:
            self._take(history, key)

    def _take(self, history: History, key: Round) -> None:
        for record in history.of("model.received", "round.invited", "egress", "secagg.survivors"):
            if record.key != key:
                continue
            body = record.body
            match record.type:
                case "model.received":
                    self.models.add(body["model"])
                case "round.invited":
                    self.cohorts.add(body["cohort"])
                    self.cohort_size = max(self.cohort_size, body["cohort_size"])
                case "secagg.survivors":
                    self._dropouts.setdefault(body["attempt"], set()).update(body["dropouts"])
                case _:
                    self.bytes[body["data_class"]] += body["bytes"]
                    self.surplus += body["bytes"] - body["expected_bytes"]
                    if body["data_class"] == "masked-vector":
                        self.uploads.add(history.name)
                        self.unmasked += not body["masked"]

    @property
    def dropouts(self) -> set[str]:
        """Who is missing from the sum: of several attempts, the last one counts."""
        return self._dropouts[max(self._dropouts)] if self._dropouts else set()

    @property
    def summed(self) -> set[str]:
        """Whose vectors are in the sum."""
        return self.uploads - self.dropouts


def round_json(histories: Sequence[History], key: Round) -> dict[str, Any]:
    """The same for machines."""
    facts = RoundFacts(histories, key)
    return {
        "run": key[0],
        "round": key[1],
        "models": sorted(facts.models),
        "cohorts": sorted(facts.cohorts),
        "summed": sorted(facts.summed),
        "dropouts": sorted(facts.dropouts),
        "bytes": dict(facts.bytes),
        "surplus": facts.surplus,
    }
