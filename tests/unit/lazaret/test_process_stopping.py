"""Signals to processes of ours: exit 0, whatever mask they were started with."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from lazaret.process import ENDING

BEGINNING = """
import time
from lazaret.process import ending_well
with ending_well():
    print("ready", flush=True)
    time.sleep(60)
"""
SERVING = """
import asyncio
from lazaret.process import ending_well, stop_on_signals

async def serve():
    stopped = asyncio.Event()
    stop_on_signals(stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    print("in good order", flush=True)

with ending_well():
    asyncio.run(serve())
"""
# A signal in a callback of Python's own, as imports have them: what it raises there is printed and dropped.
DROPPED = """
import asyncio, os, signal, weakref
from lazaret.process import ending_well, stop_on_signals

class Thing:
    pass

async def serve():
    stopped = asyncio.Event()
    stop_on_signals(stopped.set)
    await asyncio.wait_for(stopped.wait(), 20)
    print("in good order", flush=True)

with ending_well():
    thing = Thing()
    watch = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    print("ready", flush=True)
    asyncio.run(serve())
"""
# As in a long computation of a library: the main thread does not come back to Python.
COMPUTING = """
from lazaret.process import block_signals, end_on_signals
block_signals()
end_on_signals()
print("ready", flush=True)
import ctypes
ctypes.CDLL(None).sleep(60)
"""


def ended(code: str, number: signal.Signals, *, blocked: bool = False, ignored: bool = False) -> tuple[int, str]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING if blocked else ())
    ignoring = signal.signal(number, signal.SIG_IGN) if ignored else None
    try:
        begun = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if ignored:
            signal.signal(number, ignoring)
    assert begun.stdout is not None
    try:
        assert begun.stdout.readline() == "ready\n"
        begun.send_signal(number)
        said, _ = begun.communicate(timeout=1 if ignored else 30)
        return begun.returncode, said
    except subprocess.TimeoutExpired:
        return -1, "still there"
    finally:
        begun.kill()
        begun.communicate()


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
@pytest.mark.parametrize(("code", "said"), [(BEGINNING, ""), (SERVING, "in good order\n"), (COMPUTING, "")])
def test_it_ends_with_0_also_where_its_parent_had_signals_blocked(
    code: str, said: str, number: signal.Signals
) -> None:
    assert ended(code, number, blocked=True) == (0, said)


def test_what_nohup_starts_outlives_the_terminal() -> None:
    assert ended(BEGINNING, signal.SIGHUP, ignored=True) == (-1, "still there")
    assert ended(BEGINNING, signal.SIGTERM, blocked=True) == (0, "")


def test_a_signal_whose_exception_python_drops_still_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\nin good order\n") and "SystemExit" in done.stderr
