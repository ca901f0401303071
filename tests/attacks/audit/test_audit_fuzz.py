"""Mutations of real logs under fixed seeds: never a traceback, never a hang, never clean.

The suite tries some; `LAZARET_LONG=1` tries 5,000. Left out are changes that are no change: a copy of what is there
twice, an annex that was erased, a head that nobody cosigned and that a larger one covers.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.audit.verify import verify
from tests.support.audit_logs import FIVE, Federation
from tests.support.consortium_world import World

pytestmark = pytest.mark.timeout(3600)
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


def _mutate(path: Path, donor: Path, draw: Draw) -> str | None:
    """Change one file of a log folder; None where the draw was no change."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    file = draw.choice(files)
    name = str(file.relative_to(path))
    data = file.read_bytes()
    if draw.random() < 0.1:
        return _misplace(path, donor, file, name, draw)
    changed = draw.choice(CHANGES)(data, draw) if data else b"x"
    if changed == data or (file.suffix == ".note" and sorted(changed.split(b"\n")) == sorted(data.split(b"\n"))):
        return None  # the order of cosignatures says nothing
    file.write_bytes(changed)
    return f"changed {name}"


def _misplace(path: Path, donor: Path, file: Path, name: str, draw: Draw) -> str | None:
    """Delete a file, or put another log's in its place."""
    other = donor / name
    if draw.random() < 0.5 and other.is_file() and other.read_bytes() != file.read_bytes():
        shutil.copy(other, file)
        return f"swapped {name}"
    cosigned = b"/witness" in file.read_bytes() if name.startswith("checkpoints/") else True
    twice = name.startswith("manifests/") and file.read_bytes() == (path / "manifest.json").read_bytes()
    if name.startswith("annex/") or twice or not cosigned:
        return None
    file.unlink()
    return f"deleted {name}"


@pytest.mark.parametrize("party", ["graz", "hub", "wels"])
def test_mutated_log_is_never_clean(party: str, changed: Federation, tmp_path: Path) -> None:
    source = next(path for path in changed.folders if path.name == party)
    donor = next(path for path in changed.folders if path.name == "linz")
    assert verify(source, keys_for(source, changed.root_key)).exit_code == 0
    tried = 0
    for seed in range(MUTATIONS // 3):
        path = tmp_path / "log"
        shutil.copytree(source, path)
        draw = Draw(f"{party} {seed}")
        what = _mutate(path, donor, draw)
        if what is not None:
            tried += 1
            found = verify(path, keys_for(path, changed.root_key))
            assert found.exit_code in (1, 3), (seed, what)
        shutil.rmtree(path)
    assert tried > MUTATIONS // 4


def test_mutated_log_among_others(changed: Federation, tmp_path: Path) -> None:
    """The comparison as a whole: no traceback, and not clean."""
    for seed in range(MUTATIONS // 40):
        path = tmp_path / "graz"
        shutil.copytree(next(one for one in changed.folders if one.name == "graz"), path)
        donor = next(one for one in changed.folders if one.name == "linz")
        what = _mutate(path, donor, Draw(f"among {seed}"))
        folders = [path if one.name == "graz" else one for one in changed.folders]
        if what is not None:
            result = cross(folders, {one: keys_for(one, changed.root_key) for one in folders})
            assert result.exit_code in (1, 3), (seed, what)
        shutil.rmtree(path)
