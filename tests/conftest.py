"""Loaded before every test module: TLS 1.2 is switched off before any of them imports grpc."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import protos.tls  # noqa: F401  # imported for what it does to the environment
from lazaret import process

IMPORTED = 50_000  # objects; torch alone makes three times as many


def pytest_configure() -> None:
    """Under nohup SIGHUP is ignored, in the background of a shell SIGINT, and programs honour that: what tests start
    has to see the signals all the same."""
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long forms of tests run only when they are asked for."""
    if os.environ.get("LAZARET_LONG") != "1":
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long; scripts/test --long"))


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """What was imported stays: collections, which agents ask for in every round, need not look at it. An agent that
    ends thaws what it froze, and this with it."""
    if gc.get_freeze_count() < IMPORTED:
        process.freeze_objects()


@pytest.fixture(scope="module")
def on_disk() -> Iterator[Path]:
    """A folder on disk, its name short (sockets). Others may be in /dev/shm, which is open to every trainer."""
    with TemporaryDirectory(dir="/var/tmp", prefix="lazaret-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a test leaves in the environment is gone after it; the next one on this worker starts processes with it."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """A command that ran in this process keeps its log to itself; the next test may want to see the lines."""
    yield
    for program in ("site-agent", "coordinator", "consortium", "npr-lab", "privacy-audit"):
        logging.getLogger(program).propagate = True


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A command that ran in this process leaves signals blocked, since its process would be ending. Whatever the next
    test starts would inherit that, and nothing but SIGKILL would end it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
