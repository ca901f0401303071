"""Attempts to get out of a process: run inside of it or by its child, against listeners that really listen."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from site_agent.trainer.channel import IsolationReport

ISOLATED = IsolationReport(
    network_namespace=True,
    seccomp=True,
    landlock=True,
    connection_possible=False,
    keys_readable=False,
    exception="",
    attempts={},
    missing={},
    sentence="isolated",
)
"""What a trainer says of itself if every wall stands."""

ROOT = Path(__file__).parents[2]
SENT = b"a patient's image"

# Standard library alone, so that a process can run it before or after anything else. Prints one JSON object.
ATTEMPTS = """
import ctypes, json, os, socket, struct, sys

def tcp(to):
    with socket.create_connection(("127.0.0.1", to["tcp"]), timeout=5) as link:
        link.sendall(SENT)

def udp(to):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.sendto(SENT, ("127.0.0.1", to["udp"]))

def name(to):
    question = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + bytes([6]) + b"secret" + bytes([0]) + struct.pack(">2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.settimeout(5)
        link.sendto(question, ("127.0.0.1", to["dns"]))
        assert link.recv(512)[:2] == question[:2]

def local(to):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(to["unix"])
        link.sendall(SENT)

def local_by_pair(to):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(SENT, to["unix_datagrams"])

def abstract(to):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(chr(0) + to["abstract"])
        link.sendall(SENT)

def key(to):
    assert open(to["key"], "rb").read()

def namespace(to):
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):
        raise OSError(ctypes.get_errno(), "unshare")

def queue(to):
    # io_uring_setup with room for its answer
    if ctypes.CDLL(None, use_errno=True).syscall(425, 1, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")

def trace(to):
    # PTRACE_TRACEME
    if ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")

def pair(to):
    one, other = socket.socketpair()
    one.sendall(SENT)
    assert other.recv(64) == SENT

def attempt(names, to):
    told = {}
    for name in names:
        try:
            globals()[name](to)
            told[name] = "done"
        except OSError as error:
            told[name] = type(error).__name__ if error.errno is None else os.strerror(error.errno).lower()
    return told
""".replace("SENT", repr(SENT))

ENTER = """
import json, subprocess, sys
from pathlib import Path
task = json.loads(sys.argv[1])
found = None
if task["mechanisms"]:
    from site_agent.trainer import isolation
    read, write, deny = ([Path(name) for name in task[kind]] for kind in ("read", "write", "deny"))
    found = isolation.enter(task["mode"], read=read, write=write, deny=deny, mechanisms=task["mechanisms"]).to_json()
told = {"isolation": found, "own": attempt(task["names"], task["to"])}
if task["child"]:
    # Also by a new program, which inherits nothing but what the kernel keeps.
    words = [sys.executable, "-c", task["child"], json.dumps([task["names"], task["to"]])]
    done = subprocess.run(words, capture_output=True, text=True)
    told["child"] = json.loads(done.stdout) if done.returncode == 0 else done.stderr
print(json.dumps(told))
"""
CHILD = ATTEMPTS + "\nprint(json.dumps(attempt(*json.loads(sys.argv[1]))))\n"


@dataclass
class Listeners:
    """One of each kind on this machine, and what came in."""

    to: dict[str, Any] = field(default_factory=dict)
    received: list[bytes] = field(default_factory=list)


def _served(server: socket.socket, listeners: Listeners, *, streams: bool) -> None:
    while True:
        try:
            if streams:
                link, _ = server.accept()
                with link:
                    link.settimeout(5)
                    listeners.received.append(link.recv(512))
            else:
                data, sender = server.recvfrom(512)
                listeners.received.append(data)
                if sender:
                    server.sendto(data, sender)
        except OSError:
            return


@contextmanager
def listening(folder: Path) -> Iterator[Listeners]:
    found = Listeners()
    abstract = f"lazaret-test-{folder.name}-{id(found)}"
    places: dict[str, tuple[int, int, Any]] = {
        "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        "dns": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        "unix": (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "stream")),
        "unix_datagrams": (socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "datagrams")),
        "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{abstract}"),
    }
    servers = []
    for name, (family, kind, place) in places.items():
        server = socket.socket(family, kind)
        server.bind(place)
        streams = kind == socket.SOCK_STREAM
        if streams:
            server.listen()
        told = server.getsockname()
        found.to[name] = told[1] if family == socket.AF_INET else place.lstrip("\0")
        threading.Thread(target=_served, args=(server, found), kwargs={"streams": streams}, daemon=True).start()
        servers.append(server)
    try:
        yield found
    finally:
        for server in servers:
            # Closing alone does not wake a thread that waits in the kernel.
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()


def tried(
    names: list[str],
    to: dict[str, Any],
    mechanisms: list[str],
    *,
    mode: str = "best",
    before: str = "",
    child: bool = True,
    **paths: list[Path],
) -> dict[str, Any]:
    """What came of the attempts in a new process with these walls; no wall is the twin that shows that they can work.

    :param before: code for the beginning of the process.
    """
    task = {"names": names, "to": to, "mechanisms": mechanisms, "mode": mode, "child": CHILD if child else ""}
    task |= {kind: [str(path) for path in paths.get(kind, [])] for kind in ("read", "write", "deny")}
    done = subprocess.run(
        [sys.executable, "-c", before + ATTEMPTS + ENTER, json.dumps(task)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
