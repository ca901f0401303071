"""Gathers findings of one log, so that a thousand equal ones become one that says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from security.audit.findings import Finding

_SHOWN: Final = 20


@dataclass(slots=True)
class _Group:
    detail: str
    entries: list[int] = field(default_factory=list)
    count: int = 0


class Findings:
    """Findings about one log, grouped by code."""

    def __init__(self, log: str) -> None:
        self.log = log
        self._groups: dict[str, _Group] = {}

    def add(self, code: str, detail: str, *entries: int) -> None:
        """Note one thing; the first of its code gives the text."""
        group = self._groups.setdefault(code, _Group(detail))
        group.count += 1
        if len(group.entries) < _SHOWN:
            group.entries.extend(entries)

    def __contains__(self, code: str) -> bool:
        return code in self._groups

    def listed(self) -> tuple[Finding, ...]:
        """All of them, heaviest first."""
        found = [
            Finding(
                code=code,
                log=self.log,
                detail=group.detail + (f" (and {group.count - 1} more like this)" if group.count > 1 else ""),
                entries=tuple(group.entries[:_SHOWN]),
            )
            for code, group in self._groups.items()
        ]
        order = ["fail", "cannot decide", "note"]
        return tuple(sorted(found, key=lambda finding: order.index(finding.severity.value)))
