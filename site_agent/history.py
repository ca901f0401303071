"""What this site's own privacy log says about the making of a model: rounds, cohorts, privacy spent, and its head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from security.audit.event import read_line
from security.audit.findings import Severity
from security.audit.store import LogFolder, lines_of
from security.audit.verify import Keys, verify
from security.consortium.views import audit_roster
from security.errors import CodecError, ConfigError
from site_agent.predictor import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Read from the log up to its newest signed head, after every check of `privacy-audit verify` on it.

    :ivar cohorts: sites in the sum of each round that this site took part in, by round.
    :ivar privacy: the newest booking under differential privacy, None if there is none.
    :ivar findings: what the verifier found, as `code: detail`; empty for a clean log.
    """

    origin: str
    size: int
    root: str
    witnessed: int
    findings: tuple[str, ...]
    trained: tuple[int, ...]
    cohorts: dict[int, int]
    dropouts: int
    declined: int
    privacy: dict[str, Any] | None
    data: tuple[dict[str, Any], ...]
    package: dict[str, Any] | None


def read_history(place: Place, upto: int) -> History:
    """What led to the model after round `upto`. Privacy is told up to the head, because what is spent is spent.

    :raises ConfigError: where there is no log yet.
    """
    if not place.vault.log.exists():
        raise ConfigError("there is no privacy log yet", where=str(place.vault.log), hint="has the agent run?")
    # The folder's own copy of the manifest is the one in force at its last entry; ours is signed and pinned already.
    verified = verify(place.vault.log, Keys(roster=audit_roster(place.manifest), pinned=True))
    newest = verified.heads.newest
    if newest is None:
        raise ConfigError("the privacy log has no signed head", where=str(place.vault.log))
    entries = list(_entries(LogFolder(place.vault.log), newest.checkpoint.size, place.manifest.run))
    before = [entry for entry in entries if entry["round"] is not None and entry["round"] <= upto]
    survivors = [entry for entry in before if entry["type"] == "secagg.survivors"]
    booked = [entry["body"] for entry in entries if entry["type"] in ("dp.committed", "dp.reserved")]
    started = [entry["body"] for entry in entries if entry["type"] == "agent.start"]
    return History(
        origin=verified.origin,
        size=newest.checkpoint.size,
        root=newest.checkpoint.root.hex(),
        witnessed=verified.heads.witnessed.checkpoint.size if verified.heads.witnessed else 0,
        findings=tuple(f"{one.code}: {one.detail}" for one in verified.findings if one.severity is not Severity.NOTE),
        trained=tuple(dict.fromkeys(entry["round"] for entry in before if entry["type"] == "train.done")),
        cohorts={entry["round"]: entry["body"]["count"] for entry in survivors},
        dropouts=sum(len(entry["body"]["dropouts"]) for entry in survivors),
        declined=sum(entry["type"] == "round.declined" for entry in before),
        privacy=booked[-1] if booked else None,
        data=tuple(_once(entry["body"] for entry in entries if entry["type"] == "data.opened")),
        package=started[-1] if started else None,
    )


def _entries(folder: LogFolder, size: int, run: str) -> Iterator[dict[str, Any]]:
    """Entries below a head that belong to this run, or to none."""
    for path in folder.segment_files():
        for _, line in lines_of(path.read_bytes()):
            try:
                entry = read_line(line)
            except CodecError:
                continue  # the verifier has a finding for it
            if entry["seq"] < size and entry["run"] in (run, None):
                yield entry


def _once(bodies: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for body in bodies:
        if body not in found:
            found.append(body)
    return found
