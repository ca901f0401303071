"""Reports of a folder to the archive. Each is sent until the archive has said that it holds it, and not again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lazaret import files
from lazaret.errors import ArchiveObjectError, ConfigError
from site_agent.archive.dicomweb import ArchiveClient
from site_agent.archive.table import is_uid

SENT: Final = ".sent"
MOST_REPORT: Final = 64 * 1024 * 1024


@dataclass(kw_only=True)
class SendSummary:
    """In numbers; a report is named by its place in the folder, never by its file."""

    reports: int = 0
    sent: int = 0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"reports": self.reports, "sent": self.sent, "problems": self.problems}


def reports_in(folder: Path) -> list[Path]:
    """:raises ConfigError: where there are none."""
    found = sorted(path for path in folder.glob("*.dcm") if is_uid(path.stem)) if folder.is_dir() else []
    if not found:
        raise ConfigError(
            "there are no reports here", where=str(folder), hint="`site-agent predict --store FOLDER` writes them"
        )
    return found


def send(client: ArchiveClient, folder: Path, *, tell: Callable[[int, int], None]) -> SendSummary:
    """What was sent is written down behind it. After a crash in between a report goes out twice, under the same UID,
    which the archive holds once.

    :raises ArchiveError: where the archive does not answer or does not let us in.
    """
    every = reports_in(folder)
    listed = folder / SENT
    done = set(listed.read_text(encoding="ascii").split()) if listed.exists() else set()
    summary = SendSummary(reports=len(every))
    descriptor = os.open(listed, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as record:
        for number, path in enumerate(every, start=1):
            if path.stem not in done:
                try:
                    client.store(path.stem, _content(path))
                except ArchiveObjectError as error:
                    summary.problems.append(f"report {number}: {error.message}")
                else:
                    summary.sent += 1
                    with files.naming(listed):
                        # The line before may have been cut off by a crash.
                        record.write(f"\n{path.stem}\n")
                        record.flush()
                        os.fsync(record.fileno())
            tell(number, len(every))
    return summary


def _content(path: Path) -> bytes:
    if path.stat().st_size > MOST_REPORT:
        raise ArchiveObjectError("a report is larger than any that is written here")
    return path.read_bytes()
