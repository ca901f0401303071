"""The hospital's page as one JSON value, made again when a file of the state folder has changed.

In this order: what was trained, what was sent (from the privacy log), the page, and its server (`status --web`).
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lazaret.control import BEAT_MS
from lazaret.errors import ToolkitError
from lazaret.terminal import say
from lazaret.web.access import Guard, require_loopback
from lazaret.web.http import Response
from lazaret.web.server import Pages, WebServer, assets
from security.clock import Clock, SystemClock
from security.log.events import Egress, EgressBlocked, RoundDeclined
from security.log.reader import LogFollower
from security.rng import Randomness, SystemRandomness
from site_agent.config import SiteConfig
from site_agent.privacy import ledger_files
from site_agent.status import COMPLETE, complete, overview, remarks
from site_agent.trainer.personal_state import PersonalState

# What was trained, from the files of the state folder. Nothing of it leaves the site.

VECTORS, OWNERS = "prototypes/vectors", "prototypes/owners"
MOST_POINTS: Final = 512
_MEMORY: Final = re.compile(r"([0-9]+)\.safetensors")


def curves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures after each round, without the matrices; the newest row of a round counts."""
    found = {}
    for row in rows:
        sides = {side: row[side] for side in ("validation", "test") if row.get(side)}
        kept = {side: {name: figures.get(name) for name in ("bacc", "bauc")} for side, figures in sides.items()}
        found[row["round"]] = {"round": row["round"], "best": bool(row.get("best")), **kept}
    return [found[number] for number in sorted(found)]


def confusion(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest matrix: of the test images if there are any, else of those for validation."""
    for row in reversed(rows):
        for side in ("test", "validation"):
            matrix = (row.get(side) or {}).get("confusion")
            if matrix:
                return {"round": row["round"], "side": side, "matrix": matrix}
    return None


def classes(path: Path) -> dict[str, Any] | None:
    """How many images of each class each side holds, as the agent wrote it down when it opened the data."""
    try:
        counts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return counts


# Of each finding what the page shows; `site-agent evaluate --html` has the rest.
_SHOWN_FIGURES: Final = (
    "name", "operating_point", "units", "units_with_finding", "sensitivity", "sensitivity_interval", "specificity",
    "specificity_interval", "ppv", "ppv_interval", "npv", "npv_interval", "auc", "auc_interval", "pr_auc",
    "pr_auc_interval", "calibration", "decision", "subgroups",
)  # fmt: skip


def evaluation(path: Path) -> dict[str, Any] | None:
    """What a clinician asks for, as the last `site-agent evaluate` kept it; None before the first."""
    try:
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        shown = {name: figures[name] for name in ("model", "round", "private", "operating_rule", "clinical_side")}
        unit = figures[figures["clinical_side"]]["unit_kind"] if figures["clinical"] else "image"
        findings = [{name: one[name] for name in _SHOWN_FIGURES if name in one} for one in figures["clinical"]]
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None
    return shown | {"unit": unit, "findings": findings}


def newest_memory(folder: Path) -> Path | None:
    numbers = [int(match[1]) for path in folder.glob("*.safetensors") if (match := _MEMORY.fullmatch(path.name))]
    return folder / f"{max(numbers)}.safetensors" if numbers else None


def prototypes(path: Path) -> dict[str, Any] | None:
    """The prototypes of a memory on the plane in which they differ most; None where there are none."""
    try:
        with safe_open(path, framework="numpy") as file:
            if VECTORS not in file.keys():  # noqa: SIM118  # not a mapping: it has keys and no `in`
                return None
            vectors, owners = file.get_tensor(VECTORS), file.get_tensor(OWNERS)
    except (FileNotFoundError, SafetensorError):
        return None  # it was replaced by that of the next round just now
    if not len(vectors):
        return None
    points, shares = on_a_plane(vectors[:MOST_POINTS].astype(np.float64))
    return {
        "round": int(path.stem),
        "points": [[round(float(x), 4), round(float(y), 4)] for x, y in points],
        "owners": [int(owner) for owner in owners[:MOST_POINTS]],
        "shares": [round(float(share), 4) for share in shares],
    }


def on_a_plane(vectors: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The first two principal components, and the share of the variance that each holds.

    The sign of a component means nothing; the largest loading is made positive, so that pictures do not flip.
    """
    centred = vectors - vectors.mean(axis=0)
    _, values, axes = np.linalg.svd(centred, full_matrices=False)
    count = min(2, len(values))
    axes = axes[:count] * np.sign(axes[np.arange(count), np.abs(axes[:count]).argmax(axis=1)])[:, None]
    points = np.zeros((len(vectors), 2))
    points[:, :count] = centred @ axes.T
    shares = np.zeros(2)
    shares[:count] = values[:count] ** 2
    total = (values**2).sum()
    return points, shares / total if total > 0 else shares


# What was sent, from the site's own privacy log as it grows: each line is read once.

DAYS: Final = 14
ROUNDS: Final = 40


def day_of(ms: int) -> str:
    """The hospital's own calendar day."""
    return time.strftime("%Y-%m-%d", time.localtime(ms / 1000))


class EgressTotals:
    """Totals over a log. `catch_up` reads what has been added since it was last called."""

    def __init__(self, log: Path) -> None:
        self._log = LogFollower(log)
        self._blocked: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._rule = ""
        self._days: dict[str, Counter[str]] = defaultdict(Counter)
        self._messages: dict[str, Counter[str]] = defaultdict(Counter)
        self._rounds: Counter[int] = Counter()

    @property
    def entries(self) -> int:
        return self._log.size

    def catch_up(self) -> None:
        for entry in self._log.new_entries(Egress.type, EgressBlocked.type, RoundDeclined.type):
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        day, body = day_of(entry["ts"]), entry["body"]
        if entry["type"] == Egress.type:
            self._days[day][body["data_class"]] += body["bytes"]
            self._messages[day][body["data_class"]] += 1
            if entry["round"] is not None:
                self._rounds[entry["round"]] += body["bytes"]
        elif entry["type"] == EgressBlocked.type:
            self._blocked[day] += 1
        else:
            self._declined[day] += 1
            self._rule = body["rule"]

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
            "newest": self._log.newest_ms,
        }


ABOUT: Final = (
    "site", "federation", "manifest_version", "run", "round", "rounds_planned", "model", "certified", "stopped",
    "certificate_ends_ms",
)  # fmt: skip
Stamp = tuple[tuple[str, int, int], ...]


class Content:
    """Reads only; the agent may be running or not."""

    def __init__(self, config: SiteConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._totals = EgressTotals(config.state / "log")
        self._shown: tuple[object, Response] | None = None
        self._slow: tuple[Stamp, dict[str, Any]] | None = None

    def state(self) -> Response:
        now = self._clock.now_ms()
        self._totals.catch_up()
        egress, slow = self._totals.to_json(now), self._read()
        key = (egress, slow, day_of(now))
        if self._shown is None or self._shown[0] != key:
            content = {**slow, "egress": egress, "health": judge(slow, egress)}
            self._shown = (key, Response.of_json(content))
        return self._shown[1]

    def _read(self) -> dict[str, Any]:
        # An agent that was killed changes no file: whether it runs is looked at again every few seconds.
        stamp = (*self._stamp(), ("now", self._clock.now_ms() // BEAT_MS, 0))
        if self._slow is None or self._slow[0] != stamp:
            self._slow = (stamp, self._gather())
        return self._slow[1]

    def _stamp(self) -> Stamp:
        state, found = self._config.state, []
        memory = newest_memory(state / "memory")
        names = [state / name for name in ("wal", "run", "metrics.jsonl", "data.json", "pause.json", "now.json")]
        names.append(PersonalState(state).evaluation)
        for path in (*names, self._config.ledger, *([memory] if memory else [])):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            found.append((str(path), status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _gather(self) -> dict[str, Any]:
        state = self._config.state
        about, rows = self._about()
        memory = newest_memory(state / "memory")
        return {
            "about": about,
            "privacy": spent(self._config),
            "classes": classes(state / "data.json"),
            "curves": curves(rows),
            "confusion": confusion(rows),
            "evaluation": evaluation(PersonalState(state).evaluation),
            "prototypes": prototypes(memory) if memory else None,
        }

    def _about(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Who we are and how far; where keys or manifest are not in order, what is wrong with them."""
        try:
            found = overview(self._config, self._clock)
        except ToolkitError as error:
            return {"problem": str(error)}, []
        now = self._clock.now_ms()
        notices = [{"level": level, "text": text} for level, text in remarks(found, now)]
        return {name: found[name] for name in ABOUT} | {
            "remarks": notices,
            "complete": complete(found),
            "running": found["agent"]["running"],
            "connected": found["agent"].get("connected_ms") if found["agent"]["running"] else None,
        }, found["metrics"]


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
    budget = {"epsilon": state.epsilon, "cap": terms.cap, "delta": terms.delta, "unit": terms.unit.value}
    return budget | {"population": terms.population, "series": series}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def judge(slow: dict[str, Any], egress: dict[str, Any]) -> dict[str, Any]:
    """One sentence about today, and what to look at. Pure."""
    about, privacy = slow["about"], slow["privacy"] or {}
    remarks = [(one["level"], one["text"]) for one in about.get("remarks", ())]
    if about.get("problem"):
        remarks.append(("bad", about["problem"]))
    if privacy.get("problem"):
        remarks.append(("bad", privacy["problem"]))
    if egress["blocked"]:
        level = "bad" if egress["blocked_today"] else "look"
        today, total = egress["blocked_today"], egress["blocked"]
        blocked = f"blocked by the egress filter and not sent: {today} today, {total} in all"
        remarks.append((level, f"{blocked}; `privacy-audit egress` has more"))
    # What is declined now is a remark of the agent's; what was declined earlier is over, and nothing to look after.
    if egress["declined_today"] and not any(egress["declined_by"] in text for _, text in remarks):
        over = f"orders declined earlier today: {egress['declined_today']}"
        remarks.append(("good", f"{over}; last reason: {egress['declined_by']}"))
    sent = sum(row[2] for row in egress["today"])
    sentence = "Nothing was sent today" if not sent else "What was sent today was masked or part of the protocol"
    if about.get("complete"):
        sentence = f"{COMPLETE[0].upper()}{COMPLETE[1:]}"
    if not about.get("running", True):
        sentence = f"The agent is not running. {sentence}"
    level = max((one for one, _ in remarks), key=("good", "look", "bad").index, default="good")
    return {
        "level": level,
        "sentence": sentence,
        "remarks": [{"level": one, "text": text} for one, text in remarks],
    }


# `site-agent status --web`: the hospital's page on this machine's own address, behind a token for one start.

TOKEN_BYTES = 24


def open_page(config: SiteConfig, listen: str, *, clock: Clock, rng: Randomness) -> tuple[WebServer, str]:
    """The page, listening, and the address to open. Who does not have the whole address gets nothing: other people
    may have accounts on this machine.

    :raises ConfigError: if another machine could reach it.
    """
    address = require_loopback(listen, where="--listen")
    token = base64.urlsafe_b64encode(rng.bytes(TOKEN_BYTES)).decode()
    routes = {
        **assets("lazaret.web", "kit.js", "base.css"),
        **assets("site_agent.page", "index.html", "app.js", "style.css"),
        "/state.json": Content(config, clock).state,
    }
    server = WebServer(Pages(routes, Guard(folder=token)).answer, address)
    server.start()
    return server, f"{server.url}{token}/"


def show_page(config: SiteConfig, listen: str) -> None:
    """Show the page until it is interrupted."""
    server, url = open_page(config, listen, clock=SystemClock(), rng=SystemRandomness())
    say("this page is confidential: it shows data that never leave this site. Ctrl-C ends it")
    click.echo(url)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.stop()
