"""The hospital's page as one JSON value, made anew when a file of the state directory has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from security.audit.machine import HEARTBEAT_MS
from security.clock import Clock
from security.errors import ToolkitError
from security.web.http import Response
from site_agent.config import SiteConfig
from site_agent.overview import overview
from site_agent.page import learnt
from site_agent.page.outflow import Outflow, day_of
from site_agent.privacy import ledger_files

SILENT_MS: Final = 2 * HEARTBEAT_MS
ABOUT: Final = ("site", "federation", "manifest_version", "run", "round", "model", "vouched", "stopped")
Stamp = tuple[tuple[str, int, int], ...]


class Content:
    """Reads only; the agent may be running or not."""

    def __init__(self, config: SiteConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._outflow = Outflow(config.state / "log")
        self._shown: tuple[object, Response] | None = None
        self._slow: tuple[Stamp, dict[str, Any]] | None = None

    def state(self) -> Response:
        now = self._clock.now_ms()
        self._outflow.catch_up()
        egress, slow = self._outflow.to_json(now), self._read()
        silent = now - egress["newest"] > SILENT_MS
        key = (egress, slow, silent, day_of(now))
        if self._shown is None or self._shown[0] != key:
            content = {**slow, "egress": egress, "health": judge(slow, egress, silent=silent)}
            self._shown = (key, Response.of_json(content))
        return self._shown[1]

    def _read(self) -> dict[str, Any]:
        stamp = self._stamp()
        if self._slow is None or self._slow[0] != stamp:
            self._slow = (stamp, self._gather())
        return self._slow[1]

    def _stamp(self) -> Stamp:
        state, found = self._config.state, []
        memory = learnt.newest_memory(state / "memory")
        names = [state / name for name in ("wal", "run", "metrics.jsonl", "data.json")]
        for path in (*names, self._config.ledger, *([memory] if memory else [])):
            try:
                told = path.stat()
            except FileNotFoundError:
                continue
            found.append((str(path), told.st_mtime_ns, told.st_size))
        return tuple(found)

    def _gather(self) -> dict[str, Any]:
        state = self._config.state
        about, rows = self._about()
        memory = learnt.newest_memory(state / "memory")
        return {
            "about": about,
            "privacy": spent(self._config),
            "classes": learnt.classes(state / "data.json"),
            "curves": learnt.curves(rows),
            "confusion": learnt.confusion(rows),
            "prototypes": learnt.prototypes(memory) if memory else None,
        }

    def _about(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Who we are and how far; where keys or manifest are not in order, what is wrong with them."""
        try:
            told = overview(self._config, self._clock)
        except ToolkitError as error:
            return {"problem": str(error)}, []
        return {name: told[name] for name in ABOUT}, told["metrics"]


def spent(config: SiteConfig) -> dict[str, Any] | None:
    """Epsilon as the ledger of this site's patients has it; None without one."""
    try:
        state = ledger_files(config).peek()
    except ToolkitError as error:
        return {"problem": str(error)}
    if state is None:
        return None
    series = [
        [entry["run"], entry["round"], float(entry["after"])]
        for entry in (json.loads(line)["entry"] for line in _lines(config.ledger))
        if entry["kind"] == "reserve"
    ]
    terms = state.terms
    told = {"epsilon": state.epsilon, "cap": terms.cap, "delta": terms.delta, "unit": terms.unit.value}
    return told | {"population": terms.population, "series": series}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def judge(slow: dict[str, Any], egress: dict[str, Any], *, silent: bool) -> dict[str, Any]:
    """One sentence about today, and what to look at. Pure."""
    about, privacy = slow["about"], slow["privacy"] or {}
    remarks = []
    if about.get("problem"):
        remarks.append(("bad", about["problem"]))
    if about.get("stopped"):
        remarks.append(("bad", f"stopped for its operator: {about['stopped']}"))
    if privacy.get("problem"):
        remarks.append(("bad", privacy["problem"]))
    if egress["blocked"]:
        level = "bad" if egress["blocked_today"] else "look"
        told = f"stopped at the door and not sent: {egress['blocked_today']} today, {egress['blocked']} in all"
        remarks.append((level, f"{told}; `privacy-audit egress` has more"))
    if egress["declined_today"]:
        remarks.append(("look", f"orders declined today: {egress['declined_today']}, last by: {egress['declined_by']}"))
    if silent:
        remarks.append(("look", "the agent has written nothing for a while: is it running?"))
    sent = sum(row[2] for row in egress["today"])
    sentence = "Nothing left this hospital today" if not sent else "What left today was masked or part of the protocol"
    level = max((one for one, _ in remarks), key=("good", "look", "bad").index, default="good")
    return {
        "level": level,
        "sentence": sentence,
        "remarks": [{"level": one, "text": text} for one, text in remarks],
    }
