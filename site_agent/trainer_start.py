"""How a trainer comes to an agent: as a child that the agent starts, or as a service that connects to a socket file.

`start_trainer` puts it together: isolation goes into the privacy log and is judged before the trainer is told anything,
then it gets what it needs to begin, and what it says of its data is written down.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lazaret.errors import ConfigError
from lazaret.stopping import ENDING
from security.identity.enrolment import Identity
from security.identity.initial_model import InitialModel
from security.identity.manifest import Manifest
from security.log.writer import AuditLog
from site_agent import log_events
from site_agent.budget import Budget
from site_agent.config import SiteConfig
from site_agent.state_dir import StateDir
from site_agent.supervisor import SILENCE_SECONDS, STOP_SECONDS, Supervisor
from site_agent.trainer.channel import DataReady, IsolationReport, TrainerSetup
from site_agent.trainer.isolation import HINT, WHERE, IsolationMode

log = logging.getLogger("site-agent")


class ChildTrainer:
    """A trainer that this process starts.

    :param log_format: what `--log-format` says.
    :param module: the program; another one in attacks only.
    :param scratch: an empty folder for its temporary files; one in the state folder if not given.
    :param options: further ones of the program.
    """

    def __init__(
        self,
        config: SiteConfig,
        log_format: str | None = None,
        *,
        module: str = "site_agent.trainer",
        scratch: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.asked = False
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if scratch is None:
            scratch = config.state / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(mode=0o700)
        formats = ["--log-format", log_format] if log_format else []
        command = [sys.executable, "-m", module, "--config", str(config.path), *formats, *options]
        # Blocked from its first moment on, and taken when it can: so that it always ends with 0.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, "--channel", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**_environment(), "TMPDIR": str(scratch)},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.terminate()

    def end(self) -> str:
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.asked = code == 0  # nothing else ends it with 0
        if code >= 0:
            return f"it ended with code {code}"
        reason = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"it was killed by {signal.Signals(-code).name}{reason}"


class AcceptedTrainer:
    """A trainer that is a service of its own: the system starts it, and starts it again."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.asked = False

    def stop(self) -> None:
        """The system does; and it ends by itself where the channel does."""

    def end(self) -> str:
        return "it has closed the channel"


class TrainerSocket:
    """The socket file at which trainers of that kind connect, for this user alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listening = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        before = os.umask(0o177)  # from its first moment on
        try:
            self._listening.bind(str(path))
        except OSError as error:
            reason = f"cannot wait for a trainer here: {(error.strerror or str(error)).lower()}"
            raise ConfigError(reason, where=f"{path}: [site] trainer_socket") from error
        finally:
            os.umask(before)
        self._listening.listen(1)
        self._listening.settimeout(SILENCE_SECONDS)

    def accept(self) -> AcceptedTrainer:
        """:raises OSError: if nobody of this user comes for a while."""
        connection, _ = self._listening.accept()
        user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if user != os.geteuid():
            connection.close()
            raise PermissionError(errno.EPERM, "a process of another user has connected")
        return AcceptedTrainer(connection)


def _environment() -> dict[str, str]:
    """Without the addresses and passwords of proxies: whoever has no network needs none."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def note_data(state_dir: StateDir, ready: DataReady, *, private: bool) -> str:
    """Write down what the data hold, and say what has changed since the last start; both for the hospital alone."""
    now: dict[str, Any] = {"names": list(ready.class_names), "fingerprint": ready.fingerprint, "version": ready.version}
    now |= {side: list(row) for side, row in ready.counts.items()}
    before = state_dir.data_notes()
    change = log_events.data_change(before, now)
    changed = bool(before) and before.get("fingerprint") != ready.fingerprint
    (log.warning if changed else log.info)("data: %s", change)
    if private and changed and before.get("version") == ready.version:
        log.warning("data: log and federation are not told; to release class counts anew, change [data] version")
    state_dir.note_data(now | {"change": change})
    return change


def start_trainer(
    config: SiteConfig,
    manifest: Manifest,
    initial: InitialModel,
    state_dir: StateDir,
    identity: Identity,
    site: str,
    budget: Budget | None,
    privacy_log: AuditLog,
    *,
    log_format: str | None = None,
    module: str = "site_agent.trainer",
) -> tuple[Supervisor, str | None]:
    """A trainer of this site in a process of its own, with its data open. It has logged that itself: hence the None."""
    del initial  # the trainer reads it itself

    def setup() -> tuple[TrainerSetup, bytes]:
        terms = None if budget is None else budget.state.terms
        key = identity.data_key().hex()
        return TrainerSetup(site=site, data_key=key, best=state_dir.best_score, terms=terms), manifest.to_bytes()

    asked: IsolationMode = (
        "required" if "required" in (config.site.isolation, manifest.training.isolation) else "best"
    )

    def isolated(report: IsolationReport) -> None:
        """Into the log first, then judged: a start that is refused is known too."""
        privacy_log.append(log_events.trainer_isolated(asked, report), run=manifest.run)
        log.info("%s", report.sentence)
        if asked == "required" and (report.keys_readable or (report.connection_possible and not report.exception)):
            raise ConfigError(f"isolation is required, and {report.sentence}", where=WHERE, hint=HINT)

    def opened(ready: DataReady) -> None:
        private = manifest.privacy is not None
        change = note_data(state_dir, ready, private=private)
        if budget is not None:
            budget.take_version(ready.version)
        event = log_events.data_opened(config.data, ready.version, change, private=private)
        privacy_log.append(event, run=manifest.run, annex=log_events.data_annex(ready))

    waiting = None if config.trainer_socket is None else TrainerSocket(config.trainer_socket)
    supervisor = Supervisor(
        waiting.accept if waiting is not None else lambda: ChildTrainer(config, log_format, module=module),
        setup,
        words=manifest.aggregation.layout.state_words,
        seconds=float(manifest.timing.train),
        budget=budget,
        isolated=isolated,
        opened=opened,
    )
    supervisor.start()
    return supervisor, None
