"""A trainer as a process: a child that this one starts, or a service that connects to a socket file.

It imports little, so that `site-agent check` starts one at once and loads its own modules meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Timer
from typing import Final, Protocol

from lazaret.errors import ConfigError
from lazaret.process import ENDING
from security.identity.token import PIN_VARIABLE, pin_files
from site_agent.config import SiteConfig

SILENCE_SECONDS: Final = 120.0
STOP_SECONDS: Final = 5.0


class Launched(Protocol):
    """A trainer's process, started by us or by the system.

    :ivar asked: after its end: it was told to end, by a signal for instance, and has no fault.
    """

    connection: socket.socket
    asked: bool

    def stop(self) -> None:
        """Tell it to end, whatever it is doing."""
        ...

    def end(self) -> str:
        """Make sure that it is gone, and say how it ended."""
        ...


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
        self.asked, self._reaping = False, Lock()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if scratch is None:
            scratch = config.state / "scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(mode=0o700)
        words = [*(["--log-format", log_format] if log_format else ()), *closed_words(config), *options]
        # -P: a plugin imports nothing that happens to lie in the folder that the agent was started in.
        command = [sys.executable, "-P", "-m", module, "--config", str(config.path), *words]
        # Blocked from its first moment on, and taken when it can: so that it always ends with 0.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, "--channel", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**_environment(), "TMPDIR": str(scratch)},
                    process_group=0,  # of its own, which what it starts cannot leave
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        with self._reaping:
            if self._process.returncode is None:
                os.kill(self.pid, signal.SIGTERM)

    def end(self) -> str:
        if self._process.returncode is None:
            late = Timer(STOP_SECONDS, os.kill, (self.pid, signal.SIGKILL))
            late.start()
            # Left as it is until what it has started is gone too: its number, and that of its group, stay taken.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            late.cancel()
            late.join()
            with self._reaping:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
        code = self._process.returncode
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


def closed_words(config: SiteConfig) -> list[str]:
    """Tell a trainer where the PINs of tokens are: it opens no key file to find out."""
    return [word for path in pin_files(config.identity) if path.exists() for word in ("--closed", str(path))]


def _environment() -> dict[str, str]:
    """Without the addresses and passwords of proxies and the PIN of a token: whoever has no network needs none."""
    hidden = PIN_VARIABLE.lower()
    return {name: value for name, value in os.environ.items() if not name.lower().endswith(("_proxy", hidden))}


class CheckingTrainer(ChildTrainer):
    """One that makes the checks of `site-agent check`, in a folder of its own, and keeps nothing."""

    def __init__(self, config: SiteConfig) -> None:
        self._folder = TemporaryDirectory(prefix="lazaret-")
        try:
            super().__init__(config, scratch=Path(self._folder.name), options=("--check",))
        except BaseException:
            self._folder.cleanup()
            raise

    def end(self) -> str:
        how = super().end()
        self._folder.cleanup()
        return how
