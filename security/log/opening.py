"""How a log begins, and how it goes on: what a start finds in its folder, and what it writes first.

The folder holds a sound log, a torn write beyond the newest checkpoint, or damage. A torn write is set aside and
logged. Damage at or below the newest checkpoint stops the party: it is no torn write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from lazaret import software
from lazaret.errors import AuditLogError, CodecError, LocalProtocolError, VerificationFailed
from security.clock import Clock
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.pki import Subject
from security.log.events import AgentStart, SoftwareDiffers
from security.log.keys import Endorsement, EpochChain, EpochKeys, endorse
from security.log.machine import SEGMENT, AnnexErased, LogGenesis, LogMachine, LogRecovered
from security.log.note import Note, NoteSigner, checkpoint_of
from security.log.reader import LineBlock, LogReader, blocks
from security.log.roster import Party, Roster
from security.log.schema import MAX_TEXTS, Event, read_line
from security.log.store import Disk, DurableFolder, read_leaves
from security.log.writer import AuditLog
from security.rng import Randomness


def create_log(
    folder: Path,
    key_folder: Path,
    *,
    party: Party,
    roster: Roster,
    manifest: bytes,
    policy: str,
    root: NoteSigner,
    clock: Clock,
    rng: Randomness,
    disk: Disk | None = None,
    ml_dsa: Callable[[], NoteSigner] | None = None,
) -> AuditLog:
    """Start a log: the root key endorses epoch 0, the genesis entry names all keys, a checkpoint is signed.

    :param ml_dsa: loads the key that signs heads too, where the manifest lists one; `continue_log` has the same.
    """
    if root.key != party.root:
        raise LocalProtocolError("the root key is not the one in the roster", where=party.origin)
    writer = DurableFolder(folder, disk or Disk())
    try:
        if writer.format.exists():
            raise AuditLogError(
                "a log is here already", where=str(folder), hint="open it, or choose another folder"
            )
        keys = EpochKeys(key_folder, party.origin, rng)
        keys.erase(0)
        signer = keys.create(0)
        writer.initialise(manifest)
        first = endorse(root, Endorsement(origin=party.origin, epoch=0, key=signer.key))
        writer.disk.publish(writer.epochs / "0.note", first.encode())
        machine = LogMachine(party.origin)
        log = AuditLog(
            machine=machine,
            writer=writer,
            keys=keys,
            signer=signer,
            roster=roster,
            clock=clock,
            rng=rng,
            ml_dsa=ml_dsa,
        )
        log.append(
            LogGenesis(
                format=1,
                role=party.role,
                root_vkey=str(party.root),
                epoch_vkey=str(signer.key),
                cosigner_vkey=str(party.cosigner),
                manifest=sha256(manifest).hexdigest(),
                policy=policy,
            )
        )
        log.checkpoint()
        writer.declare()
    except BaseException:
        writer.close()
        raise
    return log


def open_own_log(
    folder: Path,
    identity: Identity,
    subject: Subject,
    manifest: Manifest,
    *,
    roster: Roster,
    policy: str,
    clock: Clock,
    rng: Randomness,
) -> tuple[AuditLog, bytes | None]:
    """The log of a party that starts: begun, or gone on with, under the manifest in its identity folder.

    :param policy: digest of the party's own rules, for the first entry.
    :returns: the log, and the manifest that it knew before; None for a log that begins here.
    """
    data = identity.manifest_path.read_bytes()
    if (folder / "FORMAT").exists():
        log = continue_own_log(folder, identity, subject.member, roster=roster, clock=clock, rng=rng)
        known = (folder / "manifest.json").read_bytes()
        if known != data:
            log.adopt_manifest(data, manifest.version, roster)
        return log, known
    party = roster.by_name[subject.member]
    log = create_log(
        folder,
        _epoch_keys(identity),
        party=party,
        roster=roster,
        manifest=data,
        policy=policy,
        root=identity.audit_root(subject),
        clock=clock,
        rng=rng,
        ml_dsa=partial(identity.log_ml_dsa, party.origin),
    )
    return log, None


def continue_own_log(
    folder: Path, identity: Identity, member: str, *, roster: Roster, clock: Clock, rng: Randomness
) -> AuditLog:
    """The log that this member has begun, with the keys in its identity folder."""
    party = roster.by_name[member]
    return continue_log(
        folder,
        _epoch_keys(identity),
        party=party,
        roster=roster,
        clock=clock,
        rng=rng,
        ml_dsa=partial(identity.log_ml_dsa, party.origin),
    )


def _epoch_keys(identity: Identity) -> Path:
    return identity.folder / "keys" / "epochs"


def continue_log(
    folder: Path,
    key_folder: Path,
    *,
    party: Party,
    roster: Roster,
    clock: Clock,
    rng: Randomness,
    disk: Disk | None = None,
    ml_dsa: Callable[[], NoteSigner] | None = None,
) -> AuditLog:
    """Go on with a log: check it against its checkpoints, set a torn write aside, settle the keys after a crash."""
    writer = DurableFolder(folder, disk or Disk())
    try:
        writer.check_format()
        writer.tidy()
        found = recover(writer, party)
        keys = EpochKeys(key_folder, party.origin, rng)
        log = AuditLog(
            machine=found.machine,
            writer=writer,
            keys=keys,
            signer=keys.load(found.machine.epoch),
            roster=roster,
            clock=clock,
            rng=rng,
            newest=found.newest,
            ml_dsa=ml_dsa,
        )
        log.settle_epoch(found.chain)
        if found.torn:
            log.append(LogRecovered(quarantined=sha256(found.torn).hexdigest(), bytes=len(found.torn)))
            log.checkpoint()
    except BaseException:
        writer.close()
        raise
    return log


# What is in the folder.


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A machine that has taken every entry, the newest checkpoint, the epoch keys, and the bytes set aside."""

    machine: LogMachine
    newest: Note | None
    chain: EpochChain
    torn: bytes


def recover(writer: DurableFolder, party: Party) -> Recovered:
    """Read the log back.

    :raises AuditLogError: if anything at or below the newest checkpoint is missing or changed.
    """
    try:
        chain = EpochChain.verify(party.origin, party.root, writer.endorsements())
        newest = _newest_checkpoint(writer, chain)
    except (VerificationFailed, CodecError) as error:
        raise AuditLogError(f"the log's heads do not verify: {error.message}", where=party.origin) from error
    signed = checkpoint_of(newest) if newest is not None else None
    machine = LogMachine(party.origin)
    torn = _replay(writer, machine, signed.size if signed else 0)
    # Section 7: all entries up to the newest checkpoint are here and give its root. Others may hold that checkpoint.
    if signed is not None and (machine.size < signed.size or machine.tree.root(signed.size) != signed.root):
        raise AuditLogError(
            f"the entries do not lead to the signed head of size {signed.size}",
            where=party.origin,
            hint="the log was changed or cut; keep the folder as it is and run `privacy-audit verify` on a copy",
        )
    _settle_leaves(writer, machine)
    return Recovered(machine=machine, newest=newest, chain=chain, torn=torn)


def _newest_checkpoint(writer: DurableFolder, chain: EpochChain) -> Note | None:
    sizes = writer.checkpoint_sizes()
    if not sizes:
        return None
    note = writer.checkpoint_note(sizes[-1])
    note.verify(chain.keys)
    if checkpoint_of(note).size != sizes[-1] or checkpoint_of(note).origin != chain.origin:
        raise VerificationFailed("a head is under another's name")
    return note


def _replay(writer: DurableFolder, machine: LogMachine, signed_size: int) -> bytes:
    """Feed every entry to the machine; returns the bytes of a torn write, after they were set aside."""
    files = LogReader(writer.path).segments()
    for number, path in enumerate(files):
        for block in blocks(path):
            whole = _replay_block(block, machine, writer)
            if whole is None:
                continue
            # Only what no checkpoint covers, in the last segment, can be a write that a crash cut short.
            if machine.size < signed_size or number != len(files) - 1:
                raise AuditLogError(
                    f"entry {machine.size} is damaged although it was signed",
                    where=str(path),
                    hint="this is no torn write; keep the folder as it is and run `privacy-audit verify` on a copy",
                )
            return _set_aside(writer, number, whole, machine.size)
        if number != len(files) - 1 and machine.size != (number + 1) * SEGMENT:
            raise AuditLogError("a segment is not full although another follows", where=str(path))
    return b""


def _replay_block(block: LineBlock, machine: LogMachine, writer: DurableFolder) -> int | None:
    """Take the lines that continue the log; where one does not, the offset at which it begins."""
    offset = block.offset
    for line in block.lines:
        if block.torn or not _is_next(line, machine):
            return offset
        entry = machine.replay(line)
        if entry["type"] == AnnexErased.type:
            # A crash may have come between the entry and the last of the files.
            writer.erase_annexes(entry["body"]["first"], min(entry["body"]["last"], entry["seq"]))
        offset += len(line) + 1
    return None


def _set_aside(writer: DurableFolder, number: int, length: int, size: int) -> bytes:
    """Keep what follows the last whole entry as evidence, then cut it off."""
    torn = writer.segment(number).read_bytes()[length:]
    writer.evidence.mkdir(exist_ok=True)
    writer.disk.publish(writer.evidence / f"torn-{size}-{sha256(torn).hexdigest()[:16]}.bin", torn)
    writer.truncate_segment(number, length)
    return torn


def _is_next(line: bytes, machine: LogMachine) -> bool:
    """Whether a line is a whole, canonical entry that continues the log."""
    try:
        entry = read_line(line)
    except CodecError:
        return False
    return bool(
        entry["seq"] == machine.size and entry["origin"] == machine.origin and entry["epoch"] == machine.epoch
    )


def _settle_leaves(writer: DurableFolder, machine: LogMachine) -> None:
    """leaves.bin is derived and not synced, so it may lag behind or be torn after a crash: rebuild it if it differs."""
    ours = [machine.tree.leaf(index) for index in range(machine.size)]
    try:
        if read_leaves(writer.leaves) == ours:
            return
    except (FileNotFoundError, CodecError):
        pass
    writer.write_leaves(ours, anew=True)


def start_entries(*, config: str, proto: str) -> tuple[Event, ...]:
    """`agent.start`, and a warning where the environment is not the one that its bill of materials lists.

    :param config: SHA-256 of the configuration in force. `proto` likewise, of the wire schema.
    """
    started = AgentStart(
        version=software.version(),
        package=software.package_digest(),
        dependencies=software.dependencies_digest(),
        sbom=software.sbom_digest(),
        proto=proto,
        image=software.image_digest(),
        config=config,
        insecure=(),
    )
    differences = software.differences()
    if not differences:
        return (started,)
    return started, SoftwareDiffers(count=len(differences), packages=differences[:MAX_TEXTS])
