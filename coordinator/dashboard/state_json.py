"""The operator's page as one JSON value: what is on disk and what is under way, made again when either has changed.

In this order: rounds and figures, the one sentence for the operator, checkpoints of the logs, the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from coordinator.dashboard.live import AWAY, EXCLUDED, Live, OtherRuns, SiteNow, estimated_end, with_gap
from coordinator.effects import PUBLISHED
from coordinator.phases import RunPhase
from coordinator.round_history import Cohort, LastAttempt, ReadOnlyHistory
from coordinator.status import certificate_ends, endings, scores_json
from lazaret import software
from lazaret.errors import CodecError, LocalProtocolError
from lazaret.web.http import Response
from security.identity.manifest import Manifest
from security.log.note import Checkpoint, Note, checkpoint_of
from security.log.roster import Roster
from security.log.store import LogFolder
from security.log.witness import HeldCheckpoint

# Rounds, attempts and figures as the page shows them. A long run has thousands of rounds: old ones are read once.

RECENT: Final = 40  # rounds whose members are named one by one
MOVING: Final = 16  # newest rounds that may still change: open, under check, or with bytes to come
MOST_ABORTS: Final = 50
# Of one row: the fields of RoundFigures, then those of LastAttempt, under the names that the page knows.
COLUMNS: Final = (
    "number", "opened", "closed", "outcome", "model", "checked", "weight", "loss", "hits", "bytes_in", "bytes_out",
    "attempts", "members", "survivors",
)  # fmt: skip
_NO_ATTEMPT: Final = LastAttempt(0, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHistory:
    """All that the database says, as JSON can carry it.

    :param written: the rounds as JSON already, without the brackets: most of them never change.
    """

    rounds: list[list[Any]]
    written: str
    members: list[dict[str, Any]]
    aborts: list[dict[str, Any]]
    sessions: dict[str, int]
    excluded: dict[str, str]
    scores: dict[str, Any] | None = None


class PageReader:
    """Reads what has changed since the last time, and remembers the rest."""

    def __init__(self, history: ReadOnlyHistory, manifest: Manifest) -> None:
        self.history = history
        self._manifest = manifest
        self._settled: list[list[Any]] = []
        self._written = ""

    def read(self) -> PageHistory:
        rounds, written = self._rounds()
        return PageHistory(
            rounds=rounds,
            written=written,
            members=_members(self.history.cohorts(rounds=RECENT)),
            aborts=[
                {"at": at, "round": number, "attempt": attempt, "reason": reason, "missing": missing}
                for at, number, attempt, reason, missing in self.history.aborts(most=MOST_ABORTS)
            ],
            sessions={site: seen for site, (_, seen) in self.history.sessions().items()},
            excluded={site: reason for site, (reason, _) in self.history.exclusions().items()},
            scores=scores_json(self.history, self._manifest),
        )

    def _rounds(self) -> tuple[list[list[Any]], str]:
        """All rounds; old ones do not change any more, and are read and written once."""
        after = self._settled[-1][0] if self._settled else 0
        attempts = self.history.last_attempts(after=after)
        moving = [
            [*row, *attempts.get(row.number, _NO_ATTEMPT)] for row in self.history.round_figures(after=after)
        ]
        settling, moving = moving[:-MOVING], moving[-MOVING:]
        self._settled += settling
        self._written = _joined(self._written, _json(settling))
        return self._settled + moving, _joined(self._written, _json(moving))


def _members(cohorts: list[Cohort]) -> list[dict[str, Any]]:
    """Who was in the last attempt of each recent round: in its sum, left out, or, while it goes on, planned."""
    found = {}
    for number, planned, survivors, outcome in cohorts:
        if outcome is None:
            found[number] = {"round": number, "in": [], "out": [], "planned": planned}
        else:
            left_out = [name for name in planned if name not in survivors]
            found[number] = {"round": number, "in": survivors, "out": left_out, "planned": []}
    return list(found.values())


def _json(rows: list[list[Any]]) -> str:
    """The rows of a JSON array, without its brackets."""
    return json.dumps(rows, allow_nan=False, separators=(",", ":"))[1:-1]


def _joined(*parts: str) -> str:
    return ",".join(filter(None, parts))


# One sentence for the operator: is everything as it should be, and if not, what to check.

GOOD, LOOK, BAD = "good", "look", "bad"
_ORDER: Final = (GOOD, LOOK, BAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`level` is the worst of the remarks."""

    level: str
    sentence: str
    remarks: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        remarks = [{"level": level, "text": text} for level, text in self.remarks]
        return {"level": self.level, "sentence": self.sentence, "remarks": remarks}


def judge(live: Live, history: PageHistory, ending: Mapping[str, str] = MappingProxyType({})) -> Health:
    """Pure: the same picture gives the same words.

    :param ending: certificates, and a manifest, that end soon, by the name of their alert.
    """
    soon = [(BAD if "-1:" in name else LOOK, text) for name, text in ending.items()]
    remarks = [*_of_sites(live, history), *_of_rounds(live, history), *soon]
    level = max((level for level, _ in remarks), key=_ORDER.index, default=GOOD)
    return Health(level=level, sentence=_sentence(live), remarks=tuple(remarks))


def _sentence(live: Live) -> str:
    connected = [site for site in live.sites if site.state not in (AWAY, EXCLUDED)]
    ready = sum(site.state == "ready" for site in live.sites)
    match live.phase:
        case RunPhase.DONE:
            return f"All {live.planned} rounds are published"
        case RunPhase.AGGREGATION if live.aggregation is not None:
            return f"Round {live.round}: summing over {live.aggregation.members} sites, {live.aggregation.step}"
        case RunPhase.WAITING if live.paused:
            return f"Round {live.round}: paused"
        case RunPhase.WAITING:
            return f"Round {live.round}: waiting for enough sites"
        case RunPhase.PINGING:
            return f"Round {live.round}: asking {ready} sites whether they are there"
        case _:
            return f"Round {live.round}: training, {ready} of {len(connected)} connected sites are ready"


def _of_sites(live: Live, history: PageHistory) -> list[tuple[str, str]]:
    remarks = [(BAD, f"{name} is excluded: {reason}") for name, reason in sorted(history.excluded.items())]
    there = sum(site.state not in (AWAY, EXCLUDED) for site in live.sites)
    away = [site.name for site in live.sites if site.state == AWAY]
    if there < live.least and live.phase is not RunPhase.DONE:
        remarks.append((BAD, f"{there} sites are connected; a round needs {live.least}"))
    elif away:
        remarks.append((LOOK, f"not connected: {', '.join(away)}"))
    paused = [f"{site.name} ({site.pause})" for site in live.sites if site.pause]
    if paused:
        remarks.append((LOOK, f"stopped answering, left out of the next cohorts (number): {', '.join(paused)}"))
    declined = [site.name for site in live.sites if site.state == "declined"]
    if declined:
        remarks.append((LOOK, f"declined this round: {', '.join(declined)}"))
    return remarks


def _of_rounds(live: Live, history: PageHistory) -> list[tuple[str, str]]:
    there = sum(site.state not in (AWAY, EXCLUDED) for site in live.sites)
    # Too few are connected: that is said of the sites already.
    remarks = [(LOOK, live.hindrance)] if live.hindrance and (live.paused or there >= live.least) else []
    ended = [row for row in history.rounds if row[3] is not None]
    if ended and ended[-1][3] != PUBLISHED:
        two = len(ended) > 1 and ended[-2][3] != PUBLISHED
        remarks.append((BAD if two else LOOK, f"round {ended[-1][0]} gave no model: {ended[-1][3]}"))
    failed = [abort for abort in history.aborts if abort["attempt"] is not None and abort["round"] >= live.round - 1]
    if failed:
        names = f" ({', '.join(failed[0]['missing'])})" if failed[0]["missing"] else ""
        remarks.append((LOOK, f"an attempt of round {failed[0]['round']} failed: {failed[0]['reason']}{names}"))
    return remarks


# Checkpoints of all privacy logs as far as this coordinator holds them, and who has witnessed them.

Stamp = tuple[tuple[str, int, int], ...]


class LogCheckpoints:
    """Reads a file again only when it has changed."""

    def __init__(self, folder: Path, roster: Roster, name: str) -> None:
        self._folder = LogFolder(folder)
        self._roster = roster
        self._name = name

    def stamp(self) -> Stamp:
        """Another value whenever a head has been kept."""
        found = []
        for path in (self._folder.cosigned, *self._paths()):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((path.name, stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def _paths(self) -> list[Path]:
        return [self._folder.witness_path(party.origin) for party in self._roster.sites]

    def read(self, own: Note, size: int, known: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
        """This coordinator's log first, then what is held of each site's.

        :param known: what other sites have said that they hold of whose log.
        """
        peers: dict[str, list[dict[str, Any]]] = {}
        for (name, origin), held in sorted(known.items()):
            peers.setdefault(origin, []).append({"name": name, "size": held})
        sites = [self._held(party.name, party.origin, peers.get(party.origin, [])) for party in self._roster.sites]
        return [self._own(own, size), *sites]

    def _own(self, newest: Note, size: int) -> dict[str, Any]:
        witnessed = self._witnessed()
        witnesses = self._witnesses(witnessed) if witnessed else []
        return _head(self._name, checkpoint_of(newest)) | {"entries": size, "witnesses": witnesses}

    def _witnessed(self) -> Note | None:
        try:
            return Note.parse(self._folder.cosigned.read_bytes())
        except (FileNotFoundError, CodecError):
            return None

    def _held(self, name: str, origin: str, peers: list[dict[str, Any]]) -> dict[str, Any]:
        """A site's head was checked and cosigned here before it was kept, so that we are one of its witnesses."""
        try:
            held = HeldCheckpoint.parse(self._folder.witness_path(origin).read_bytes())
        except (FileNotFoundError, CodecError):
            return {"log": name, "size": 0, "root": None, "witnesses": []}
        return _head(name, held.checkpoint) | {"witnesses": [*self._witnesses(held.note), *peers]}

    def _witnesses(self, note: Note) -> list[dict[str, Any]]:
        """The cosignatures of parties that the roster knows, with their times (C2SP tlog-cosignature)."""
        known = {(party.cosigner.name, party.cosigner.id): party.name for party in self._roster.parties}
        size = checkpoint_of(note).size
        return [
            {"name": known[line.name, line.key_id], "size": size, "at": 1000 * int.from_bytes(line.value[:8], "big")}
            for line in note.signatures
            if (line.name, line.key_id) in known
        ]


def _head(name: str, head: Checkpoint) -> dict[str, Any]:
    return {"log": name, "size": head.size, "root": head.root.hex()}


class PageState:
    """`look` is called by the engine's loop, everything else by the page's thread."""

    def __init__(self, manifest: Manifest, history: ReadOnlyHistory, heads: LogCheckpoints) -> None:
        self.history = history
        self._reader = PageReader(history, manifest)
        self._heads = heads
        self._study = OtherRuns(history.path.parent)
        self._live: Live | None = None
        self._history: tuple[int, PageHistory] | None = None
        self._shown: tuple[object, Response] | None = None
        self._manifest = manifest
        self.certificates = certificate_ends(manifest)
        self.manifest_ends_ms = manifest.expires_at_ms
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

    def page_history(self) -> PageHistory:
        """What the database says; read again only when somebody has written to it."""
        return self._newest()[1]

    def _newest(self) -> tuple[int, PageHistory]:
        version = self.history.version()
        if self._history is None or self._history[0] != version:
            self._history = (version, self._reader.read())
        return self._history

    def json(self) -> Response:
        """The whole page's content."""
        live, (version, history), stamp = self.live, self._newest(), self._heads.stamp()
        key = (live, version, stamp, self._study.stamp())
        if self._shown is None or self._shown[0] != key:
            self._shown = (key, Response.of(self._content(live, history), "application/json"))
        return self._shown[1]

    def _content(self, live: Live, history: PageHistory) -> bytes:
        """One JSON object. Its rounds, nearly all of it in a long run, come written already."""
        rest = {
            "about": self._about,
            "health": judge(live, history, endings(self._manifest, live.now_ms)).to_json(),
            "now": _now(live) | {"end": self._end(live, history)},
            "runs": self._study.read(self._this_run(live, history)),
            "sites": [_site(site, history) for site in live.sites],
            "columns": COLUMNS,
            "members": history.members,
            "scores": history.scores,
            "aborts": history.aborts,
            "logs": [with_gap(one, self._manifest.coordinator.id) for one in self._logs(live)],
            "traffic": {"in": _by_size(live.received), "out": _by_size(live.sent)},
        }
        text = json.dumps(rest, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return f'{text[:-1]},"rounds":[{history.written}]}}'.encode()


    def _logs(self, live: Live) -> list[dict[str, Any]]:
        return self._heads.read(live.head, live.log_size, live.witnessed)

    def _this_run(self, live: Live, history: PageHistory) -> dict[str, Any]:
        """`best` is the round that the sites found best, where the run has scores."""
        began = history.rounds[0][1] if history.rounds else None
        run = {"run": self._manifest.run, "published": live.completed, "planned": live.planned}
        return run | {"began": began, "best": history.scores and history.scores["best"]}

    def _end(self, live: Live, history: PageHistory) -> int | None:
        """No estimate while nothing goes on."""
        if live.hindrance is not None or live.phase is RunPhase.DONE:
            return None
        return estimated_end(history.rounds, completed=live.completed, planned=live.planned)


def _now(live: Live) -> dict[str, Any]:
    now = live.aggregation
    return {
        "phase": str(live.phase),
        "round": live.round,
        "completed": live.completed,
        "planned": live.planned,
        "least": live.least,
        "deadline": live.deadline and 1000 * live.deadline,
        "checking": live.checking,
        "attempt": now
        and {"number": now.attempt, "step": now.step, "members": now.members, "threshold": now.threshold},
    }


def _site(site: SiteNow, history: PageHistory) -> dict[str, Any]:
    return {
        "name": site.name,
        "state": site.state,
        "connected": site.connected,
        "seen": 1000 * site.heard or history.sessions.get(site.name),
        "in": site.bytes_in,
        "out": site.bytes_out,
        "pause": site.pause,
        "excluded": history.excluded.get(site.name),
    }


def _by_size(counted: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda item: -item[1])
