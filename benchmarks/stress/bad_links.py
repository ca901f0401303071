"""Links between parties that delay, lose, reorder and hold back packets, and that can be cut. Needs root.

`tc netem` does this where the kernel has it; here a process does it for every packet, so that it works on any kernel
with `tun`, and follows from a seed. Each party is in a network namespace whose only way out is a device of this
process: real packets, so that TCP sees real loss. `python -m benchmarks.stress.bad_links FILE SEED NAME...`; the file
has the links.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

HUB: Final = "10.88.0.1"
NAMESPACES: Final = Path("/var/run/netns")
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x1001
_CLONE_NEWNET: Final = 0x40000000
LOOK_SECONDS: Final = 0.05
LONGEST_QUEUE: Final = 1.0  # seconds of packets that a slow link keeps; more are dropped, as a router would


@dataclass(frozen=True, slots=True)
class Link:
    """One party's line, both ways.

    :param delay: seconds, one way; `jitter` is added at random, and packets overtake each other.
    :param loss: of all packets.
    :param megabits: how fast; None: as fast as it goes.
    :param cut: nothing passes.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    megabits: float | None = None
    cut: bool = False


def why_not() -> str | None:
    """Why there can be no such links here; None if there can."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "no ip command, or no tun device"
    name = f"lzw{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespaces: {made.stderr.decode().strip()}"


def address(place: int) -> str:
    return f"10.88.0.{1 + place}"


class BadLinks:
    """The links of all parties, the hub first; `prefix` has the words to put before a party's command."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._file = folder / "links.json"
        self._names = names
        self._links = dict.fromkeys(names, Link())

    def namespace(self, name: str) -> str:
        return f"lzw{os.getpid()}-{self._names.index(name)}"

    def prefix(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace(name))

    def set(self, name: str, link: Link) -> None:
        self._links[name] = link
        self.write()

    def calm(self) -> None:
        self._links = dict.fromkeys(self._names, Link())
        self.write()

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({name: asdict(link) for name, link in self._links.items()}))
        new.rename(self._file)


@contextmanager
def links(folder: Path, names: list[str], seed: int) -> Iterator[BadLinks]:
    """Namespaces for these parties, and the process between them."""
    links = BadLinks(folder, names)
    links.write()
    spaces = [links.namespace(name) for name in names]
    process: subprocess.Popen[bytes] | None = None
    try:
        for space in spaces:
            subprocess.run(["ip", "netns", "add", space], check=True)
        words = [sys.executable, "-m", "benchmarks.stress.bad_links", str(links._file), str(seed), *spaces]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            raise OSError("the links between the parties did not come up")
        yield links
    finally:
        if process is not None:
            process.kill()
            process.wait()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


# The process between the parties.


class _Router:
    """Takes packets from each device and gives each to another one, late or not at all."""

    def __init__(self, file: Path, seed: int, spaces: list[str]) -> None:
        self._file = file
        self._rng = Random(seed)
        self._devices = [_device(space, address(place)) for place, space in enumerate(spaces)]
        self._places = {device: place for place, device in enumerate(self._devices)}
        self._free = [0.0] * len(spaces)  # until when each line is busy with packets before
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._links: list[Link] = []
        self._read = 0.0

    def run(self) -> None:
        poll = select.poll()
        for device in self._devices:
            poll.register(device, select.POLLIN)
        while True:
            now = time.monotonic()
            if now >= self._read:
                self._look(now)
            wait = self._waiting[0][0] - now if self._waiting else LOOK_SECONDS
            for device, _ in poll.poll(max(0.0, min(wait, LOOK_SECONDS)) * 1000):
                self._take(self._places[device], os.read(device, 1 << 16))
            self._give(time.monotonic())

    def _look(self, now: float) -> None:
        described: dict[str, dict[str, Any]] = json.loads(self._file.read_text())
        self._links = [Link(**values) for values in described.values()]
        self._read = now + LOOK_SECONDS

    def _take(self, source: int, packet: bytes) -> None:
        """A packet passes the lines of both ends. IPv4 only: anything else has nowhere to go."""
        if len(packet) < 20 or packet[0] >> 4 != 4:
            return
        target = packet[19] - 1
        if packet[16:19] != bytes([10, 88, 0]) or not 0 <= target < len(self._devices):
            return
        at = time.monotonic()
        for place in (source, target):
            link = self._links[place]
            if link.cut or self._rng.random() < link.loss:
                return
            if link.megabits is not None:
                begin = max(at, self._free[place])
                if begin - at > LONGEST_QUEUE:
                    return
                self._free[place] = at = begin + 8 * len(packet) / (link.megabits * 1e6)
            at += link.delay + self._rng.random() * link.jitter
        self._count += 1
        heapq.heappush(self._waiting, (at, self._count, target, packet))

    def _give(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._waiting)
            os.write(self._devices[target], packet)


def _device(space: str, own: str) -> int:
    """A tun device inside a namespace, held from outside."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(NAMESPACES / space, os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns", space)
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"links", _IFF_TUN_NO_PI))
        for words in (f"addr add {own}/24 dev links", "link set links up", "link set lo up"):
            subprocess.run(["ip", *words.split()], check=True)
        return device
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(there)
        os.close(home)


def main() -> None:
    file, seed, *spaces = sys.argv[1:]
    router = _Router(Path(file), int(seed), spaces)
    print("up", flush=True)
    router.run()


if __name__ == "__main__":
    main()
