"""Entries of a live log to a log collector: RFC 5424 syslog over TLS (RFC 5425), as a process of its own.

The party need not stop: this follows its folder and only reads. Syslog has no acknowledgements. So entries are sent in
batches, each on a connection of its own, and a batch counts as taken when the collector has answered the orderly end
of the TLS stream (`close_notify`): it has then read everything before.

No protocol delivers exactly once to a receiver that keeps no list: a forwarder that is killed after a batch was taken,
and before it could note that, cannot know. So the position is written twice: which batch begins, before its first byte;
and that it was taken. What is sent again after a batch that began and was not noted has the mark `again`. Nothing is
lost, no entry without the mark is sent twice, and origin and number are in every message: a collector that keeps
these two unique has each entry exactly once.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from lazaret import files
from lazaret.errors import AuditLogError, CannotDecide, CodecError, ConfigError, RollbackDetected
from security.audit import text
from security.audit.cli import FILE, TARGET, finish, one_log
from security.audit.findings import Findings, exit_code
from security.audit.safe_files import read_capped, refuse_hostile
from security.audit.text import LAST_SECOND
from security.audit.verify import origin_of
from security.crypto import encoding
from security.crypto.merkle import leaf_hash
from security.log.reader import LogFollower, LogReader
from security.log.schema import read_line

# RFC 5612 reserves this number for examples. An organisation with a number of its own names it in its collector.
STRUCTURED: Final = "lazaret@32473"
FACILITY: Final = 13  # log audit
INFORMATIONAL, WARNING = 6, 4
ALARMING: Final = frozenset({"egress.blocked", "log.recovered", "clock.adjusted"})
MOST_ENTRIES: Final = 500
MOST_BYTES: Final = 1 << 20
SECONDS: Final = 30.0
ATTEMPTS: Final = 3
POSITION_BYTES: Final = 4096
AGAIN: Final = ' again="1"'

_collected = re.compile(
    rf'\[{STRUCTURED} origin="([^"]+)" seq="([0-9]{{1,15}})" leaf="([0-9a-f]{{64}})"( again="1")?\] (.*)'
)


def message(line: bytes, entry: dict[str, Any], *, again: bool = False) -> bytes:
    """One entry as a syslog message: its line unchanged after the header, so that anybody can hash it again.

    :param again: the collector may have it already.
    """
    # RFC 5424, section 6.2.3: "-" where there is no time. An entry may state one that no calendar has.
    when = "-"
    if entry["ts"] < 1000 * LAST_SECOND:
        when = datetime.fromtimestamp(entry["ts"] / 1000, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    severity = WARNING if entry["type"] in ALARMING else INFORMATIONAL
    host = entry["origin"].removesuffix("/audit")
    data = (
        f'[{STRUCTURED} origin="{entry["origin"]}" seq="{entry["seq"]}" leaf="{leaf_hash(line).hex()}"{AGAIN * again}]'
    )
    return f"<{8 * FACILITY + severity}>1 {when} {host} lazaret - {entry['type']} {data} ".encode() + line


def frame(text: bytes) -> bytes:
    """RFC 5425, section 4.3: the length, a space, the message."""
    return b"%d %s" % (len(text), text)


# The position


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a log was sent: so many entries, and the leaf of the last one, so that another log is noticed.

    :ivar begun: the end of a batch that has begun; `size` if there is none.
    """

    origin: str
    size: int
    leaf: str
    begun: int

    def encode(self) -> bytes:
        values = {"begun": self.begun, "leaf": self.leaf, "origin": self.origin, "size": self.size}
        return encoding.dumps(values) + b"\n"

    @classmethod
    def read(cls, path: Path) -> Position | None:
        """What an earlier run wrote; None if there was none.

        :raises ConfigError: if it is something else. Beginning again would send everything twice.
        """
        try:
            value = encoding.loads(read_capped(path, POSITION_BYTES).removesuffix(b"\n"))
            size, begun = int(value["size"]), int(value["begun"])
            return cls(origin=str(value["origin"]), size=size, leaf=str(value["leaf"]), begun=begun)
        except FileNotFoundError:
            return None
        except (CodecError, KeyError, TypeError, ValueError) as error:
            hint = "move it away to send the whole log again"
            raise ConfigError("not a position of this command", where=str(path), hint=hint) from error


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Two forwarders with one position would send entries twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError("another forwarder uses this position", where=str(path)) from error
    finally:
        os.close(descriptor)


# The collector


class TlsCollector:
    """Where to send to. The collector's certificate must be for `name` and from a root in `context`.

    :param lenient: take the end of the TCP connection for an answer. Some collectors send no `close_notify`; but that
        end anybody on the way can forge, and entries would then be missing there.
    """

    def __init__(self, host: str, port: int, name: str, context: ssl.SSLContext, *, lenient: bool = False) -> None:
        self._host, self._port, self._name, self._context, self._lenient = host, port, name, context, lenient
        self._unanswered = 0

    def deliver(self, data: bytes, begin: Callable[[], None]) -> None:
        """Send, end the stream, and wait until the collector has read its end.

        :param begin: called before the first byte.
        :raises CannotDecide: if that is not certain; the caller sends the same again later.
        :raises ConfigError: if it never answers, so that the same would be sent again and again.
        """
        where = f"{self._host}:{self._port}"
        try:
            with (
                socket.create_connection((self._host, self._port), SECONDS) as plain,
                self._context.wrap_socket(plain, server_hostname=self._name) as stream,
            ):
                begin()
                stream.sendall(data)
                self._end(stream, where)
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror or str(error)
            raise CannotDecide(
                f"the collector has not taken the entries: {reason}",
                where=where,
                hint="check address, --ca, --name and the collector's own log; what was not taken is sent again",
            ) from error
        self._unanswered = 0

    def _end(self, stream: ssl.SSLSocket, where: str) -> None:
        try:
            stream.unwrap()
        except ssl.SSLEOFError:
            if self._lenient:
                return
            self._unanswered += 1
            if self._unanswered < ATTEMPTS:
                raise
            raise ConfigError(
                "the collector ends streams without close_notify, so that nobody knows what it has read",
                where=where,
                hint="rsyslog: use the driver ossl instead of gtls; or --lenient, if the network cannot forge packets",
            ) from None


def tls_context(ca: Path, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """TLS 1.2 or newer (RFC 5425), with a certificate of ours where the collector asks for one."""
    try:
        context = ssl.create_default_context(cafile=str(ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("a certificate or key cannot be read", where=str(ca)) from error
    return context


# Following


class Forwarder:
    """Sends what a log has beyond a position, batch by batch.

    :param deliver: takes frames, calls its second argument before it sends the first byte, and returns when the
        collector has them all.
    """

    def __init__(self, log: Path, state: Path, deliver: Callable[[bytes, Callable[[], None]], None]) -> None:
        refuse_hostile(log)
        self._log = log
        self._state = state
        self._deliver = deliver
        self._follower = LogFollower(log)
        self._lines = self._follower.new_lines()
        self._position = Position.read(state)
        self._waiting: list[tuple[int, bytes]] = []
        self._checked = self.size == 0

    @property
    def size(self) -> int:
        """How many entries the collector has."""
        return self._position.size if self._position else 0

    def step(self) -> int:
        """Send one batch of what is new; returns how many entries were taken. What is not taken waits."""
        self._read()
        if not self._checked:
            raise RollbackDetected(
                f"{self.size} entries were sent, and {self._follower.size} are here",
                where=str(self._log),
                hint="the log was restored from an old copy, or is another one: keep it and run `privacy-audit verify`",
            )
        batch, size = [], 0
        for at, line in self._waiting[:MOST_ENTRIES]:
            entry = _entry(line, f"{self._log} entry {at}")
            batch.append((entry, line, frame(message(line, entry, again=at < self._begun))))
            size += len(batch[-1][2])
            if size > MOST_BYTES:
                break
        if not batch:
            return 0
        last, line, _ = batch[-1]
        if self._position is not None and last["origin"] != self._position.origin:
            raise ConfigError(f"the position is of {self._position.origin}", where=str(self._state))
        upto, leaf = last["seq"] + 1, self._position.leaf if self._position else ""
        begun = max(self._begun, upto)
        begins = Position(origin=last["origin"], size=self.size, leaf=leaf, begun=begun)
        self._deliver(b"".join(framed for _, _, framed in batch), lambda: self._note(begins))
        self._note(Position(origin=last["origin"], size=upto, leaf=leaf_hash(line).hex(), begun=begun))
        del self._waiting[: len(batch)]
        return len(batch)

    @property
    def _begun(self) -> int:
        """Entries before this one may have been sent before."""
        return self._position.begun if self._position else 0

    def _note(self, position: Position) -> None:
        files.write_atomically(self._state, position.encode(), mode=0o600)
        self._position = position

    def _read(self) -> None:
        """Enough for a batch, and no more: a log that is sent for the first time may have a million entries."""
        while len(self._waiting) < MOST_ENTRIES:
            found = next(self._lines, None)
            if found is None:
                self._lines = self._follower.new_lines()
                return
            if self._is_new(*found):
                self._waiting.append(found)

    def _is_new(self, at: int, line: bytes) -> bool:
        if self._position is not None and at == self._position.size - 1:
            self._checked = leaf_hash(line).hex() == self._position.leaf
        return at >= self.size


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        return read_line(line)
    except CodecError as error:
        hint = "nothing was sent from here on; keep the folder and run `privacy-audit verify`"
        raise AuditLogError(f"a line is no entry: {error.message}", where=where, hint=hint) from error


def follow(forwarder: Forwarder, wait: Callable[[float], bool], tell: Callable[[str], None], *, once: bool) -> None:
    """Send until told to stop; with `once`, until everything that is there was taken.

    :param wait: waits so many seconds; true if it is time to stop.
    """
    pause = 1.0
    while True:
        try:
            taken = forwarder.step()
        except CannotDecide as error:
            if once:
                raise
            tell(f"{error}; next attempt in {pause:.0f} s")
            taken, pause = 0, min(2 * pause, 60.0)
        else:
            pause = 1.0
            if taken:
                tell(f"{taken} entries were taken, {forwarder.size} in all")
        if not taken and (once or wait(pause)):
            return
        if taken and wait(0.0):
            return


# What a collector has, against the log


def compare(log: Path, collected: Path, findings: Findings, sent: int = 0) -> dict[str, int]:
    """Hold a collector's file against the log: every message unchanged, none missing up to the last one.

    The file has the messages as lines, with structured data (`RSYSLOG_SyslogProtocol23Format` writes them so).

    :param sent: how many entries were taken by the position, so that a file whose end was cut off is noticed.
    """
    refuse_hostile(log)
    leaves = [leaf_hash(line).hex() for _, line in LogReader(log).lines()]
    origin = findings.log
    seen: dict[int, int] = {}
    unmarked: dict[int, int] = {}  # without the mark that the collector may have it already
    with collected.open("rb") as file:
        for number, raw in enumerate(file, 1):
            match = _collected.search(raw.decode(errors="replace").rstrip("\n"))
            if match is None or match[1] != origin:
                continue
            seq, leaf = int(match[2]), match[3]
            seen[seq] = seen.get(seq, 0) + 1
            unmarked[seq] = unmarked.get(seq, 0) + (match[4] is None)
            hashed = leaf_hash(match[5].encode()).hex()
            if seq >= len(leaves) or not leaf == hashed == leaves[seq]:
                findings.add("CollectorMismatch", f"line {number}: entry {seq} is not the one in the log", seq)
    upto = max(min(max(seen, default=-1) + 1, len(leaves)), sent)
    missing = sorted(set(range(upto)) - seen.keys())
    for seq in missing:
        findings.add("CollectorMismatch", f"entry {seq} is missing, and it was taken or later ones are there", seq)
    repeated = sum(count - 1 for count in seen.values())
    twice = sum(max(0, count - 1) for count in unmarked.values())
    counts = {"entries": len(seen), "repeated": repeated, "repeated_unmarked": twice}
    return {**counts, "missing": len(missing), "log": len(leaves)}


# The command.


@click.command(short_help="Send the entries of a log to a collector.")
@one_log
@click.option("--to", metavar="HOST:PORT", help="The collector: syslog over TLS (RFC 5425), usually port 6514.")
@click.option("--ca", type=FILE, help="Root certificates that the collector's certificate must be from (PEM).")
@click.option("--name", help="The name in the collector's certificate; default: HOST.")
@click.option("--certificate", type=FILE, help="A certificate of your own, where the collector asks for one (PEM).")
@click.option("--key", type=FILE, help="Its private key (PEM).")
@click.option("--position", type=TARGET, help="Where to note how far the log was sent; never inside the log folder.")
@click.option("--once", is_flag=True, help="Send what is there and stop; default: follow the log until terminated.")
@click.option("--lenient", is_flag=True, help="Accept a closed connection as confirmation, without close_notify.")
@click.option("--compare", type=FILE, help="Send nothing; compare this file of the collector with the log.")
def forward(
    log: Path,
    to: str | None,
    ca: Path | None,
    name: str | None,
    certificate: Path | None,
    key: Path | None,
    position: Path | None,
    once: bool,
    lenient: bool,
    compare: Path | None,
) -> None:
    """Send the entries of a log to a log collector, and continue while the party writes. Reads the log only."""
    if compare is not None:
        _compare_collected(log, compare, position)
    if to is None or ca is None or position is None:
        raise ConfigError("--to, --ca and --position are needed", where="privacy-audit forward")
    host, _, port = to.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError("not HOST:PORT", where=f"--to {to}", hint="such as logs.example.org:6514")
    if position.resolve().is_relative_to(log.resolve()):
        raise ConfigError("the position cannot be inside the log folder", where=str(position))
    context = tls_context(ca, certificate, key)
    collector = TlsCollector(host.strip("[]"), int(port), name or host.strip("[]"), context, lenient=lenient)
    with only_one(position):
        forwarder = Forwarder(log, position, collector.deliver)
        follow(forwarder, _until_stopped(), lambda line: click.echo(line, err=True), once=once)
    click.echo(f"{forwarder.size} entries of {log} are at {to}")


def _until_stopped() -> Callable[[float], bool]:
    """Waits so many seconds; true when the process was asked to end. A batch under way is finished first."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    return stopped.wait


def _compare_collected(log: Path, collected: Path, position: Path | None) -> None:
    findings = Findings(origin_of(log))
    noted = Position.read(position) if position is not None else None
    counts = compare(log, collected, findings, noted.size if noted else 0)
    click.echo(
        text.plain(
            f"{findings.log}: {counts['entries']:,} of {counts['log']:,} entries are at the collector, "
            f"{counts['missing']:,} are missing in between, {counts['repeated']:,} came more than once"
        )
    )
    for line in text.finding_lines(findings.listed()):
        click.echo(line)
    finish(exit_code(findings.listed()))
