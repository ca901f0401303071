"""Everything that holds a secret prints redacted, compares without a hint of where, and stays out of pickles."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from security.crypto.key_agreement import KeyPair
from security.crypto.signing import SigningKey
from security.secrets import Secret

RAW = bytes(range(32))


def holders() -> list[Any]:
    return [Secret(RAW), SigningKey(Secret(RAW)), KeyPair(Secret(RAW))]


@pytest.mark.parametrize("holder", holders(), ids=lambda holder: type(holder).__name__)
def test_never_prints(holder: Any) -> None:
    for shown in (repr(holder), str(holder), f"{holder}", repr([holder]), repr({"key": holder})):
        assert "redacted" in shown
        assert RAW.hex() not in shown and str(RAW) not in shown
        assert repr(RAW[4:8])[2:-1] not in shown


@pytest.mark.parametrize("holder", holders(), ids=lambda holder: type(holder).__name__)
def test_is_neither_pickled_nor_copied_nor_hashed(holder: Any) -> None:
    for act in (pickle.dumps, copy.copy, copy.deepcopy, hash):
        with pytest.raises(TypeError):
            act(holder)


@pytest.mark.parametrize("kind", [Secret, lambda raw: SigningKey(Secret(raw)), lambda raw: KeyPair(Secret(raw))])
def test_equality(kind: Any) -> None:
    assert kind(RAW) == kind(RAW)
    assert kind(RAW) != kind(bytes(32))
    assert kind(RAW) != RAW


def test_a_secret_keeps_its_bytes_to_itself() -> None:
    source = bytearray(RAW)
    kept = Secret(source)
    source[0] = 99
    assert kept.reveal() == RAW
    assert len(kept) == 32
    with pytest.raises(AttributeError):
        kept.extra = 1  # type: ignore[attr-defined]


CHILD = """
import os, sys
from security.secrets import take_from_environment
{take}
if os.fork() == 0:
    with open("/proc/self/environ", "rb") as file:
        found = b"a-pin" in file.read() or "A_PIN" in os.environ
    os._exit(3 if found else 0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="not Linux")
@pytest.mark.parametrize(
    ("take", "code"),
    [
        ("assert take_from_environment('A_PIN').reveal() == b'a-pin' and take_from_environment('A_PIN') is None", 0),
        ("os.environ.pop('A_PIN')", 3),  # the twin: the kernel still shows what the process began with
    ],
)
def test_a_secret_that_was_taken_is_in_no_child(take: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(take=take)], env=os.environ | {"A_PIN": "a-pin"}, check=False
    )
    assert done.returncode == code
