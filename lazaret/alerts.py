"""Alerts: a command of the operator's, or a web address, that hears when something needs a person, and when it is over.

A party says which conditions hold now, each under a name. One that begins or ends is told once, as one JSON object: on
the standard input of the command, or as the body of a POST. Both run in a process of their own: a hook that hangs or
fails costs nothing but a line in the log, and what a webhook sends is not traffic of the party itself. Texts are made
of states, names of members and dates; nothing about patients, images or results is in them.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from lazaret.errors import ConfigError, ToolkitError
from lazaret.settings import read_settings

DAY_MS: Final = 86_400_000
CERTIFICATE_DAYS: Final = (1, 7, 30)
HOOK_SECONDS: Final = 60
END_SECONDS: Final = 10  # that a process which ends waits for its hooks
LEAST_FREE: Final = 512 * 1024 * 1024
Message = dict[str, Any]


class AlertsTable(BaseModel):
    """The table [alerts] of a configuration.

    :ivar after: minutes that a stalled run or a missing party lasts before it is told.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    command: tuple[str, ...] | None = None
    webhook: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    after: Annotated[int, Field(ge=1)] = 60

    def hooks(self) -> list[tuple[str, ...]]:
        """The processes to start for each message."""
        post = (sys.executable, "-m", "lazaret.alerts", self.webhook) if self.webhook else None
        return [hook for hook in (self.command, post) if hook]


class Alerts:
    """Compares what holds now with what held before, and tells the difference.

    :param tell: takes one message; the hooks of the table if not given.
    """

    def __init__(self, party: str, table: AlertsTable, tell: Callable[[Message], None] | None = None) -> None:
        self._party = party
        self._standing: dict[str, str] = {}
        hooks = _Hooks(table.hooks(), party)
        self._tell = tell or hooks
        self._settle = hooks.settle

    def look(self, found: Mapping[str, str], *, now_ms: int) -> None:
        """:param found: the conditions that hold, by name, in words."""
        for name, text in found.items():
            if name not in self._standing:
                self._send("began", name, text, now_ms)
        for name, text in self._standing.items():
            if name not in found:
                self._send("ended", name, text, now_ms)
        self._standing = dict(found)

    def end(self, reason: str, *, now_ms: int) -> None:
        """The last message of a process that an error has ended: it waits for the hooks, though not for long."""
        self.look(self._standing | {"stopped": reason}, now_ms=now_ms)
        self._settle()

    def _send(self, state: str, name: str, text: str, now_ms: int) -> None:
        self._tell({"party": self._party, "alert": name, "state": state, "text": text, "at_ms": now_ms})


class _Hooks:
    """Starts the hooks one after the other, beside the work."""

    def __init__(self, hooks: list[tuple[str, ...]], party: str) -> None:
        self._hooks = hooks
        self._waiting: queue.SimpleQueue[Message | threading.Event] = queue.SimpleQueue()
        self._log = logging.getLogger(party)
        if hooks:
            threading.Thread(target=self._work, name="alerts", daemon=True).start()

    def __call__(self, message: Message) -> None:
        if self._hooks:
            self._waiting.put(message)

    def settle(self) -> None:
        """Wait for what was told so far."""
        if self._hooks:
            done = threading.Event()
            self._waiting.put(done)
            done.wait(END_SECONDS)

    def _work(self) -> None:
        while True:
            message = self._waiting.get()
            if isinstance(message, threading.Event):
                message.set()
                continue
            for hook in self._hooks:
                try:
                    _call(hook, message)
                except (OSError, subprocess.SubprocessError) as error:
                    self._log.warning("the alert hook %s failed: %s", hook[0], error)


def _call(hook: tuple[str, ...], message: Message) -> None:
    """Start a hook with one message, and wait for it."""
    data = json.dumps(message, ensure_ascii=False).encode() + b"\n"
    subprocess.run(hook, input=data, timeout=HOOK_SECONDS, check=True, capture_output=True)


class _Alerting(BaseModel):
    """A configuration of either party, of which only this table is read."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    alerts: AlertsTable = AlertsTable()


def tell_once(config: Path, name: str, text: str) -> None:
    """Tell the hooks of a configuration, and wait for them: for a command that ends, such as an audit at night.

    :raises ConfigError: with the file and the key; also if it names no hook.
    """
    hooks = read_settings(_Alerting, config, written_by="init").alerts.hooks()
    if not hooks:
        raise ConfigError("there is neither a command nor a webhook", where=f"{config} [alerts]")
    now_ms = time.time_ns() // 1_000_000
    message = {"party": "privacy-audit", "alert": name, "state": "began", "text": text, "at_ms": now_ms}
    for hook in hooks:
        try:
            _call(hook, message)
        except (OSError, subprocess.SubprocessError) as error:
            raise ToolkitError(f"the alert hook failed: {error}", where=f"{config} [alerts]") from error


def certificate_alerts(ends: Mapping[str, int], now_ms: int) -> dict[str, str]:
    """Certificates that end soon, each under the narrowest of 30, 7 and 1 days; so each of them is told.

    :param ends: the last instant of each member's certificate.
    """
    found = {}
    for member, until in ends.items():
        if (days := _soon(until, now_ms)) is not None:
            text = f"the certificate of {member} {_ends(until, now_ms)}: renew it (docs/consortium.md, Renew)"
            found[f"certificate-{days}:{member}"] = text
    return found


def manifest_alerts(version: int, until_ms: int, now_ms: int) -> dict[str, str]:
    """A manifest that ends soon, in the same steps: no round begins that would outlast it."""
    if (days := _soon(until_ms, now_ms)) is None:
        return {}
    text = f"manifest version {version} {_ends(until_ms, now_ms)}: the consortium publishes a newer one"
    return {f"manifest-{days}:{version}": f"{text} (docs/consortium.md, Publish)"}


def _soon(until_ms: int, now_ms: int) -> int | None:
    return next((days for days in CERTIFICATE_DAYS if until_ms - now_ms <= days * DAY_MS), None)


def _ends(until_ms: int, now_ms: int) -> str:
    left = round((until_ms - now_ms) / DAY_MS)
    return "has ended" if until_ms < now_ms else "ends today" if left == 0 else f"ends in {left} days"


def disk_alert(folder: Path, least: int = LEAST_FREE) -> dict[str, str]:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return {}
    return {"disk": f"{free // 1024**2} MB are left on the disk of {folder}"} if free < least else {}


def post(url: str, data: bytes) -> None:
    """What a webhook does."""
    import urllib.request  # of the process that posts, and of no other

    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HOOK_SECONDS / 2):
        pass


if __name__ == "__main__":
    post(sys.argv[1], sys.stdin.buffer.read())
