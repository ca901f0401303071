"""What left, read from the site's own privacy log as it grows: each line is looked at once."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

from security.audit.event import type_of
from security.audit.store import LogFolder

DAYS: Final = 14
ROUNDS: Final = 40


def day_of(ms: int) -> str:
    """The hospital's own calendar day."""
    return time.strftime("%Y-%m-%d", time.localtime(ms / 1000))


class Outflow:
    """Totals over a log. `catch_up` reads what has been added since it was last called."""

    def __init__(self, log: Path) -> None:
        self._folder = LogFolder(log)
        self._segment = 0
        self._offset = 0
        self.entries = 0
        self.newest_ms = 0
        self._blocked: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._rule = ""
        self._days: dict[str, Counter[str]] = defaultdict(Counter)
        self._messages: dict[str, Counter[str]] = defaultdict(Counter)
        self._rounds: Counter[int] = Counter()

    def catch_up(self) -> None:
        while (path := self._folder.segment(self._segment)).exists():
            self._read(path)
            if not self._folder.segment(self._segment + 1).exists():
                return
            self._segment, self._offset = self._segment + 1, 0

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the rest is a line that is being written just now
        self._offset += len(whole)
        lines = whole.splitlines()
        for line in lines:
            self._take(line)
        self.entries += len(lines)
        if lines:
            self.newest_ms = int(json.loads(lines[-1])["ts"])

    def _take(self, line: bytes) -> None:
        kind = type_of(line.decode(errors="replace"))
        if kind == "egress":
            entry = json.loads(line)
            day, body = day_of(entry["ts"]), entry["body"]
            self._days[day][body["data_class"]] += body["bytes"]
            self._messages[day][body["data_class"]] += 1
            if entry["round"] is not None:
                self._rounds[entry["round"]] += body["bytes"]
        elif kind == "egress.blocked":
            self._blocked[day_of(json.loads(line)["ts"])] += 1
        elif kind == "round.declined":
            entry = json.loads(line)
            self._declined[day_of(entry["ts"])] += 1
            self._rule = entry["body"]["rule"]

    def to_json(self, now_ms: int) -> dict[str, Any]:
        today = day_of(now_ms)
        counted, messages = self._days.get(today, Counter()), self._messages.get(today, Counter())
        return {
            "day": today,
            "today": [[name, messages[name], size] for name, size in counted.most_common()],
            "days": [[day, self._days[day].total()] for day in sorted(self._days)[-DAYS:]],
            "rounds": [[number, self._rounds[number]] for number in sorted(self._rounds)[-ROUNDS:]],
            "total": sum(counter.total() for counter in self._days.values()),
            "blocked": self._blocked.total(),
            "blocked_today": self._blocked[today],
            "declined_today": self._declined[today],
            "declined_by": self._rule,
            "entries": self.entries,
            "newest": self.newest_ms,
        }
