"""A service says that it is ready and alive, as often as its manager wants to hear it, and never waits for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lazaret.process import ServiceManager


class Listener:
    """The manager's end."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.address = address

    def heard(self) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.socket.recv(100))
            except BlockingIOError:
                return found


@pytest.mark.parametrize("abstract", [False, True])
def test_ready_once_then_alive_four_times_in_a_period(tmp_path: Path, abstract: bool) -> None:
    address = f"@lazaret-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    listener, now = Listener(address), 1000.0
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}
    manager = ServiceManager(environment, clock=lambda: now)
    assert listener.heard() == []
    manager.alive()
    assert listener.heard() == [b"READY=1", b"WATCHDOG=1"]
    for _ in range(79):
        now += 0.1
        manager.alive()
    assert listener.heard() == [b"WATCHDOG=1"] * 3
    listener.socket.close()


def test_without_a_watchdog_it_is_ready_and_says_no_more(tmp_path: Path) -> None:
    for more in ({}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}):
        listener = Listener(str(tmp_path / f"notify{len(os.listdir(tmp_path))}"))
        manager = ServiceManager({"NOTIFY_SOCKET": listener.address, **more})
        manager.alive()
        manager.alive()
        assert listener.heard() == [b"READY=1"]
        listener.socket.close()


def test_no_manager_or_one_that_is_gone_or_deaf_does_no_harm(tmp_path: Path) -> None:
    ServiceManager({}).alive()
    ServiceManager({"NOTIFY_SOCKET": "relative"}).alive()
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).alive()
    deaf = Listener(str(tmp_path / "deaf"))
    now = 0.0
    manager = ServiceManager({"NOTIFY_SOCKET": deaf.address, "WATCHDOG_USEC": "4"}, clock=lambda: now)
    for _ in range(5000):  # far more than a socket holds
        now += 1
        manager.alive()
    deaf.socket.close()
