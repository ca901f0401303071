"""A party's privacy log, open for writing: the machine, its folder, its keys and its clock put together.

The rule that everything else rests on is *log, sync, then send*: `append` returns when the entry is durable, and
raises if it cannot be made so; after that the log is closed for good, and with it the agent. The way of an entry:

`AuditLog.append`       takes the event, under the lock; `_Guard` closes the log if anything below fails
`LogMachine.append`     makes the line and its leaf in the tree (machine.py)
`DurableFolder.append`  writes the line to the segment file and syncs it: here it is made durable (store.py)
`AuditLog.checkpoint`   signs everything so far; several entries may share a checkpoint

A new kind of event is a class in events.py; nothing changes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any

from lazaret.errors import AuditLogError, LocalProtocolError, RollbackDetected, ToolkitError, VerificationFailed
from security.clock import Clock
from security.log.events import ConfigChanged, Cosigned, ManifestAdopted, PolicyChanged
from security.log.keys import EPOCH_MS, Endorsement, EpochChain, EpochKeys, endorse
from security.log.machine import (
    HEARTBEAT_MS,
    SKEW_MS,
    AnnexErased,
    KeyRotated,
    LogEntry,
    LogMachine,
    Moment,
    Scope,
    State,
)
from security.log.note import MAX_SIGNATURES, Note, NoteSigner, Signature, VerifierKey, checkpoint_of
from security.log.roster import Roster
from security.log.schema import Event
from security.log.store import SALT_SIZE, Annex, DurableFolder
from security.log.witness import HeldCheckpoint, Submission
from security.rng import Randomness


@lru_cache(maxsize=64)
def _scope(run: str | None, round: int | None, actor: str, commitment: str | None) -> Scope:
    """Most entries of a round share their scope; checking it once is enough."""
    return Scope(run=run, round=round, actor=actor, annex_commit=commitment)


class _Guard:
    """One at a time; and any failure to write closes the log for good: what is not logged must not be sent."""

    __slots__ = ("_folder", "_machine", "_mutex", "_what")

    def __init__(self, mutex: RLock, machine: LogMachine, what: str, folder: Path) -> None:
        self._mutex, self._machine, self._what, self._folder = mutex, machine, what, folder

    def __enter__(self) -> None:
        self._mutex.acquire()
        if self._machine.state is State.FAILED:
            self._mutex.release()
            raise self._machine.fail("the privacy log has failed")

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if isinstance(error, OSError):
                reason = (error.strerror or "the disk refused").lower()
                raise self._machine.fail(f"cannot {self._what} in {self._folder}: {reason}") from error
        finally:
            self._mutex.release()


class AuditLog:
    """One party's log, open for writing. Make it with `create` or `open`; safe to use from several threads."""

    def __init__(
        self,
        *,
        machine: LogMachine,
        writer: DurableFolder,
        keys: EpochKeys,
        signer: NoteSigner,
        roster: Roster,
        clock: Clock,
        rng: Randomness,
        newest: Note | None = None,
        ml_dsa: Callable[[], NoteSigner] | None = None,
    ) -> None:
        self._machine = machine
        self._writer = writer
        self._keys = keys
        self._signer = signer
        self._roster = roster
        self._clock = clock
        self._rng = rng
        self._newest = newest
        self._ml_dsa = ml_dsa
        self._leaves = machine.size  # how many are in leaves.bin
        self._sealed_ms = clock.mono_ms()
        self.witnessed = 0  # size of the newest checkpoint that got a quorum since this start
        self._cosigners: tuple[int, frozenset[VerifierKey]] = (0, frozenset())  # who has signed a checkpoint of a size
        self._boot = rng.bytes(16).hex()
        self._mutex = RLock()

    def settle_epoch(self, chain: EpochChain) -> None:
        """Finish or forget a rotation that a crash cut short."""
        epoch = self._machine.epoch
        if epoch >= len(chain.keys) or chain.keys[epoch] != self._signer.key:
            raise AuditLogError("the epoch key is not the one endorsed", where=self.origin)
        boundary = self._newest is None or checkpoint_of(self._newest).size < self.size
        if boundary and epoch and epoch - 1 in self._keys.held():
            # The rotation is in the log but its checkpoint is not: both keys are still here, so sign as rotation would.
            self._publish_checkpoint(self._keys.load(epoch - 1), self._signer)
        self._keys.settle(epoch)
        for stale in range(epoch + 1, len(chain.keys)):
            (self._writer.epochs / f"{stale}.note").unlink()

    @property
    def origin(self) -> str:
        """The log's name."""
        return self._machine.origin

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._writer.path

    @property
    def size(self) -> int:
        """How many entries there are."""
        return self._machine.size

    @property
    def epoch(self) -> int:
        """The epoch in force."""
        return self._machine.epoch

    @property
    def newest_checkpoint(self) -> Note:
        """The newest signed checkpoint: what every message carries."""
        if self._newest is None:
            raise LocalProtocolError("the log has no head yet", where=self.origin)
        return self._newest

    def _now(self) -> Moment:
        return Moment(wall_ms=self._clock.now_ms(), mono_ms=self._clock.mono_ms(), boot=self._boot)

    def _guard(self, what: str) -> _Guard:
        return _Guard(self._mutex, self._machine, what, self.folder)

    def append(
        self,
        event: Event,
        *,
        run: str | None = None,
        round: int | None = None,
        actor: str = "agent",
        annex: Mapping[str, Any] | None = None,
    ) -> int:
        """Log an event; returns its entry number when it is on stable storage."""
        with self._guard("write an entry"):
            sealed = None if annex is None else Annex(salt=self._rng.bytes(SALT_SIZE), details=annex)
            commitment = sealed.commitment() if sealed else None
            scope = _scope(run, round, actor, commitment)
            entries = self._machine.append(event, self._now(), scope)
            if sealed is not None:
                # Before the entry: a commitment whose opening was lost in a crash would look like an erasure.
                self._writer.disk.publish(self._writer.annex_path(entries[-1].seq), sealed.encode(), mode=0o600)
            return self._write(entries)

    def _write(self, entries: tuple[LogEntry, ...]) -> int:
        self._writer.append(entries)
        return entries[-1].seq

    def checkpoint(self) -> Note:
        """Sign everything so far. Where nothing is new, the newest one is given again."""
        with self._guard("write a head"):
            if self._newest is not None and checkpoint_of(self._newest).size == self.size:
                return self._newest
            return self._publish_checkpoint(self._signer)

    def _publish_checkpoint(self, *signers: NoteSigner) -> Note:
        note = self._machine.checkpoint(*signers, *self._beside())
        # First the leaves: whoever verifies this log meanwhile finds no checkpoint without them.
        self._writer.write_leaves([self._machine.tree.leaf(seq) for seq in range(self._leaves, self.size)])
        self._leaves = self.size
        self._writer.disk.publish(self._writer.checkpoint_path(self.size), note.encode())
        self._newest, self._sealed_ms = note, self._clock.mono_ms()
        return note

    def _beside(self) -> tuple[NoteSigner, ...]:
        """The key that signs every head too, where the manifest lists one. It is of no epoch, and stays."""
        party = self._roster.by_origin.get(self.origin)
        if party is None or party.ml_dsa is None:
            return ()
        signer = self._ml_dsa() if self._ml_dsa is not None else None
        if signer is None or signer.key != party.ml_dsa:
            raise self._machine.fail("the manifest lists another ML-DSA key for this log than the one in its folder")
        return (signer,)

    def rotate(self, reason: str) -> Note:
        """Begin the next epoch: new key, entry, checkpoint signed by both keys, old key erased. Survives any crash."""
        with self._guard("rotate the log key"):
            # The order of section 5: heartbeat, new key on disk, endorsement, entry, checkpoint by both keys, old key
            # erased. After each of them a crash leaves what `settle_epoch` can finish or forget.
            old, epoch = self._signer, self.epoch + 1
            self._write(self._machine.heartbeat(self._now()))
            if epoch in self._keys.held():
                self._keys.erase(epoch)
            new = self._keys.create(epoch)
            endorsement = endorse(old, Endorsement(origin=self.origin, epoch=epoch, key=new.key))
            self._writer.disk.publish(self._writer.epochs / f"{epoch}.note", endorsement.encode())
            rotated = KeyRotated(epoch=epoch, old_vkey=str(old.key), new_vkey=str(new.key), reason=reason)
            self._write(self._machine.append(rotated, self._now()))
            note = self._publish_checkpoint(old, new)
            self._signer = new
            self._keys.erase(epoch - 1)
            return note

    def tick(self) -> None:
        """To be called every minute or so: heartbeat when silent for long, rotation when the epoch is over.

        A party that is never silent, as one that dials again and again, has no heartbeat: it signs what it has said.
        """
        with self._guard("write a heartbeat"):
            if self._machine.epoch_running_ms >= EPOCH_MS:
                self.rotate("epoch over")
            elif self._machine.heartbeat_due(self._now()):
                self._write(self._machine.heartbeat(self._now()))
                self.checkpoint()
            elif self._head_due():
                self.checkpoint()

    def _head_due(self) -> bool:
        return self._clock.mono_ms() - self._sealed_ms >= HEARTBEAT_MS

    def submission(self, old_size: int, note: Note | None = None) -> Submission:
        """What a witness that holds `old_size` of this log needs to cosign a checkpoint (by default the newest)."""
        with self._mutex:
            offered = note or self.newest_checkpoint
            path = self._machine.tree.consistency_path(old_size, checkpoint_of(offered).size)
            endorsements = tuple(self._writer.endorsements())
            return Submission(old_size=old_size, path=path, note=offered, endorsements=endorsements)

    def inclusion_path(self, seq: int, size: int) -> tuple[bytes, ...]:
        """Proof that an entry is under a checkpoint."""
        with self._mutex:
            return self._machine.tree.inclusion_path(seq, size)

    def add_cosignature(self, size: int, cosignature: Signature) -> None:
        """Keep a witness's signature on one of our checkpoints, and log it.

        :raises VerificationFailed: if it is not a witness of ours, or not over that checkpoint.
        """
        with self._guard("keep a cosignature"):
            note = self._own_checkpoint(size)
            keys = {(key.name, key.id): key for key in self._roster.cosigners_for(self.origin)}
            key = keys.get((cosignature.name, cosignature.key_id))
            if key is None:
                raise VerificationFailed("not a witness of this log", where=self.origin)
            # Before anything is kept: C2SP asks to ignore unknown signers, but a bad signature of a known one would
            # spoil the note.
            timestamp = key.verify(note.text, cosignature.value)
            self._check_time_of(key.name, timestamp or 0)
            others = tuple(line for line in note.signatures if (line.name, line.key_id) != (key.name, key.id))
            if len(others) == MAX_SIGNATURES:
                return  # a note has room for no more; a quorum is far fewer
            merged = Note(text=note.text, signatures=(*others, cosignature))
            self._writer.disk.publish(self._writer.checkpoint_path(size), merged.encode())
            self._keep_if_quorum(merged, size, self._cosigned_by(key, merged, size, keys.values()))
            if self._newest is not None and checkpoint_of(self._newest).size == size:
                self._newest = merged
            if self._machine.state is State.OPEN:
                root = checkpoint_of(note).root.hex()
                self.append(
                    Cosigned(origin=self.origin, size=size, root=root, cosigner=key.name, timestamp=timestamp or 0)
                )

    def _check_time_of(self, witness: str, seconds: int) -> None:
        """A cosignature is kept when it is made, so that its time is about ours. One of a machine with another clock
        would make this log look backdated, or contradict the times of everything that is logged until then."""
        apart = abs(seconds * 1000 - self._clock.now_ms())
        if apart > SKEW_MS:
            raise VerificationFailed(
                f"the clock of a witness differs from this machine's by {apart // 1000} s; its signature is not kept",
                where=witness,
                hint="one of the two is wrong: keep both correct with NTP",
            )

    def _own_checkpoint(self, size: int) -> Note:
        try:
            return self._writer.checkpoint_note(size)
        except FileNotFoundError:
            # What others say must not look like a fault of our disk, which would close the log.
            raise VerificationFailed("there is no head of this size", where=self.origin) from None

    def _cosigned_by(
        self, key: VerifierKey, note: Note, size: int, keys: Iterable[VerifierKey]
    ) -> frozenset[VerifierKey]:
        """Who has signed it, `key` included. Each signature is verified once: with a hundred sites, verifying all of
        them again for each that comes would take longer than everything else about them.
        """
        known, cosigners = self._cosigners
        cosigners = cosigners | {key} if known == size else frozenset(note.verify(keys))
        self._cosigners = (size, cosigners)
        return cosigners

    def _keep_if_quorum(self, note: Note, size: int, cosigners: Iterable[VerifierKey]) -> None:
        if self._roster.missing_for_quorum(self.origin, cosigners):
            return
        self.witnessed = max(self.witnessed, size)
        kept = self._writer.cosigned
        if not kept.exists() or checkpoint_of(Note.parse(kept.read_bytes())).size <= size:
            self._writer.disk.publish(kept, note.encode())

    def refuse_rollback(self, held_elsewhere: Iterable[HeldCheckpoint]) -> None:
        """Compare with the checkpoints that others hold of this log, before anything is sent.

        :raises RollbackDetected: if one is larger than this log, or is of another history.
        """
        with self._mutex:
            for held in held_elsewhere:
                try:
                    held.verify(self._roster.by_origin[self.origin].root, self.origin)
                except ToolkitError:
                    continue  # A checkpoint that our keys did not sign proves nothing about our log.
                theirs = held.checkpoint
                if theirs.size > self.size or self._machine.tree.root(theirs.size) != theirs.root:
                    self._machine.fail("this log was restored from an old copy")
                    raise RollbackDetected(
                        f"others hold a head of size {theirs.size} that this log does not lead to (it has {self.size})",
                        where=self.origin,
                        hint="this folder was restored from an old copy or changed: stop, keep it, and enrol again",
                    )

    def adopt_manifest(self, data: bytes, version: int, roster: Roster) -> None:
        """Take over a newer signed manifest, which the caller has checked: keep it, log it, then replace the copy.

        In this order a crash leaves at most a file that no entry names; the next start adopts it again.
        """
        with self._guard("adopt a manifest"):
            self._writer.keep_manifest(data)
            old, new = self._machine.settings["manifest"], sha256(data).hexdigest()
            if new != old:
                self.append(ManifestAdopted(version=version, old=old, new=new))
            self._writer.disk.publish(self._writer.manifest, data)
            self._roster = roster

    def note_settings(self, *, config: str, policy: str | None = None, who: str) -> None:
        """Say so, where configuration or policy are not those of the last start. Digests only: they tell no contents.

        :param who: the account that starts with them; who edited a file, a process cannot know.
        """
        with self._guard("write an entry"):
            old, reason = self._machine.settings, "found changed at start"
            if policy is not None and old.get("policy", policy) != policy:
                self.append(PolicyChanged(old=old["policy"], new=policy, who=who, reason=reason, document=None))
            if old.get("config", config) != config:
                self.append(ConfigChanged(old=old["config"], new=config, who=who, reason=reason))

    def erase_annex(self, first: int, last: int, authority: str) -> None:
        """Delete the annexes of a range of entries; the log says so first."""
        with self._guard("erase an annex"):
            self.append(AnnexErased(first=first, last=last, authority=authority), actor=authority)
            self._writer.erase_annexes(first, last)

    def close(self, last_entry: Callable[[AuditLog], object] | None = None) -> None:
        """Seal what is there and give the folder back."""
        with self._mutex:
            try:
                if self._machine.state is not State.FAILED:
                    if last_entry is not None:
                        last_entry(self)
                    self.checkpoint()
            finally:
                self._writer.close()
