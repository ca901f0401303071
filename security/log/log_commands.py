"""What people do with a log, as the log itself records it: give it to an auditor, note an action, erase, archive.

The agent must not run meanwhile, since a log has one writer; it goes on where it was when it is started again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lazaret import files, software
from lazaret.errors import ConfigError, DataError, LocalProtocolError
from lazaret.terminal import say
from security.log.events import AccessExported, OperatorAction
from security.log.reader import LogReader
from security.log.store import ARCHIVE_NAME, LogFolder
from security.log.writer import AuditLog

_PRIVATE = shutil.ignore_patterns("annex", ".lock", ".*.new", "archive")
_KEPT_HERE = 2  # segments that a running party reads again and again

Opener = Callable[[Path], AuditLog]
Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def hand_over(log: AuditLog, target: Path, *, auditor: str, purpose: str) -> int:
    """Record who gets the log and why, sign that, and copy it without the annexes; returns how many entries it has."""
    if target.exists():
        raise ConfigError("something is there already", where=str(target), hint="name a folder that does not exist")
    log.append(AccessExported(auditor=auditor, purpose=purpose, size=log.size), actor=software.account())
    log.checkpoint()
    shutil.copytree(log.folder, target, ignore=_PRIVATE)
    for segment in LogReader(log.folder).segments():
        if segment.parent != log.folder / "segments":
            shutil.copyfile(segment, target / "segments" / segment.name)
    return log.size


def archive_segments(log: AuditLog, target: Path) -> list[str]:
    """Move older segments to another folder. The log goes on; readers find them there, and they are checked as before.

    The copies come first and are read back, then the log says where they are, then the files go. A kill in between
    leaves both.

    :raises ConfigError: if there is nothing to archive, or the folder is another log's or another one than before.
    """
    folder, place = LogFolder(log.folder), target.resolve()
    found = [path for path in LogReader(log.folder).segments()[:-_KEPT_HERE] if path.parent == folder.segments]
    if not found:
        raise ConfigError("no segment is old enough", where=str(folder.segments), hint="the newest two stay")
    if folder.archive.exists() and folder.archive.read_text(encoding="utf-8").strip() != str(place):
        raise ConfigError("older segments are in another folder", where=str(folder.archive), hint="name that folder")
    if place.is_relative_to(log.folder.resolve()):
        raise ConfigError("an archive is outside its log", where=str(place), hint="name another folder")
    name = place / ARCHIVE_NAME
    if name.exists() and name.read_text(encoding="utf-8").strip() != log.origin:
        raise ConfigError("segments of another log are there", where=str(place), hint="one folder for each log")
    files.write_atomically(name, f"{log.origin}\n".encode(), mode=0o600)
    for path in found:
        data, there = path.read_bytes(), place / path.name
        if there.exists() and there.read_bytes() != data:
            raise ConfigError("another segment is there under this name", where=str(there), hint="an empty folder")
        files.write_atomically(there, data, mode=0o600)
        if (place / path.name).read_bytes() != data:
            raise DataError("what was written is not what is read back", where=str(place / path.name))
    files.write_atomically(folder.archive, f"{place}\n".encode())
    action = OperatorAction(command=f"log-archive: segments {found[0].stem} to {found[-1].stem}", role="operator")
    log.append(action, actor=software.account())
    log.checkpoint()
    for path in found:
        path.unlink()
    return [path.name for path in found]


@contextmanager
def _opened(open_log: Opener, config_path: Path) -> Iterator[AuditLog]:
    log = open_log(config_path)
    try:
        yield log
    except LocalProtocolError as error:
        raise ConfigError(error.message, where=error.where, hint="it must be one line of plain text") from error
    finally:
        log.close()


def log_commands(open_log: Opener, config_option: Decorator) -> tuple[click.Command, ...]:
    """The four commands, for a program that knows where its log is.

    :param config_option: a decorator that gives a command the parameter `config_path`.
    """

    @click.command("log-export")
    @click.argument("target", type=click.Path(path_type=Path))
    @click.option("--auditor", required=True, help="Who gets it.")
    @click.option("--purpose", required=True, help="For which purpose.")
    @config_option
    def log_export(config_path: Path, target: Path, auditor: str, purpose: str) -> None:
        """Copy the privacy log to TARGET for an auditor, without its annexes; the log records it."""
        with _opened(open_log, config_path) as log:
            size = hand_over(log, target, auditor=auditor, purpose=purpose)
        say(f"{size} entries are in {target}; `privacy-audit verify {target} --root-key root.pem` reads them")

    @click.command("log-note")
    @click.argument("text")
    @click.option("--role", default="operator", show_default=True, help="Your role in it.")
    @config_option
    def log_note(config_path: Path, text: str, role: str) -> None:
        """Record an action of yours in the privacy log: a check, a repair, an approval."""
        with _opened(open_log, config_path) as log:
            seq = log.append(OperatorAction(command=text, role=role), actor=software.account())
        say(f"noted as entry {seq}")

    @click.command("log-erase")
    @click.argument("first", type=click.IntRange(0))
    @click.argument("last", type=click.IntRange(0))
    @click.option("--authority", required=True, help="Who has authorised it.")
    @config_option
    def log_erase(config_path: Path, first: int, last: int, authority: str) -> None:
        """Erase the private annexes of entries FIRST to LAST; the entries and their commitments stay."""
        if last < first:
            raise ConfigError(f"entry {last} comes before {first}", where="LAST")
        with _opened(open_log, config_path) as log:
            log.erase_annex(first, last, authority)
        say(f"annexes of entries {first} to {last} are erased, and the log says who authorised it")

    @click.command("log-archive")
    @click.argument("target", type=click.Path(path_type=Path, file_okay=False))
    @config_option
    def log_archive(config_path: Path, target: Path) -> None:
        """Move the older segments of the privacy log to the folder TARGET, which must stay reachable from here."""
        with _opened(open_log, config_path) as log:
            moved = archive_segments(log, target)
        say(f"{len(moved)} segments are in {target}; an auditor reads them with `privacy-audit --segments {target}`")

    return log_export, log_note, log_erase, log_archive
