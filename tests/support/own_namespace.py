"""A service in a network namespace of its own: it talks to a peer over a link, and something beside it may talk too.

To be started in a new network and process namespace, with a folder and an attack; prints the weighty findings of its
log and what the reading covers, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from lazaret import kernel_bytes
from security.audit.verify import verify
from security.log.egress import KernelByteLog
from security.log.reader import LogReader
from tests.support.audit_attacks import Lonely, weighty
from tests.support.audit_messages import VECTOR, Site

HERE, THERE, PORT = "10.9.0.1", "10.9.0.2", 7443
START = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc"]
SINK = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
print("listening", flush=True)
while True:
    stream, _ = server.accept()
    while stream.recv(1 << 20):
        pass
"""
TCP = "import socket; s = socket.socket()\n"
UDP = "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
ATTACKS = {
    "nothing": "",
    "datagrams of a child": UDP + f"for n in range(30): s.sendto(bytes(1400), ({THERE!r}, 53))",
    "small datagrams of a child": UDP + f"for n in range(2000): s.sendto(bytes(20), ({THERE!r}, 53))",
    "a short connection of a child": TCP + f"s.connect(({THERE!r}, {PORT})); s.sendall(bytes(42000))",
}


def _link() -> subprocess.Popen[str]:
    """A peer in another namespace, at the other end of a pair of interfaces."""
    listening = f"import time; time.sleep(0.2)\n{SINK}"
    peer = subprocess.Popen(["unshare", "--net", sys.executable, "-c", listening], stdout=subprocess.PIPE, text=True)
    ours = os.readlink("/proc/self/ns/net")
    for _ in range(200):
        if os.readlink(f"/proc/{peer.pid}/ns/net") != ours:
            break
        time.sleep(0.02)
    for command in (
        f"ip link add near type veth peer name far netns {peer.pid}",
        f"ip address add {HERE}/24 dev near",
        "ip link set near up",
        f"nsenter --net=/proc/{peer.pid}/ns/net ip address add {THERE}/24 dev far",
        f"nsenter --net=/proc/{peer.pid}/ns/net ip link set far up",
    ):
        subprocess.run(command.split(), check=True)
    assert peer.stdout is not None and peer.stdout.readline() == "listening\n"
    return peer


def main(folder: str, attack: str, coverage: str) -> None:
    """An honest upload, and one attack."""
    peer = _link()
    lonely = Lonely(Path(folder))
    site = Site(lonely)
    meter = kernel_bytes.meter() if coverage == "own" else kernel_bytes.Meter()
    counted = KernelByteLog(lonely.log, meter)
    site.round()
    with socket.create_connection((THERE, PORT)) as stream:
        stream.sendall(bytes(site.sent))
        while sum(flow.out for flow in (kernel_bytes.tcp_flows() or {}).values()) < site.sent:
            time.sleep(0.02)  # some of it still waits in the kernel
        counted.tick(0.0)
        subprocess.run([sys.executable, "-c", ATTACKS[attack]], check=True)
        site.clock.advance(1000)
        time.sleep(0.3)
        counted.tick(31.0)
        counted.close()
    lonely.log.checkpoint()
    readings = [record.body for record in LogReader(lonely.folder).records("net.counter")]
    print(
        json.dumps(
            {
                "codes": sorted(weighty(verify(lonely.folder, lonely.keys).findings)),
                "coverage": sorted({body["coverage"] for body in readings}),
                "beside": sum(body["beside_out"] or 0 for body in readings),
                "sent": sum(body["bytes_out"] for body in readings),
                "logged": site.sent,
                "vector": VECTOR,
            }
        )
    )
    peer.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
