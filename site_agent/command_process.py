"""The process of a command that sees images: a child without network and keys, and a parent that waits for it.

The commands `predict`, `evaluate` and `export` begin in a process that opens no image. It reads what takes a key or the
agent's own files (`SiteRecord`), starts a child and waits. The child is isolated (`trainer.isolation`), then loads
torch and images: it opens no key file, no certificate and nothing else of the agent's. A child of its own, because the
kernel isolates threads one by one and libraries start threads when they are loaded; a child begins with one. What it
writes for the user lands in a folder made for it alone, and the parent moves it to its place: so the child needs no
right to the folder where the user wants it, which is often the one with the keys.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from lazaret.errors import ConfigError
from lazaret.process import ENDING
from lazaret.terminal import say
from security.clock import Clock, ManualClock, SystemClock
from security.identity.enrolment import Identity
from security.identity.membership import aggregation_policy
from security.identity.token import forget_pin, pin_files
from security.secagg.site.journal import Journal
from site_agent.assembly import read_membership
from site_agent.config import INITIAL, SiteConfig
from site_agent.options import OWN_PROCESS
from site_agent.state_dir import read_state
from site_agent.state_writer import read_records
from site_agent.trainer import isolation, kernel
from site_agent.trainer.isolation import (
    Isolation,
    cache_folder,
    card_files,
    data_folders,
    data_path,
    image_folders,
    made,
)
from site_agent.trainer.personal_state import LoggedRun, SiteRecord

# What every log of an agent that is running shows: the card is about the entries up to the newest checkpoint.
_RUNNING: Final = frozenset({"NoStop", "UnsealedTail"})
CALLED: Final = "the command was called from inside another program"
ARCHIVE: Final = "the hospital's archive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where the work is done: how far it is isolated, and where it writes.

    :ivar record: what was opened for it.
    :ivar target: the file or folder to write; the parent moves it to where the user wants it.
    :ivar store: a second one, of reports.
    """

    isolation: Isolation
    record: SiteRecord
    target: Path | None = None
    store: Path | None = None


def isolate(
    config: SiteConfig,
    *,
    source: Path | None = None,
    target: Path | None = None,
    store: Path | None = None,
    log: bool = False,
) -> Workplace:
    """Go on in a child that is isolated. Only the child returns; this process waits for it and ends as it did.

    :param source: what the user wants read, besides the data of `site.toml`.
    :param target: the file or folder that the user wants written, if any.
    :param store: the folder of reports that the user wants written besides.
    :param log: the work tells of the privacy log.
    :raises ConfigError: if `site.toml` requires isolation and it is not to be had.
    """
    record = open_record(config, log=log)
    if not OWN_PROCESS.get():
        missing = dict.fromkeys(isolation.MECHANISMS, CALLED)
        place = Workplace(isolation=Isolation(missing=missing), record=record, target=target, store=store)
        isolation.require(config.site.isolation, place.isolation)
    else:
        place = _in_child(config, record, source, target, store)
    if not place.isolation.complete:
        say(f"warning: {place.isolation.sentence}")
    return place


def clock_of(identity: Identity) -> Clock:
    """Today, or the last day of this site's certificate: its model stays the hospital's own when membership ends."""
    last = int(identity.tls_certificate().not_valid_after_utc.timestamp() * 1000)
    return ManualClock(wall=min(SystemClock().now_ms(), last))


def open_record(config: SiteConfig, *, log: bool = False) -> SiteRecord:
    """Read certificates, manifest, data key and the newest shared model. The sealing key is not needed, nor any that
    signs."""
    identity = Identity(folder=config.identity)
    clock = clock_of(identity)
    site, manifest = read_membership(identity, clock)
    policy = aggregation_policy(manifest, now_ms=clock.now_ms())
    folder, wal = config.state / "states", config.state / "wal"
    journal = Journal.replay(read_records(wal))
    head = journal.head(policy)
    state = None if journal.last is None else read_state(folder, policy.layout, head.state_hash)
    return SiteRecord(
        site=site,
        manifest=manifest,
        data_key=identity.data_key(),
        round=head.round,
        state=state,
        log=_logged_run(config.state / "log", manifest.run) if log else None,
    )


def _logged_run(log: Path, run: str) -> LoggedRun:
    """:raises ConfigError: where there is no log yet."""
    from security.audit.agreement import keys_for
    from security.audit.findings import Severity
    from security.audit.verify import verify
    from security.log.reader import LogReader

    if not log.exists():
        raise ConfigError("there is no privacy log yet", where=str(log), hint="has the agent run?")
    # The manifests in our own folder were checked when they were adopted, each against the root.
    verified = verify(log, keys_for(log, None))
    newest, witnessed = verified.checkpoints.newest, verified.checkpoints.witnessed
    if newest is None:
        raise ConfigError("the privacy log has no signed checkpoint", where=str(log))
    findings = [one for one in verified.findings if one.severity is not Severity.NOTE and one.code not in _RUNNING]
    size = newest.checkpoint.size
    return LoggedRun(
        origin=verified.origin,
        size=size,
        root=newest.checkpoint.root.hex(),
        witnessed=witnessed.checkpoint.size if witnessed else 0,
        findings=tuple(f"{one.code}: {one.detail}" for one in findings),
        records=tuple(record for record in LogReader(log).records() if record.seq < size and record.run in (run, None)),
    )


# What the work reads and writes.


def _readable(config: SiteConfig, source: Path | None) -> list[Path]:
    found = [config.initial_model, config.state / INITIAL, config.plugins, config.state / "memory", config.sides]
    found += data_folders(config.data.source)
    found += image_folders(source) if source is not None else ()
    return [path for path in found if path.exists()]


def _writable(config: SiteConfig) -> list[Path]:
    """Made now where they are missing: the child may write in them, not beside them."""
    made(config.state / "memory")
    return made(config.state / "models", *([cache_folder()] if data_path(config.data.source) is not None else ()))


# The child, and waiting for it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Made for the child alone: one for temporary files, one beside each target for what it writes.

    :ivar staged: by target, where the child writes it; a target that exists already is left to the child to refuse.
    """

    scratch: Path
    staged: Mapping[Path, Path]

    @classmethod
    def make(cls, targets: Iterable[Path] = ()) -> Folders:
        staged = {}
        for target in targets:
            wanted = target.absolute()
            beside = next(folder for folder in wanted.parents if folder.is_dir())
            fresh = not target.exists()
            folder = tempfile.mkdtemp(prefix=f".{wanted.name}.", suffix=".new", dir=beside) if fresh else wanted.parent
            staged[target] = Path(folder) / wanted.name
        return cls(scratch=Path(tempfile.mkdtemp(prefix="lazaret-")), staged=staged)

    @property
    def writable(self) -> list[Path]:
        return [self.scratch, *(self.staged[target].parent for target in self._moved)]

    @property
    def _moved(self) -> list[Path]:
        return [target for target, place in self.staged.items() if place != target.absolute()]

    def publish(self) -> None:
        """Move what the child has finished. It replaces nothing.

        :raises ConfigError: if somebody else has written a target meanwhile.
        """
        for target in self._moved:
            if self.staged[target].exists():
                _move(self.staged[target], target)

    def remove(self) -> None:
        for folder in self.writable:
            shutil.rmtree(folder, ignore_errors=True)


def _move(staged: Path, target: Path) -> None:
    try:
        if staged.is_dir():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.mkdir()  # claims the name: a rename onto an empty folder replaces it
            staged.rename(target)
        else:
            os.link(staged, target, follow_symlinks=False)
    except FileExistsError as error:
        raise ConfigError("refusing to overwrite what exists already", where=str(target)) from error


def _in_child(
    config: SiteConfig, record: SiteRecord, source: Path | None, target: Path | None, store: Path | None = None
) -> Workplace:
    read, write = _readable(config, source), _writable(config)
    deny = [*_federations(config), *config.secret_files]
    folders = Folders.make(path for path in (target, store) if path is not None)
    _go_on_in_child(folders)
    card = card_files(config.site.device)
    found = isolation.enter(config.site.isolation, read=read, write=[*write, *folders.writable], deny=deny, card=card)
    staged = [None if path is None else folders.staged[path] for path in (target, store)]
    return Workplace(isolation=found, record=record, target=staged[0], store=staged[1])


def _federations(config: SiteConfig) -> list[Path]:
    """What somebody could act with as this site: its keys, and the PINs of tokens that hold some."""
    return [config.identity, *(path for path in pin_files(config.identity) if path.exists())]


def isolate_from_federation(config: SiteConfig, *, read: Sequence[Path], write: Sequence[Path]) -> Isolation:
    """Go on in a child that has a network and nothing of the federation: no key, no state, no ledger.

    For commands that speak with the hospital's archive. Only the child returns.

    :raises ConfigError: if `site.toml` requires isolation and files cannot be closed.
    """
    if not OWN_PROCESS.get():
        found = Isolation(missing=dict.fromkeys(isolation.MECHANISMS, CALLED), exception=ARCHIVE)
        isolation.require(config.site.isolation, found)
        return found
    folders = Folders.make()
    deny = [*_federations(config), config.state, config.ledger.parent, config.ledger_anchor.parent]
    _go_on_in_child(folders)
    return isolation.enter(
        config.site.isolation,
        read=[path for path in read if path.exists()],
        write=[*write, *folders.writable],
        deny=[path for path in deny if path.exists()],
        exception=ARCHIVE,
    )


def _go_on_in_child(folders: Folders) -> None:
    """Only the child returns. It is alone in its process, so that the kernel can isolate it."""
    forget_pin()  # a fork copies the environment as it was at the start too
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
    parent, child = os.getpid(), os.fork()
    if child:
        _wait(child, folders, before)
    _live_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folders.scratch)


def _live_with(parent: int) -> None:
    """Nobody would wait for a child whose parent was killed."""
    with contextlib.suppress(OSError):
        kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _wait(child: int, folders: Folders, before: Iterable[signal.Signals | int]) -> NoReturn:
    """End as the child did, and leave nothing of it behind but what was asked for."""
    try:
        status = _status_of(child)
        if os.WIFEXITED(status):
            folders.publish()
    finally:
        folders.remove()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    raise SystemExit(os.waitstatus_to_exitcode(status))


def _status_of(child: int) -> int:
    while True:
        received = signal.sigwaitinfo({*ENDING, signal.SIGCHLD})
        if received.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif received.si_code <= 0:
            # Sent by a process, to us alone. One that the terminal sends has reached the child already.
            os.kill(child, received.si_signo)
