"""The operator's page as one JSON value: what is on disk and what is under way, made anew when either has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coordinator.dashboard import health
from coordinator.dashboard.history import COLUMNS, History, Told
from coordinator.dashboard.live import Live, SiteNow
from coordinator.dashboard.logs import LogHeads
from security import software
from security.consortium.manifest import Manifest
from security.errors import LocalProtocolError
from security.web.http import Response


class Board:
    """`look` is called by the engine's loop, everything else by the page's thread."""

    def __init__(self, manifest: Manifest, history: History, heads: LogHeads) -> None:
        self.history = history
        self._heads = heads
        self._live: Live | None = None
        self._history: tuple[int, Told] | None = None
        self._shown: tuple[object, Response] | None = None
        self._about = {
            "federation": manifest.federation,
            "run": manifest.run,
            "manifest": manifest.version,
            "method": manifest.training.method,
            "architecture": manifest.model.architecture,
            "weights": manifest.training.weights,
            "privacy": manifest.privacy is not None,
            "coordinator": manifest.coordinator.id,
            "version": software.version(),
        }

    def look(self, live: Live) -> None:
        """Take a new picture of the run. One assignment: the page's thread sees the old one or this one."""
        self._live = live

    @property
    def live(self) -> Live:
        if self._live is None:
            raise LocalProtocolError("the run has not begun", where="dashboard")
        return self._live

    def told(self) -> Told:
        """What the database says; read again only when somebody has written to it."""
        return self._newest()[1]

    def _newest(self) -> tuple[int, Told]:
        version = self.history.version()
        if self._history is None or self._history[0] != version:
            self._history = (version, self.history.read())
        return self._history

    def state(self) -> Response:
        """The whole page's content."""
        live, (version, told), stamp = self.live, self._newest(), self._heads.stamp()
        key = (live, version, stamp)
        if self._shown is None or self._shown[0] != key:
            self._shown = (key, Response.of(self._content(live, told), "application/json"))
        return self._shown[1]

    def _content(self, live: Live, told: Told) -> bytes:
        """One JSON object. Its rounds, nearly all of it in a long run, come written already."""
        rest = {
            "about": self._about,
            "health": health.judge(live, told).to_json(),
            "now": _now(live),
            "sites": [_site(site, told) for site in live.sites],
            "columns": COLUMNS,
            "members": told.members,
            "aborts": told.aborts,
            "logs": self._heads.read(live.head, live.log_size, live.witnessed),
            "traffic": {"in": _by_size(live.received), "out": _by_size(live.sent)},
        }
        text = json.dumps(rest, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return f'{text[:-1]},"rounds":[{told.written}]}}'.encode()


def _now(live: Live) -> dict[str, Any]:
    burst = live.burst
    return {
        "phase": str(live.phase),
        "round": live.round,
        "completed": live.completed,
        "planned": live.planned,
        "least": live.least,
        "deadline": live.deadline and 1000 * live.deadline,
        "checking": live.checking,
        "attempt": burst
        and {"number": burst.attempt, "step": burst.step, "members": burst.members, "threshold": burst.threshold},
    }


def _site(site: SiteNow, told: Told) -> dict[str, Any]:
    return {
        "name": site.name,
        "state": site.state,
        "connected": site.connected,
        "seen": 1000 * site.heard or told.sessions.get(site.name),
        "in": site.bytes_in,
        "out": site.bytes_out,
        "pause": site.pause,
        "excluded": told.excluded.get(site.name),
    }


def _by_size(counted: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda item: -item[1])
