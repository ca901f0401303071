"""Mutations of real logs under fixed seeds: never a traceback, never a hang, never a false clean.

The suite tries some; `LAZARET_LONG=1` tries 5,000. Nothing is left out. Where the verdict is clean, another reader than
ours (`_told`, plain files and JSON) must find that the folder still says the same.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pytest

from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.audit.verify import verify
from tests.support.audit_logs import Federation
from tests.support.audit_parties import FIVE
from tests.support.consortium_world import World

pytestmark = pytest.mark.timeout(3600)
SECONDS = 60  # longer than any of these folders takes on a busy machine
MUTATIONS = 5000 if os.environ.get("LAZARET_LONG") else 120
Draw = random.Random  # nothing secret depends on it: the seeds are fixed


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Logs with several manifests, a rotation, a kill and a budget."""
    folder = tmp_path_factory.mktemp("fuzz")
    federation = Federation.from_world(World.make(folder / "world", FIVE), folder / "logs", dp_sites=("graz",))
    world = federation.world
    assert world is not None
    federation.play(1)
    world.authority.revoke("wels", reason="left", now_ms=world.now)
    federation.republish()
    federation.restart("linz", stop=False)
    federation.members["graz"].log.rotate("epoch over")
    federation.play(1)
    federation.stop()
    return federation


# Changes of bytes


def _flip(data: bytes, draw: Draw) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 8))):
        out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    return bytes(out)


def _cut(data: bytes, draw: Draw) -> bytes:
    return data[: draw.randrange(len(data))]


def _insert(data: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(data) + 1)
    junk = draw.choice((b"\n", b"\x00", b" ", b"{}\n", b"\xff\xfe", draw.randbytes(40), b"[" * 5000))
    return data[:at] + junk + data[at:]


def _remove(data: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.choice((1, 2, 40, 700)) :]


def _lines(data: bytes, draw: Draw) -> bytes:
    """Drop, repeat or swap whole lines."""
    lines = data.split(b"\n")
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(3):
        case 0:
            del lines[one]
        case 1:
            lines.insert(other, lines[one])
        case _:
            lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _field(data: bytes, draw: Draw) -> bytes:
    """Another value in a field of an entry, canonical again."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    try:
        entry = json.loads(lines[at])
    except ValueError:
        return _flip(data, draw)
    place = entry
    while True:
        name = draw.choice(sorted(place)) if isinstance(place, dict) and place else None
        if name is None or not isinstance(place[name], dict) or not place[name]:
            break
        place = place[name]
    if name is None:
        return _flip(data, draw)
    place[name] = draw.choice((None, True, 0, -1, 10**14, 10**40, 1.5, "", "x" * 600, "0" * 64, [], {}, ["a"] * 2000))
    lines[at] = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return b"\n".join(lines)


CHANGES: tuple[Callable[[bytes, Draw], bytes], ...] = (_flip, _cut, _insert, _remove, _lines, _field, _field)


def _mutate(path: Path, donor: Path, draw: Draw) -> tuple[str, Path, bytes]:
    """Change one file of a log folder; which, and what it was before."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    while True:
        file = draw.choice(files)
        name, data = str(file.relative_to(path)), file.read_bytes()
        if draw.random() < 0.1:
            what, changed = _misplaced(donor / name, draw)
        else:
            what, changed = "changed", draw.choice(CHANGES)(data, draw) if data else b"x"
        if changed is None:
            file.unlink()
        elif changed != data:
            file.write_bytes(changed)
        else:
            continue
        return f"{what} {name}", file, data


def _misplaced(other: Path, draw: Draw) -> tuple[str, bytes | None]:
    """Another log's file, or none."""
    if draw.random() < 0.5 and other.is_file():
        return "swapped", other.read_bytes()
    return "deleted", None


def _told(path: Path) -> dict[str, Any]:
    """What a folder says, read without our code: a change that leaves this as it is changed nothing.

    A note is its text and the set of its signatures, whose order says nothing (C2SP signed-note). A head that nobody
    cosigned, that went out with no message and that a larger one covers, says nothing that the larger one does not.
    """
    entries = [json.loads(line) for file in sorted((path / "segments").iterdir()) for line in file.open("rb")]
    shown = {entry["body"]["head"] for entry in entries if entry["type"] == "egress"}
    told: dict[str, Any] = {}
    heads = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if not file.is_file() or file.name == ".lock":
            continue
        told[name] = sha256(file.read_bytes()).hexdigest()
        if file.suffix == ".note":
            text, _, lines = file.read_text().rpartition("\n\n")
            told[name] = (text, frozenset(lines.splitlines()), len(lines.splitlines()))
        if file.parent.name == "checkpoints":
            heads[int(file.stem)] = name
    for size, name in heads.items():
        if size < max(heads) and size not in shown and len(told[name][1]) == 1:
            del told[name]
    return told


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    def late(*_: object) -> NoReturn:
        raise AssertionError(f"no verdict after {SECONDS} s: {what}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _fuzz(source: Path, donor: Path, path: Path, seeds: list[str], judge: Callable[[Path], int]) -> None:
    """Try every seed on one copy, which is mended after each."""
    shutil.copytree(source, path)
    assert judge(path) == 0
    before, same = _told(path), 0
    for seed in seeds:
        what, file, data = _mutate(path, donor, Draw(seed))
        with _in_time(f"{seed}: {what}"):
            verdict = judge(path)
        assert verdict in (0, 1, 3), (seed, what)
        if verdict == 0:
            assert _told(path) == before, f"clean after {what}, {seed}"
            same += 1
        file.write_bytes(data)
    assert same <= max(len(seeds) // 8, 2), "a tenth deletes a file, often a spare head; the rest is a change"


@pytest.mark.parametrize("party", ["graz", "hub", "wels"])
def test_mutated_log_is_never_clean(party: str, changed: Federation, tmp_path: Path) -> None:
    source, donor = changed.members_ever[party].folder, changed.members_ever["linz"].folder
    _fuzz(
        source,
        donor,
        tmp_path / "log",
        [f"{party} {seed}" for seed in range(MUTATIONS // 3)],
        lambda path: verify(path, keys_for(path, changed.root_key)).exit_code,
    )


def test_mutated_log_among_others(changed: Federation, tmp_path: Path) -> None:
    """The comparison as a whole, in which a folder may also contradict another."""
    others = [folder for folder in changed.folders if folder.name != "graz"]
    keys = {folder: keys_for(folder, changed.root_key) for folder in others}

    def judge(path: Path) -> int:
        return cross([path, *others], {**keys, path: keys_for(path, changed.root_key)}).exit_code

    seeds = [f"among {seed}" for seed in range(MUTATIONS // 40)]
    _fuzz(changed.members_ever["graz"].folder, changed.members_ever["linz"].folder, tmp_path / "graz", seeds, judge)
