"""What people do with a state folder beside the process that uses it: pause it, look at it, clear old runs away, copy
it.

`pause.json` is written by `pause` and removed by `resume`. A process looks at it several times a second, so that a
pause begins and ends without a restart, and survives one. `now.json` is written every few seconds by the process; one
that is older than that was written by a process that has ended or hangs. `set-back.json` stays until a person deletes
it: others say that the folder is an old copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from lazaret import files
from lazaret.archive import ArchiveContents
from lazaret.errors import ConfigError, RollbackDetected, ToolkitError
from lazaret.terminal import emit, say

SET_BACK: Final = "set-back.json"
BEAT_MS: Final = 5_000
STALE_MS: Final = 4 * BEAT_MS
BY_SIGNAL: Final = "stopped by a signal"
NEXT_RUN: Final = "goes on with the next run"
MOST_REASON: Final = 200
MOST_WORDS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    reason: str
    since_ms: int


class PauseFile:
    """Whether somebody has paused this party, and why."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pause.json"
        self._seen: tuple[tuple[int, int, int] | None, Pause | None] = (None, None)

    def set(self, reason: str, *, now_ms: int) -> None:
        pause = {"reason": reason[:MOST_REASON], "since_ms": now_ms}
        files.write_atomically(self.path, json.dumps(pause).encode() + b"\n", mode=0o600)

    def clear(self) -> bool:
        """End the pause; returns whether there was one."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True

    def read(self) -> Pause | None:
        """The pause in force. The file is read again only when it has changed."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if self._seen[0] != stamp:
            self._seen = (stamp, self._parse(found.st_mtime_ns // 1_000_000))
        return self._seen[1]

    def reason(self) -> str | None:
        found = self.read()
        return found.reason if found is not None else None

    def _parse(self, since_ms: int) -> Pause:
        """A file that cannot be read pauses too: somebody wanted one."""
        try:
            kept = json.loads(self.path.read_bytes())
            return Pause(reason=str(kept["reason"])[:MOST_REASON], since_ms=int(kept["since_ms"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Pause(reason=f"{self.path} exists and cannot be read", since_ms=since_ms)


def pause_commands(
    folder_of: Callable[[Path], Path], with_config: Callable[[Any], Any], what: str
) -> tuple[click.Command, click.Command]:
    """`pause` and `resume` of a party.

    :param folder_of: its state folder, from the path of its configuration.
    :param what: what is paused, in a few words.
    """

    @click.command(help=f"Pause {what}: nothing new begins until `resume`, also after a restart. The service may run.")
    @click.option("--reason", default="by hand", show_default=True, help="Shown in status, log and page.")
    @with_config
    def pause(config_path: Path, reason: str) -> None:
        PauseFile(folder_of(config_path)).set(reason, now_ms=time.time_ns() // 1_000_000)
        say(f"paused: {reason}")

    @click.command(help=f"End the pause of {what}.")
    @with_config
    def resume(config_path: Path) -> None:
        ended = PauseFile(folder_of(config_path)).clear()
        say("the pause has ended" if ended else "there was no pause")

    return pause, resume


# Runs that are over: their files are in `runs/`, out of the way of the run that goes on. The privacy log continues over
# runs, so it is not among them.


def finished_runs(folder: Path) -> dict[str, Path]:
    """The folders of what a state folder has put aside, by name."""
    return {path.name: path for path in sorted((folder / "runs").glob("*")) if path.is_dir()}


def archive_run(folder: Path, name: str, target: Path) -> None:
    """Pack a finished run into a new file, readable by this user only, and read it back before its folder goes.

    :raises ConfigError: if there is no such run, or the file exists. Nothing is removed then.
    """
    source = _finished(folder, name)
    if target.exists():
        raise ConfigError("refusing to overwrite an existing file", where=str(target), hint="choose another name")
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as packed:
                packed.add(source, arcname=name)
            file.flush()
            os.fsync(file.fileno())
        _check_archive(source, name, target)
    except BaseException:
        target.unlink(missing_ok=True)  # half an archive helps nobody, and would be in the way of the next try
        raise
    remove_run(folder, name)


def _check_archive(source: Path, name: str, target: Path) -> None:
    """Read it back: every file of the run, with its length."""
    with tarfile.open(target, mode="r:gz") as packed:
        there = {member.name: member.size for member in packed.getmembers() if member.isfile()}
    wanted = {
        f"{name}/{path.relative_to(source).as_posix()}": path.stat().st_size
        for path in source.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    if there != wanted:
        raise ToolkitError("the archive is not complete", where=str(target), hint="is the disk full? the run is kept")


def remove_run(folder: Path, name: str) -> None:
    """:raises ConfigError: if there is no such run."""
    shutil.rmtree(_finished(folder, name))


def _finished(folder: Path, name: str) -> Path:
    found = finished_runs(folder)
    if name not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(f"there is no finished run {name!r}", where=str(folder / "runs"), hint=f"there is: {known}")
    return found[name]


def runs_command(folder_of: Callable[[Path], Path], with_config: Callable[[Any], Any]) -> click.Command:
    """`runs` of a party: what earlier runs left, which only takes room; models in them can still be wanted."""

    @click.command()
    @click.argument("name", required=False)
    @click.option("--archive", type=click.Path(path_type=Path, dir_okay=False), help="Pack NAME into this new file.")
    @click.option("--remove", is_flag=True, help="Delete the files of NAME.")
    @with_config
    def runs(config_path: Path, name: str | None, archive: Path | None, remove: bool) -> None:
        """List finished runs and their sizes; archive or remove one. The privacy log is not touched."""
        folder = folder_of(config_path)
        if (archive is None and not remove) or name is None:
            if archive is not None or remove:
                raise click.UsageError("name the run; without a name they are listed")
            if not (finished := finished_runs(folder)):
                say("there are no finished runs")
            for run, path in finished.items():
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                click.echo(f"{run:<32} {size / 1e6:8.1f} MB")
            return
        if archive is not None:
            archive_run(folder, name, archive)
            say(f"{name} is in {archive}, and no longer in {folder / 'runs'}")
        else:
            remove_run(folder, name)
            say(f"the files of {name} are removed")

    return runs


class NowFile:
    """What a process says of itself, in one JSON object."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "now.json"
        self._next_ms = 0
        self._last: dict[str, Any] | None = None

    def beat(self, state: dict[str, Any], *, now_ms: int, mono_ms: int) -> None:
        """Write it down, if it is time or has changed. A disk that refuses it is no reason to stop: what matters is
        written elsewhere, and fails there."""
        if mono_ms < self._next_ms and state == self._last:
            return
        self._next_ms, self._last = mono_ms + BEAT_MS, state
        with contextlib.suppress(OSError):
            self._write(state | {"at_ms": now_ms, "pid": os.getpid(), "stopped": None})

    def stop(self, reason: str, *, now_ms: int) -> None:
        """The last message of a process: why it ended."""
        with contextlib.suppress(OSError):
            self._write((self._last or {}) | {"at_ms": now_ms, "pid": os.getpid(), "stopped": reason})

    def _write(self, state: dict[str, Any]) -> None:
        """Without fsync: after a power cut the process has ended, whatever the file says."""
        beside = self.path.with_name(f".{self.path.name}.new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(state, sort_keys=True).encode() + b"\n")
        os.replace(beside, self.path)

    def read(self, *, now_ms: int) -> dict[str, Any]:
        """What was last said, with `running`: whether a process says it still. Nothing else if nobody ever did."""
        try:
            kept = json.loads(self.path.read_bytes())
            age = now_ms - int(kept["at_ms"])
        except (OSError, ValueError, KeyError, TypeError):
            return {"running": False}
        return dict(kept) | {"running": kept.get("stopped") is None and abs(age) < STALE_MS}


@contextlib.contextmanager
def final_message(folder: Path) -> Iterator[None]:
    """What ends a process, also one that has hardly begun, is what `status` says afterwards: what is wrong, what to do.

    :param folder: the state folder. One that is not there yet says nothing.
    """
    try:
        yield
    except ToolkitError as error:
        text = f"{error} ({error.hint})" if error.hint else str(error)
        NowFile(folder).stop(text[:MOST_WORDS], now_ms=time.time_ns() // 1_000_000)
        if isinstance(error, RollbackDetected):
            seen = {"said": text[:MOST_WORDS], "at_ms": time.time_ns() // 1_000_000}
            with contextlib.suppress(OSError):  # the error itself is what people must see
                files.write_atomically(folder / SET_BACK, json.dumps(seen).encode() + b"\n", mode=0o600)
        raise


def refuse_set_back(folder: Path) -> None:
    """Not even once more: each start of an old copy counts one more connection, until the count does not show it.

    A site may have nothing but the coordinator's word for it, who may lie. So a person can decide otherwise, and delete
    the file.

    :raises ConfigError: which no service manager answers with a new start.
    """
    if (folder / SET_BACK).exists():
        raise ConfigError(
            "other parties have seen a later state than this folder has: it is an old copy, and does not start again",
            where=str(folder / SET_BACK),
            hint="keep the folder and enrol under another name; where the newest folder is elsewhere, start that one; "
            "if no copy of this one has ever run, the other party errs or lies: delete this file",
        )


running_option: Final = click.option(
    "--running", is_flag=True, help="Say only whether it runs, for health checks; exit code 1 if not."
)


def say_running(folder: Path, *, now_ms: int) -> NoReturn:
    """`status --running`: from one small file, so that it can be asked often."""
    running = NowFile(folder).read(now_ms=now_ms)["running"]
    click.echo("running" if running else "not running")
    sys.exit(0 if running else 1)


# Which files of a party are in which kind of copy, as a table that `backup`, `restore` and `state` all follow.
#
# A *backup* is a copy without private keys and protocol records, made while the party goes on. A *move* is the party
# itself.

BACKUP: Final = "backup and move"
MOVE: Final = "move only"
NEITHER: Final = "neither"
EVERYTHING: Final = (BACKUP, MOVE)
CopyTable = Mapping[str, tuple[str, str]]
_UNKNOWN: Final = (MOVE, "")
_LAST: Final = "segments"


def copied_files(places: Mapping[str, tuple[Path, CopyTable]], kinds: Collection[str]) -> Iterator[tuple[str, Path]]:
    """What is copied, under names that do not depend on where the configuration has put the folders.

    A folder `log` comes last, and in it the entries: they are there then for every checkpoint that was copied before.
    """
    for place, (folder, table) in places.items():
        for path in _children(folder):
            if path.name != "log" and table.get(path.name, _UNKNOWN)[0] in kinds:
                yield f"{place}/{path.name}", path
    for place, (folder, _) in places.items():
        parts = sorted(_children(folder / "log"), key=lambda path: path.name == _LAST)
        yield from ((f"{place}/log/{path.name}", path) for path in parts if path.name != ".lock")


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def file_rows(places: Mapping[str, tuple[Path, CopyTable]]) -> Iterator[dict[str, Any]]:
    """Every file and folder with its size, and the copies that it is in."""
    for place, (folder, table) in places.items():
        for path in _children(folder):
            copied, meaning = table.get(path.name, _UNKNOWN)
            found = path.rglob("*") if path.is_dir() else (path,)
            size = sum(file.stat().st_size for file in found if file.is_file())
            yield {"file": f"{place}/{path.name}", "bytes": size, "copied": copied, "meaning": meaning}


def place_here(path: Path) -> None:
    """Let a configuration that was restored say that its folders and files are beside it, wherever they were."""
    text = path.read_text(encoding="utf-8")
    places = {"identity": "identity", "state": "state", "initial_model": "initial.safetensors", "plugins": "plugins"}
    for key, value in places.items():
        old = rf"""^[ \t]*{key}[ \t]*=[ \t]*(?:"[^"\n]*"|'[^'\n]*')"""
        text = re.sub(old, f'{key} = "{value}"', text, count=1, flags=re.MULTILINE)
    files.write_atomically(path, text.encode(), mode=0o600)


def check_places(found: Mapping[str, Path], folder: Path) -> None:
    """:raises ConfigError: if a configuration, after `place_here`, still names another folder: the party would begin
    anew there, with its keys and without what it has signed.
    """
    for name, path in found.items():
        if path.resolve() != (folder / name).resolve():
            raise ConfigError(
                f"the copy's configuration does not say where `{name}` is in a way that can be changed",
                where=str(path),
                hint=f'write `{name} = "..."` on a line of its own before the copy is made',
            )


def keys_in(identity: Path) -> list[tuple[str, Path]]:
    """The private keys of a party, under their names in a copy."""
    found = sorted(path for path in (identity / "keys").rglob("*") if path.is_file())
    return [(f"identity/{path.relative_to(identity).as_posix()}", path) for path in found]


def say_copied(contents: ArchiveContents, target: Path, *, program: str, as_json: bool) -> None:
    """What `backup` has written, and what can be done with it."""
    if as_json:
        emit({"file": str(target), "kind": contents.kind, "files": len(contents.digests), "bytes": contents.length})
        return
    say(f"{contents.party}: {len(contents.digests)} files, {contents.length / 1e6:.1f} MB, are in {target}")
    if contents.kind == "move":
        say("this folder can do nothing any more: its keys are erased")
        say(f"on the other machine: {program} restore {target.name} FOLDER; then delete every copy of the file")
    else:
        say(f"it has no key: what `{program} restore` makes of it is a new member under another name")


def state_command(
    rows_of: Callable[[Path], Iterator[dict[str, Any]]], with_config: Callable[[Any], Any], whose: str
) -> click.Command:
    """`state` of a party."""

    @click.command(help=f"List the files of {whose}, how large they are, and in which kind of copy each of them is.")
    @with_config
    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
    def state(config_path: Path, as_json: bool) -> None:
        found = list(rows_of(config_path))
        if as_json:
            emit({"files": found})
            return
        for row in found:
            click.echo(f"{row['file']:<28} {row['bytes'] / 1e6:9.1f} MB  {row['copied']:<16} {row['meaning']}")

    return state
