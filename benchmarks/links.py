"""Sites behind slow links: a network namespace for each, limited by tc in both directions. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

BRIDGE = "lazbench"
ADDRESS = "10.77.0.1"


def why_not() -> str | None:
    """Why there can be no slow links here; None if there can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"no {missing[0]} command"
    try:
        _run("ip netns add lazbench-try")
        _run("ip netns del lazbench-try")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.decode().strip()}"
    return None


def _run(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True)


@contextmanager
def slow_links(count: int, megabits: int = 100) -> Iterator[list[list[str]]]:
    """For each site, the words to put before its command."""
    made: list[str] = []
    try:
        _run(f"ip link add {BRIDGE} type bridge")
        _run(f"ip addr add {ADDRESS}/16 dev {BRIDGE}")
        _run(f"ip link set {BRIDGE} up")
        for number in range(count):
            made.append(f"lazbench{number}")
            # Room for the largest packet that the kernel sends in one piece: cut up here, it costs more than the link.
            _link(made[-1], number, f"rate {megabits}mbit burst 128kb latency 100ms")
        yield [["ip", "netns", "exec", name] for name in made]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


def _link(name: str, number: int, limit: str) -> None:
    outer, inner = f"lzo{number}", f"lzi{number}"
    _run(f"ip netns add {name}")
    _run(f"ip link add {outer} type veth peer name {inner} netns {name}")
    _run(f"ip link set {outer} master {BRIDGE} up")
    _run(f"tc qdisc add dev {outer} root tbf {limit}")
    inside = f"ip netns exec {name}"
    _run(f"{inside} ip addr add 10.77.{1 + number // 200}.{1 + number % 200}/16 dev {inner}")
    _run(f"{inside} ip link set {inner} up")
    _run(f"{inside} ip link set lo up")
    _run(f"{inside} tc qdisc add dev {inner} root tbf {limit}")
