"""Isolation of the process that sees images: no network, no private keys of the federation.

`enter` asks the kernel for three mechanisms (`kernel.py`), the strongest first, and tries from inside what they stop.
What `Isolation` says is what these attempts showed, not what was asked for: a mechanism that was asked for and does not
hold is not in force.

network namespace   there is no interface and so no route; a socket can be made and reaches nothing
seccomp             the kernel refuses to make a socket of any family
Landlock            files that are not listed cannot be opened; TCP is refused; nothing is said about UDP

Two independent mechanisms stop a connection, so that a fault in one of them opens nothing. All hold for children. What
none of them stops: a file that is written where this process may write, and read there by a program that has a network.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from lazaret.errors import ConfigError
from site_agent.trainer import kernel

IsolationMode = Literal["required", "best"]
NAMESPACE, SECCOMP, LANDLOCK = "network namespace", "seccomp", "Landlock"
MECHANISMS: Final = (NAMESPACE, SECCOMP, LANDLOCK)
WHERE: Final = "site.toml [site] isolation"
HINT: Final = (
    "use Linux 5.13 or newer with user namespaces or seccomp permitted to this user and in its container; "
    'or set isolation = "best", which continues with what there is'
)
# What an interpreter, its libraries and a tensor library open while they load and compute.
SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys")
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/shm")

DISCARD: Final = ("127.0.0.1", 9)
_RESOLVER_FILE: Final = "/etc/resolv.conf"
# Set aside for documentation (RFC 5737), so nobody is there: tried where the machine names no name server.
_NOBODY: Final = "192.0.2.1"
_PATIENCE: Final = 0.5
_OPENED: Final = "opened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Which mechanisms hold, as tried from inside.

    :ivar attempts: what was tried and what came of it: `opened`, or the system's reason why not.
    :ivar missing: the mechanisms that are not in force, with the reason.
    :ivar exception: why a network was left open on purpose; empty if it was not.
    """

    network_namespace: bool = False
    seccomp: bool = False
    landlock: bool = False
    attempts: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    exception: str = ""

    @property
    def in_force(self) -> tuple[str, ...]:
        held = (self.network_namespace, self.seccomp, self.landlock)
        return tuple(name for name, holds in zip(MECHANISMS, held, strict=True) if holds)

    @property
    def connected(self) -> tuple[str, ...]:
        """The attempts to reach somebody that were not refused. Where nothing was tried, nothing is known."""
        tried = [name for name in _CONNECTIONS if name in self.attempts]
        return tuple(name for name in tried if self.attempts[name] == _OPENED) if tried else _CONNECTIONS

    @property
    def keys_read(self) -> bool:
        return self.attempts.get(_KEYS) == _OPENED

    @property
    def complete(self) -> bool:
        """Neither a connection nor a denied file could be opened."""
        return not self.connected and not self.keys_read

    @property
    def sentence(self) -> str:
        if not self.attempts:
            return f"the process that saw images was not isolated: {self.lacking}"
        if self.exception:
            keys = "read the private keys" if self.keys_read else "not read the private keys"
            return f"the process that saw images was given a network, for {self.exception}; it could {keys}"
        lacking = f" (not in force: {self.lacking})" if self.missing else ""
        if self.connected:
            return f"the process that saw images was able to open a connection: {', '.join(self.connected)}{lacking}"
        sentence = f"the process that saw images could not open a connection: enforced by {', '.join(self.in_force)}"
        return sentence + ("; it was able to read the private keys" if self.keys_read else "") + lacking

    @property
    def lacking(self) -> str:
        """The reasons, each with the mechanisms that it holds for."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.missing.items():
            by_reason.setdefault(why, []).append(name)
        return "; ".join(f"no {' and no '.join(names)}: {why}" for why, names in by_reason.items())

    def to_json(self) -> dict[str, Any]:
        return {
            "network_namespace": self.network_namespace,
            "seccomp": self.seccomp,
            "landlock": self.landlock,
            "connection_possible": bool(self.connected),
            "keys_readable": self.keys_read,
            "attempts": dict(self.attempts),
            "missing": dict(self.missing),
            "exception": self.exception,
            "sentence": self.sentence,
        }


def enter(
    mode: IsolationMode,
    *,
    read: Sequence[Path] = (),
    write: Sequence[Path] = (),
    deny: Sequence[Path] = (),
    keep: Sequence[int] = (),
    card: Sequence[Path] = (),
    exception: str = "",
    mechanisms: Sequence[str] = MECHANISMS,
) -> Isolation:
    """Isolate this process and all it starts, for good. It must have one thread and have opened no image.

    :param read: files and folders to read, besides those of the system and of this program. One inside of a denied
        folder is an exception that is meant.
    :param write: existing folders to write to.
    :param deny: folders that stay closed, also where they lie inside of what may be read.
    :param keep: sockets that stay open: the channel to the agent.
    :param card: device files of graphics cards, if this process is to compute on one; nothing else of `/dev` opens.
    :param exception: why this process needs a network; then only files are closed.
    :param mechanisms: what to ask the kernel for; all of them but in tests.
    :raises ConfigError: if isolation is required, and a connection is still possible or a private key can be read.
    """
    kernel.no_core_dumps()
    close_sockets(keep)
    denied = _denied_files(read, deny)  # listed now: afterwards the folders are closed
    missing: dict[str, str] = {}
    steps: dict[str, tuple[Callable[[], None], Callable[[], bool]]] = {
        NAMESPACE: (kernel.enter_network_namespace, _no_route),
        LANDLOCK: (
            lambda: kernel.enter_landlock(_rules(read, write, deny, card), network=bool(exception)),
            _root_is_closed,
        ),
        # Last, because with it the first could not be tried: there is no socket to try it with.
        SECCOMP: (kernel.enter_seccomp, _no_sockets),
    }
    for name, (enforce, holds) in steps.items():
        if name not in mechanisms or (exception and name != LANDLOCK):
            missing[name] = exception or "not asked for"
            continue
        try:
            enforce()
        except OSError as error:
            missing[name] = (error.strerror or str(error)).lower()
            continue
        if not holds():
            missing[name] = "enforced, but what it should refuse was not refused"
    found = Isolation(
        network_namespace=NAMESPACE not in missing,
        seccomp=SECCOMP not in missing,
        landlock=LANDLOCK not in missing,
        attempts=probe(denied=denied),
        missing={name: missing[name] for name in MECHANISMS if name in missing},
        exception=exception,
    )
    require(mode, found)
    return found


def require(mode: IsolationMode, found: Isolation) -> None:
    """:raises ConfigError: if isolation is required, and a connection is still possible or a private key can be read.

    Where a network is needed for training itself, the files have to be closed instead.
    """
    if mode == "required" and (found.keys_read or (found.exception and not found.landlock)):
        reason = f"isolation is required, and the process that is to see images can read any file: {found.lacking}"
        raise ConfigError(reason, where=WHERE, hint=HINT)
    if mode == "required" and found.connected and not found.exception:
        reason = f"isolation is required, and the process that is to see images can open a connection: {found.lacking}"
        raise ConfigError(reason, where=WHERE, hint=HINT)


def close_sockets(keep: Sequence[int] = ()) -> None:
    """A socket that this process was started with would stay connected whatever is put up later.

    Standard streams stay: whoever started the command has connected them to itself.
    """
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        number = int(name)
        try:
            if number > 2 and number not in keep and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
        except OSError:
            continue  # the descriptor of the listing itself


# Files.


def _rules(
    read: Sequence[Path], write: Sequence[Path], deny: Sequence[Path], card: Sequence[Path] = ()
) -> Iterator[tuple[Path, int]]:
    ours = [Path(__file__).resolve().parents[2] / name for name in ("lazaret", "npr", "protos", "security")]
    ours.append(Path(__file__).resolve().parents[1])
    # `python -m` puts the folder it was started in on its path: at a hospital often the one with state and log.
    here = os.getcwd()
    python = [Path(entry) for entry in (sys.prefix, sys.base_prefix, *sys.path) if entry and entry != here]
    shared = [Path(name) for name in SYSTEM]
    meant = [path for path in read if _inside(path, deny)]
    yield from kernel.without([*shared, *ours, *python, *read], deny, kernel.READ)
    yield from kernel.without([*map(Path, DEVICES), *write], deny, kernel.WRITE)
    yield from ((path.resolve(), kernel.READ) for path in meant)
    yield from ((path, kernel.DEVICE) for path in card)


def _inside(path: Path, folders: Sequence[Path]) -> bool:
    return any(folder.resolve() in path.resolve().parents for folder in folders)


def _denied_files(read: Sequence[Path], deny: Sequence[Path]) -> list[Path]:
    """All files that are to be closed: those in denied folders that are no exception."""
    meant = {path.resolve() for path in read}
    found = [path.resolve() for folder in deny for path in (sorted(folder.rglob("*")) if folder.is_dir() else [folder])]
    return [path for path in found if path.is_file() and path not in meant]


# Attempts.

_TCP, _UDP, _NAMES = "TCP connection", "UDP datagram", "name server"
_INTERNET, _LOCAL, _KEYS = "internet socket", "local socket", "private keys"
# Reaching somebody. That a socket can be made is told too, but in an empty namespace it leads nowhere.
_CONNECTIONS: Final = (_TCP, _UDP, _NAMES)


def probe(address: tuple[str, int] = DISCARD, *, denied: Sequence[Path] = ()) -> dict[str, str]:
    """Try to get out, and say for each attempt what happened.

    Nothing of it is more than one packet to this machine itself: to the name server a route is asked for, no question
    is sent.

    :param address: of a listener, numeric; that nobody listens there counts as reached, because the answer came.
    :param denied: files that should not open; one that does is enough.
    """
    attempts: dict[str, Callable[[], None]] = {
        _TCP: lambda: _connect(address),
        _UDP: lambda: _send(address),
        _NAMES: lambda: _route((_name_server(), 53)),
        _INTERNET: lambda: _open_socket(socket.AF_INET),
        _LOCAL: lambda: _open_socket(socket.AF_UNIX),
    }
    outcomes = {name: _tried(attempt) for name, attempt in attempts.items()}
    if denied:
        came = [_tried(partial(_open_file, path)) for path in denied]
        outcomes[_KEYS] = _OPENED if _OPENED in came else came[0]
    return outcomes


def _tried(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except ConnectionRefusedError:
        return _OPENED
    except OSError as error:
        # Silence is no refusal: the packet may be on its way.
        silent = isinstance(error, TimeoutError) or error.errno is None
        return _OPENED if silent else os.strerror(error.errno or 0).lower()
    return _OPENED


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connect(address: tuple[str, int]) -> None:
    with socket.socket(_family(address[0]), socket.SOCK_STREAM) as tried:
        tried.settimeout(_PATIENCE)
        tried.connect(address)


def _send(address: tuple[str, int]) -> None:
    with socket.socket(_family(address[0]), socket.SOCK_DGRAM) as tried:
        tried.sendto(b"", address)


def _route(address: tuple[str, int]) -> None:
    """Connecting a datagram socket sends nothing; it fails where no interface leads there."""
    with socket.socket(_family(address[0]), socket.SOCK_DGRAM) as tried:
        tried.connect(address)


def _open_socket(family: socket.AddressFamily) -> None:
    socket.socket(family, socket.SOCK_STREAM).close()


def _open_file(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY))


def _name_server() -> str:
    """The first of this machine; without its zone, which a socket does not take."""
    try:
        with open(_RESOLVER_FILE, encoding="utf-8", errors="replace") as file:
            named = [line.split()[1] for line in file if line.split()[:1] == ["nameserver"] and len(line.split()) > 1]
    except OSError:
        named = []
    return named[0].partition("%")[0] if named else _NOBODY


def _refused(attempt: Callable[[], None], *numbers: int) -> bool:
    try:
        attempt()
    except OSError as error:
        return error.errno in numbers
    return False


def _no_route() -> bool:
    """Neither to this machine's own address, which every other namespace has, nor to another."""
    attempts = (partial(_send, DISCARD), partial(_route, (_NOBODY, 53)))
    return all(_refused(attempt, errno.ENETUNREACH) for attempt in attempts)


def _root_is_closed() -> bool:
    """Everybody may list the root folder, and no rule gives it."""
    return _refused(lambda: os.close(os.open("/", os.O_RDONLY | os.O_DIRECTORY)), errno.EACCES)


def _no_sockets() -> bool:
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    return all(_refused(partial(_open_socket, family), errno.EPERM) for family in families)


# Which files a process that sees images reads and writes. Standard library alone: asked before it is isolated.


def data_path(source: str) -> Path | None:
    """Where a data source lies; None for one that has no files."""
    kind, _, rest = source.partition("?")[0].partition(":")
    if kind == "ham10000":
        root = os.environ.get("LAZARET_DATA")
        return Path(root) / "ham10000_fed" if root else None
    return Path(rest) if rest and kind != "generated" else None


def data_folders(source: str) -> set[Path]:
    """All that a process needs to read a data source. What `files=` names is read in place of the table's folder, in
    which there may be keys."""
    path = data_path(source)
    if path is None:
        return set()
    options = source.partition("?")[2].split("&")
    elsewhere = [part.removeprefix("files=") for part in options if part.startswith("files=")]
    if not elsewhere:
        return image_folders(path)
    return {path.resolve()}.union(*(image_folders(Path(folder)) for folder in elsewhere))


def image_folders(path: Path) -> set[Path]:
    """Where the files behind a name really lie: tables list files elsewhere, and folders hold links."""
    waiting = [path, *(_listed_folders(path) if path.suffix.lower() == ".csv" else ())]
    found: set[Path] = set()
    while waiting:
        place = waiting.pop().resolve()
        if place not in found and place.exists():
            found.add(place)
            waiting += _linked_folders(place) if place.is_dir() else ()
    return found


def _listed_folders(table: Path) -> set[Path]:
    """Of the column `image`. What is wrong with a table is reported by those who read all of it."""
    listed: set[str] = set()
    with contextlib.suppress(OSError, csv.Error):
        text = table.read_text(encoding="utf-8-sig", errors="replace")
        for row in csv.DictReader(io.StringIO(text, newline="")):
            listed.add(os.path.dirname((row.get("image") or "").strip()))
    return {table.parent / name for name in listed}


def _linked_folders(folder: Path) -> Iterator[Path]:
    """The folders that links in a tree point into. The listing itself tells which entries are links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                target = Path(entry.path).resolve()
                yield target if target.is_dir() else target.parent
            elif entry.is_dir(follow_symlinks=False):
                yield from _linked_folders(Path(entry.path))


def cache_folder() -> Path:
    """Where decoded images go that are too many for memory (npr/data/store.py, which is not loaded here yet)."""
    base = os.environ.get("XDG_CACHE_HOME")
    chosen = os.environ.get("LAZARET_CACHE")
    return Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "lazaret"


# Device files of graphics cards by the kind that `[site] device` names; torch calls AMD's cards `cuda` too.
_CARD_FILES: Final = {
    "cuda": ("nvidia*", "nvidia-caps/*", "kfd", "dri/renderD*"),
    "xpu": ("dri/renderD*",),
}


def card_files(device: str, folder: Path = Path("/dev")) -> list[Path]:
    """What a process needs to compute on a card: nothing for `cpu`, everything that is there for `auto`."""
    kind = device.partition(":")[0]
    patterns = {p for name in (_CARD_FILES if kind == "auto" else (kind,)) for p in _CARD_FILES.get(name, ())}
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_char_device()})


def made(*folders: Path) -> list[Path]:
    """Folders to write in, made now where they are missing: an isolated process may write in them, not beside them."""
    for folder in folders:
        # One that cannot be made is named by the work itself, with what to do about it.
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return list(folders)
