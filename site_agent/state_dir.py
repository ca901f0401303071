"""The site's state directory: what must survive a restart, readable by this user only.

wal                  what the site has agreed to (site_agent/state_writer.py)
run                  the run that everything here belongs to, but for the log
runs/<run>/          the same files of runs that are over
rounds               how many rounds this site has trained
connections          how often this site has connected
pending/<round>      the encoded update of a round, sealed with AES-GCM under the site's own key
memory/              personal head, prototypes and optimiser; the trainer's (site_agent/trainer/personal_state.py)
states/<hash>.safetensors    global models, by the hash that the chain of results names
states/draft         the model that follows from a sum that is still coming in
models/              the best personal model and what belongs to it; the trainer's too
metrics.jsonl        local evaluation after each round
sides/               which patients train: the key of their sides, or the list of them; of all runs
data.json            how many images of each class are here; for the hospital's own page, never leaves
initial/<digest>.safetensors    the run's initial model, where it came by wire (site_agent/next_run.py)
evidence/            proof of lies of the coordinator, for the consortium
covered              the newest covered result and its acknowledgements, for `site-agent handover`
moved.json           this site has moved to another machine (lazaret/archive.py)
earlier/<site>/      the log of a lost site that this one was restored from
stopped              the operator's signed word that the run has ended before its last round
log/                 the privacy log
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from lazaret import files
from lazaret.errors import ConfigError, DataError, LocalProtocolError, ToolkitError
from security import labels
from security.crypto import aead, encoding
from security.crypto.encoding import Reader
from security.identity import pki
from security.rng import Randomness
from security.secagg import state as states
from security.secagg.layout import Layout, Vector
from security.secrets import Secret

if TYPE_CHECKING:  # commands that only look at the folder need no protocol
    from security.secagg.effects import KeepEvidence
    from security.secagg.messages import Jump
    from security.secagg.relay import RunStop
    from security.secagg.site.attempt import PendingUpdate
    from site_agent.state_writer import Draft

KEPT_STATES: Final = 3
LAST_WORDS_SECONDS: Final = 10
STATE_HINT: Final = "[site] state must be a folder for this agent alone; it is created if there is none"
_MAX_COUNT: Final = 2**53 - 1
_OF_A_RUN: Final = ("wal", "rounds", "pending", "states", "metrics.jsonl", "covered", "stopped", "run")


log = logging.getLogger("site-agent")


class StateDir:
    """One site's state on disk."""

    def __init__(self, folder: Path, *, site: str, sealing_key: bytes, randomness: Randomness) -> None:
        self.folder = folder
        self._site = site
        self._key = Secret(sealing_key)
        self._randomness = randomness
        self._draft: Draft | None = None
        for path in (folder, self.pending, self.memory, self.states, self.models):
            _make_private(path)

    @property
    def wal(self) -> Path:
        return self.folder / "wal"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def pending(self) -> Path:
        return self.folder / "pending"

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    @property
    def states(self) -> Path:
        return self.folder / "states"

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def covered(self) -> Path:
        return self.folder / "covered"

    @property
    def stopped(self) -> Path:
        return self.folder / "stopped"

    def keep_stop(self, word: RunStop) -> None:
        """The operator's signed word that this run has ended."""
        _write(self.stopped, word.to_bytes())

    def keep_covered(self, covered: Jump) -> None:
        """The newest result that enough sites have acknowledged, in place of the one before."""
        _write(self.covered, covered.to_bytes())

    def read_covered(self) -> Jump | None:
        from security.secagg.messages import Jump

        try:
            return Jump.from_bytes(self.covered.read_bytes())
        except FileNotFoundError:
            return None

    # Which run this is.

    def claim(self, run: str) -> str | None:
        """Bind this directory to a run. Files of a run before it are moved to runs/, so that personal state and
        promises are not mixed; the privacy log and the count of connections continue.

        :returns: the run whose files were moved, if any.
        """
        found = run_of(self.folder)
        if found == run:
            return None
        if found is not None:
            self._set_aside(found)
        _write(self.folder / "run", f"{run}\n".encode())
        return found

    def _set_aside(self, run: str) -> None:
        """The name of the run last: as long as it is here, a start that was cut short begins again where it stopped.

        What could open an upload goes before: nobody looks at `secret_ttl` in the files of a run that is over.
        """
        from security.secagg.site.journal import Journal
        from site_agent.state_writer import WriteAheadLog

        if self.wal.exists():
            wal = WriteAheadLog(self.wal)  # or it is refused here: an agent of the old run still has it open
            wal.compact(Journal.replay(wal.records).compacted(done_round=_MAX_COUNT))
            wal.close()
        self.forget(_MAX_COUNT)
        target = self.folder / "runs" / run
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.memory, self.models):
            _empty_into(folder, target / folder.name)
        for name in _OF_A_RUN:
            if (self.folder / name).exists() and not (target / name).exists():
                (self.folder / name).rename(target / name)
        for path in (self.pending, self.states):
            path.mkdir(mode=0o700, exist_ok=True)

    def tidy(self) -> None:
        """Remove what writes left behind that a kill cut short.

        For the agent that holds this directory alone: another process would take away a file that is being written.
        """
        for folder in (self.folder, self.pending, self.states):
            for leftover in folder.glob(".*.new"):
                leftover.unlink()

    def next_connection(self) -> int:
        """Count connections up, on disk before the number is used: it is part of every message's name."""
        path = self.folder / "connections"
        hint = "write a number into it above the number of connections of this site so far, such as a million"
        number = _read_count(path, "the connection counter", hint) + 1
        _write(path, f"{number}\n".encode())
        return number

    # The update of a round.

    def seal(self, layout: Layout, update: PendingUpdate) -> None:
        """Keep an encoded update for all attempts of its round; what is on disk is ciphertext."""
        header = _header(layout, update)
        box = aead.seal(
            self._key,
            Secret(layout.ring.pack(update.words).tobytes()),
            kx=_binding(header),
            source=self._site,
            destination=self._site,
            randomness=self._randomness,
        )
        _write(self.pending / str(update.round), encoding.tlv(header) + box)

    def unseal(self, layout: Layout) -> PendingUpdate | None:
        """The newest sealed update; None if it was encoded for another layout, as when a site has joined since."""
        rounds = sorted(int(path.name) for path in self.pending.iterdir() if path.name.isdigit())
        if not rounds:
            return None
        path = self.pending / str(rounds[-1])
        try:
            reader = Reader(files.read_private(path), "sealed update")
            header = reader.tlv(limit=1024)
            fields = Reader(header, "sealed update")
            number, made_for = fields.u64(), fields.fixed(32)
            state_hash, config_hash = fields.fixed(32), fields.fixed(32)
            if made_for != layout.layout_hash:
                return None
            box = reader.raw(layout.byte_length + aead.OVERHEAD)
            reader.finish()
            words = aead.open_box(self._key, box, kx=_binding(header), source=self._site, destination=self._site)
        except ToolkitError as error:
            raise DataError(
                "the sealed update does not open",
                where=str(path),
                hint="delete it: the site misses this round and trains the next one",
            ) from error
        from security.secagg.site.attempt import PendingUpdate

        values = layout.ring.unpack(words.reveal())
        return PendingUpdate(round=number, state_hash=state_hash, config_hash=config_hash, words=values)

    def forget(self, round_number: int) -> None:
        """Erase sealed updates up to a round."""
        for path in self.pending.iterdir():
            if path.name.isdigit() and int(path.name) <= round_number:
                path.unlink()

    # Rounds.

    def count_round(self) -> None:
        """One more was trained; what was learnt in it is in the trainer's own files."""
        _write(self.folder / "rounds", f"{self.rounds_done + 1}\n".encode())

    @property
    def rounds_done(self) -> int:
        """How many rounds this site has trained, for the hospital's own limit."""
        hint = "write into it how many rounds this site has trained; the privacy log has a train.done for each"
        return _read_count(self.folder / "rounds", "the counter of rounds", hint)

    # Global models.

    def keep_state(self, layout: Layout, state_hash: bytes, state: Vector) -> None:
        path = self.states / f"{state_hash.hex()}.safetensors"
        tensors = {name: np.ascontiguousarray(values) for name, values in states.unflatten(layout, state).items()}
        _write(path, save_tensors(tensors))
        self._prune_states(path)

    def draft_state(self, layout: Layout, start: int, values: Vector) -> None:
        """Values of a model that may follow, in order. Those at 0 begin a new draft."""
        from site_agent.state_writer import Draft

        if start == 0:
            if self._draft is not None:
                self._draft.drop()
            self._draft = Draft(self.states / "draft", layout)
        if self._draft is None:
            raise LocalProtocolError("a partial model begins with its first value", where=str(self.states))
        self._draft.extend(start, values)

    def keep_draft(self, state_hash: bytes) -> None:
        """The draft is complete, and is the model with this hash."""
        if self._draft is None:
            raise LocalProtocolError("there is no partial model to keep", where=str(self.states))
        path = self.states / f"{state_hash.hex()}.safetensors"
        self._draft.keep(path)
        self._draft = None
        self._prune_states(path)

    def _prune_states(self, newest: Path) -> None:
        others = sorted(self.states.glob("*.safetensors"), key=lambda other: other.stat().st_mtime_ns)
        for old in others[:-KEPT_STATES]:
            if old != newest:
                old.unlink()

    def state(self, layout: Layout, state_hash: bytes) -> Vector:
        """A global model by its hash, which is checked."""
        return read_state(self.states, layout, state_hash)

    # For people.

    @property
    def evidence(self) -> Path:
        return self.folder / "evidence"

    def keep_evidence(self, found: KeepEvidence) -> Path:
        """Proof that the coordinator lied; outlives runs."""
        self.evidence.mkdir(mode=0o700, exist_ok=True)
        path = self.evidence / found.name
        _write(path, found.proof)
        return path

    def note_metrics(self, values: Mapping[str, Any]) -> None:
        """On a line of its own, whatever a full disk or a power cut has left of the last one."""
        line = json.dumps(values, sort_keys=True, allow_nan=False).encode() + b"\n"
        descriptor = os.open(self.metrics, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "rb+") as file:
            file.write(line if _ends_a_line(file) else b"\n" + line)
            file.flush()
            os.fsync(file.fileno())

    def note_data(self, values: Mapping[str, Any]) -> None:
        """What the data hold, for the hospital's own page."""
        _write(self.folder / "data.json", json.dumps(values, ensure_ascii=False).encode() + b"\n")

    def data_notes(self) -> dict[str, Any]:
        """What `note_data` wrote last; empty before the first time."""
        path = self.folder / "data.json"
        return (_row(path.read_bytes()) or {}) if path.exists() else {}

    @property
    def best_score(self) -> float | None:
        """Balanced accuracy of the best model so far, by local validation."""
        return max((row["validation"]["bacc"] for row in self.read_metrics() if row.get("best")), default=None)

    def read_metrics(self) -> list[dict[str, Any]]:
        """One row for each evaluation. An incomplete write costs its own row and not the start of the agent."""
        if not self.metrics.exists():
            return []
        lines = [line for line in self.metrics.read_bytes().split(b"\n") if line]
        rows = [row for line in lines if (row := _row(line)) is not None]
        if len(rows) < len(lines):
            log.warning("%s: %d incomplete lines are left out", self.metrics, len(lines) - len(rows))
        return rows


def read_state(folder: Path, layout: Layout, state_hash: bytes) -> Vector:
    """A global model of the folder `states` by its hash, which is checked. It takes no key."""
    path = folder / f"{state_hash.hex()}.safetensors"
    try:
        state = states.canonical(states.flatten(layout, load_tensors(path.read_bytes())))
    except FileNotFoundError as error:
        raise DataError(
            "the newest model is missing from the state folder",
            where=str(path),
            hint="restore the whole folder, or enrol this site again",
        ) from error
    except (SafetensorError, ToolkitError) as error:
        raise DataError("the newest model cannot be read", where=str(path)) from error
    if states.state_hash(state) != state_hash:
        raise DataError("the newest model does not have its hash", where=str(path))
    return state


def run_of(folder: Path) -> str | None:
    """The run that a state directory belongs to; None for a new one."""
    path = folder / "run"
    if not path.exists():
        return None
    found = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(pki.NAME_PATTERN, found):
        # Taken for the name of another run, it would have this run's promises set aside and forgotten.
        raise DataError(
            "does not name a run", where=str(path), hint="write the name of the run into it that this folder belongs to"
        )
    return found


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        reason = "this user may not write there" if isinstance(error, PermissionError) else "is not a folder"
        raise ConfigError(reason, where=str(folder), hint=STATE_HINT) from error


def _empty_into(folder: Path, target: Path) -> None:
    """Move what a trainer has kept for a run that is over. The folder stays the one that it is: a container of the
    trainer has mounted it, and would go on with the files of the old run.

    :raises ConfigError: if the trainer of that run does not end: what it writes later would be taken for the new run's.
    """
    target.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for left in range(LAST_WORDS_SECONDS * 10, -1, -1):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise ConfigError(
                        "the trainer of the last run still uses this folder", where=str(folder), hint="stop it first"
                    ) from None
                time.sleep(0.1)
        for path in folder.iterdir():
            path.rename(target / path.name)
    finally:
        os.close(descriptor)


def _read_count(path: Path, what: str, hint: str) -> int:
    """A number that only goes up; 0 before the first one."""
    if not path.exists():
        return 0
    found = path.read_bytes().strip()
    if not found.isdigit() or len(found) > len(str(_MAX_COUNT)) or int(found) >= _MAX_COUNT:
        raise DataError(f"{what} is damaged", where=str(path), hint=hint)
    return int(found)


def _ends_a_line(file: BinaryIO) -> bool:
    """Leaves the file at its end."""
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _write(path: Path, content: bytes) -> None:
    files.write_atomically(path, content, mode=0o600)


def _header(layout: Layout, update: PendingUpdate) -> bytes:
    digests = (layout.layout_hash, update.state_hash, update.config_hash)
    return encoding.u64(update.round) + b"".join(encoding.tlv(digest) for digest in digests)


def _binding(header: bytes) -> bytes:
    """A sealed update opens only under the round, layout, model and configuration it was sealed for."""
    return hashlib.sha256(labels.PENDING_UPDATE + header).digest()
