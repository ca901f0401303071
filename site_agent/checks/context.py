"""What the checks of a site look at, made once each; and one connection to the coordinator to test it.

Clock, disk and memory are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from protos import tls  # before grpc: it switches TLS 1.2 off

import grpc  # isort: skip

from lazaret import checks
from lazaret.checks import CheckList, CheckVerdict, Line, Unchecked, shared
from lazaret.errors import ToolkitError, WorkerLost
from security.clock import Clock, SystemClock
from security.identity import pki
from security.identity.credentials import Credentials
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel, pinned_model
from security.identity.pki import Role
from security.identity.tls_probe import Destination, ask, ask_group, judge
from site_agent.config import CHECK_NAMES, CoordinatorTable, SiteConfig
from site_agent.privacy import ledger_files
from site_agent.trainer.channel import (
    RECEIVED_BY_AGENT,
    Channel,
    CheckDone,
    CheckLine,
    CheckOrder,
    CheckSetup,
    IsolationReport,
    Message,
    OrderFailed,
    OutwardAttempt,
    TrainerAlive,
    error_of,
)
from site_agent.trainer_process import SILENCE_SECONDS, CheckingTrainer

MOST_LINES: Final = 1000


# One connection with this site's own certificate: does the coordinator accept it, and what time does its clock show? A
# stream is opened and closed without a message, so that nothing is counted, logged as sent or changed.

SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """:param time_ms: the coordinator's clock; None if it is not sent."""

    time_ms: int | None


def try_connection(identity: Identity, table: CoordinatorTable, *, seconds: float = SECONDS) -> ProbeAnswer:
    """:raises ToolkitError: if the coordinator does not let this site in."""
    options = tls.channel_options(table.proxy)
    with grpc.secure_channel(table.address, tls.channel_credentials(identity), options=options) as channel:
        call = channel.stream_stream(tls.METHOD)(iter(()), timeout=seconds)
        try:
            metadata = dict(call.initial_metadata())
            for _ in call:
                pass  # an empty conversation has no answers
        except grpc.RpcError as error:
            raise _turned_away(error, table.address) from error
    time_ms = str(metadata.get(tls.TIME_KEY, ""))
    return ProbeAnswer(time_ms=int(time_ms) if time_ms.isdecimal() else None)


def _turned_away(error: Any, address: str) -> ToolkitError:
    code = error.code()
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return ToolkitError(
            f"the coordinator refuses this site: {error.details()}",
            where=address,
            hint="it may have another manifest than this site: ask its operator to install the newest one",
        )
    return ToolkitError(
        f"the coordinator refuses the connection of this site ({code.name.lower()})",
        where=address,
        hint="often the reason is this site's certificate: expired, of another root, or this machine's clock is wrong",
    )


@dataclass(eq=False, kw_only=True)
class SiteCheckContext:
    """One site's set-up.

    :param free: bytes that can still be written to a folder.
    :param available: bytes of memory that can still be taken; None if the system does not report it.
    :param progress: whether somebody watches.
    :param process: the one that looks at images, if it was started before; closed with this.
    """

    config: SiteConfig
    clock: Clock = field(default_factory=SystemClock)
    free: Callable[[Path], int] = checks.free_bytes
    available: Callable[[], int | None] = checks.available_memory
    progress: bool = False
    process: CheckingTrainer | None = None
    _started: CheckingProcess | None = field(default=None, init=False)

    @cached_property
    def credentials(self) -> Credentials:
        return Credentials(Identity(folder=self.config.identity), Role.SITE, self.clock, program="site-agent")

    @property
    def manifest(self) -> Manifest:
        return self.credentials.manifest

    @property
    def member(self) -> str:
        """Our own name, by our certificate."""
        identity = self.credentials.identity
        return pki.subject_of(identity.tls_certificate(), str(identity.tls_path)).member

    @property
    def destination(self) -> Destination:
        return Destination.parse(self.config.coordinator.address, self.config.coordinator.proxy)

    @shared("the coordinator cannot be reached")
    def served(self) -> tuple[Line, ...]:
        """Who answers at the coordinator's address, and what to think of it."""
        identity = self.credentials.identity
        served = ask(self.destination)
        with suppress(ToolkitError):  # it has answered once; which keys it would agree on is said if it says so
            served = replace(served, group=ask_group(self.destination))
        return tuple(judge(served, self.destination, identity.root(), self._manifest(), now_ms=self.credentials.now_ms))

    def _manifest(self) -> Manifest | None:
        """Another check reports what is wrong with it."""
        try:
            return self.manifest
        except (ToolkitError, Unchecked):
            return None

    @shared("the coordinator could not be asked")
    def answer(self) -> ProbeAnswer:
        """Nobody but our coordinator is shown this site's certificate."""
        if any(line.verdict is CheckVerdict.PROBLEM for line in self.served):
            raise Unchecked("the coordinator could not be asked")
        try:
            self.credentials.identity.tls_key()
        except ToolkitError:
            raise Unchecked("there is no key to connect with") from None
        return try_connection(self.credentials.identity, self.config.coordinator)

    @shared("the initial model cannot be used")
    def initial(self) -> InitialModel:
        return pinned_model(self.config.model_file(self.manifest.model.initial_file), self.manifest)[0]

    @shared("the process that looks at images cannot be started")
    def data_process(self) -> CheckingProcess:
        """One trainer's process for all checks that need one. It sees the images, and has neither network nor keys."""
        self.process = self.process or CheckingTrainer(self.config)
        self._started = CheckingProcess(self.process, self._setup)
        return self._started

    def _setup(self) -> tuple[CheckSetup, bytes]:
        private = self.manifest.privacy is not None
        setup = CheckSetup(
            site=self.credentials.subject.member,
            data_key=self.credentials.identity.data_key().hex(),
            ledger=private and ledger_files(self.config).peek() is not None,
            available=self.available(),
            progress=self.progress,
        )
        return setup, self.manifest.to_bytes()

    def close(self) -> None:
        if self._started is not None:
            self._started.close()
        elif self.process is not None:
            self.process.connection.close()
            self.process.end()


class CheckingProcess:
    """A trainer's process that makes checks, and the conversation with it. Nothing that it says is believed to be more
    than a line for people."""

    def __init__(self, process: CheckingTrainer, setup: Callable[[], tuple[CheckSetup, bytes]]) -> None:
        self._setup: Callable[[], tuple[CheckSetup, bytes]] | None = setup
        self._process = process
        self._process.connection.settimeout(SILENCE_SECONDS)
        self._channel = Channel(self._process.connection, RECEIVED_BY_AGENT)
        self._gone = False
        try:
            self.isolation: Final = self._report()
        except BaseException:
            self.close()
            raise

    def _report(self) -> IsolationReport:
        report = self._next()
        if not isinstance(report, IsolationReport):
            raise WorkerLost("the process that is to see images has not said how it is isolated", where="trainer")
        return report

    def ask(self, name: str) -> Iterator[Line]:
        """The lines of one check.

        :raises WorkerLost: if the process ends meanwhile.
        :raises Unchecked: if it has ended before.
        """
        if self._gone:
            raise Unchecked("the process that looks at images is gone")
        if self._setup is not None:
            self._channel.send(*self._setup())
            self._setup = None
        self._channel.send(CheckOrder(name=name))
        for _ in range(MOST_LINES):
            match self._next():
                case CheckLine(verdict=verdict, what=what, hint=hint):
                    yield Line(verdict=CheckVerdict(verdict), what=what, hint=hint)
                case CheckDone():
                    return
                case other:
                    raise WorkerLost(f"{type(other).__name__} is no answer to a check", where="trainer")
        raise WorkerLost("a check has too many findings", where="trainer")

    def _next(self) -> Message:
        while True:
            try:
                received = self._channel.receive()
            except TimeoutError:
                received = None
            if received is None:
                self._gone = True
                self._channel.close()
                raise WorkerLost(f"the process that looks at images is gone: {self._process.end()}", where="trainer")
            message: Message = received[0]
            if isinstance(message, OrderFailed):
                raise error_of(message)
            if not isinstance(message, TrainerAlive | OutwardAttempt):
                return message

    def close(self) -> None:
        self._channel.close()
        self._process.end()


CHECKS: Final = CheckList[SiteCheckContext](CHECK_NAMES)
