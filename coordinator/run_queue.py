"""Runs that wait for the one in force to end: each a signed manifest and its initial model, checked when it is queued.

queue/<version>/manifest.json, model.safetensors    in the state folder, in the order of the manifests' versions
initial/<digest>.safetensors                         the initial model of a run that was taken from the queue
stop.json                                            the operator's order that a run ends before its last round
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lazaret import files
from lazaret.errors import ConfigError, ToolkitError
from security.identity.acceptance import unseal
from security.identity.enrolment import Identity
from security.identity.enrolment_files import read_file
from security.identity.manifest import Manifest
from security.identity.pinned_files import pinned_model

log = logging.getLogger("coordinator")
MOST_REASON: Final = 200
_MANIFEST: Final = "manifest.json"
_MODEL: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """One run that waits."""

    folder: Path
    manifest: Manifest


class RunQueue:
    """The queue of one coordinator's state folder; its process and its commands read it from disk each time."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._folder = state / "queue"

    def add(self, manifest: Path, model: Path, identity: Identity, *, now_ms: int) -> Manifest:
        """Check a run as if it began now, and keep copies of its files.

        :raises ToolkitError: by the check that failed. Nothing is kept then.
        """
        data = read_file(manifest, hint="the consortium's `publish` writes it, as manifest.json")
        offered, current = identity.check_manifest(data, now_ms=now_ms), identity.manifest(now_ms=now_ms)
        older = [one for one in self.runs() if one.manifest.run == offered.run]
        if any(one.manifest.version >= offered.version for one in older):
            hint = "`coordinator queue` lists it"
            raise ConfigError(f"run {offered.run} waits already", where=str(manifest), hint=hint)
        if current is not None and offered.run == current.run:
            raise ConfigError(
                f"run {offered.run} is the one in force",
                where=str(manifest),
                hint="a newer manifest of it is installed with `coordinator join --manifest`",
            )
        pinned_model(model, offered)
        target = self._folder / f"{offered.version:08d}"
        beside = self._folder / f".{target.name}.new"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(mode=0o700, parents=True)
        shutil.copyfile(model, beside / _MODEL)
        files.write_atomically(beside / _MANIFEST, data, mode=0o600)
        beside.rename(target)
        for one in older:
            shutil.rmtree(one.folder)
        return offered

    def runs(self) -> list[QueuedRun]:
        """What waits, the next one first."""
        found = sorted(path for path in self._folder.glob("[0-9]*") if path.is_dir())
        return [QueuedRun(path, unseal((path / _MANIFEST).read_bytes(), str(path / _MANIFEST))[0]) for path in found]

    def __bool__(self) -> bool:
        return any(self._folder.glob("[0-9]*"))

    def remove(self, run: str) -> None:
        """:raises ConfigError: if no such run waits."""
        for one in self.runs():
            if one.manifest.run == run:
                shutil.rmtree(one.folder)
                return
        raise ConfigError(f"no run {run} waits", where=str(self._folder))

    def begin_next(self, identity: Identity, *, now_ms: int) -> Manifest | None:
        """Install the next run that can still begin: its manifest may have expired, or a newer one be in force since.
        Those that cannot are removed; None if no other is left.
        """
        for following in self.runs():
            try:
                return self._begin(following, identity, now_ms)
            except ToolkitError as error:
                log.error("run %s was queued and cannot begin: %s", following.manifest.run, error)
                shutil.rmtree(following.folder)
        return None

    def _begin(self, following: QueuedRun, identity: Identity, now_ms: int) -> Manifest:
        """The model first: a start that was cut short finds both, or the old run."""
        identity.check_manifest((following.folder / _MANIFEST).read_bytes(), now_ms=now_ms)
        target = self._state / "initial" / f"{following.manifest.model.initial_file}.safetensors"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        for old in target.parent.iterdir():
            old.unlink()
        shutil.copyfile(following.folder / _MODEL, target)
        pinned_model(target, following.manifest)
        installed = identity.install_manifest((following.folder / _MANIFEST).read_bytes(), now_ms=now_ms)
        shutil.rmtree(following.folder)
        return installed


class StopFile:
    """The operator's order that a run ends before its last round. It names the run, and so ends no other."""

    def __init__(self, state: Path) -> None:
        self._path = state / "stop.json"

    def set(self, run: str, reason: str) -> None:
        said = {"run": run, "reason": reason[:MOST_REASON]}
        files.write_atomically(self._path, json.dumps(said).encode() + b"\n", mode=0o600)

    def reason(self, run: str) -> str | None:
        """Why this run ends; None if nobody has ordered it."""
        try:
            said = json.loads(self._path.read_bytes())
            return str(said["reason"]) if said["run"] == run else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
