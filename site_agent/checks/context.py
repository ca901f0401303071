"""What the checks of a site look at, made once each; and one connection to the coordinator to test it.

Clock, disk and memory are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from protos import tls  # before grpc: it switches TLS 1.2 off

import grpc  # isort: skip
from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lazaret import checks
from lazaret.checks import CheckList, CheckVerdict, Line, Unchecked, shared
from lazaret.errors import ToolkitError
from npr.data.catalogue import assemble
from npr.data.dataset import FederatedDataset, SiteData
from npr.data.sources import Survey, survey
from security.clock import Clock, SystemClock
from security.identity import keystore
from security.identity.credentials import Credentials
from security.identity.enrolment import Identity
from security.identity.initial_model import InitialModel, pinned_model
from security.identity.manifest import Manifest
from security.identity.pki import Role
from security.identity.tls_probe import Destination, ask, judge
from site_agent.config import CHECK_NAMES, CoordinatorTable, SiteConfig
from site_agent.privacy import ledger_files
from site_agent.trainer.data import image_size_of, ours, side_rule

if TYPE_CHECKING:
    from npr.wire_layout import Recipe



# One connection with this site's own certificate: does the coordinator accept it, and what time does its clock show? A
# stream is opened and closed without a message, so that nothing is counted, logged as sent or changed.

SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """:param time_ms: the coordinator's clock; None if it is not sent."""

    time_ms: int | None


def knock(identity: Identity, table: CoordinatorTable, *, seconds: float = SECONDS) -> ProbeAnswer:
    """:raises ToolkitError: if the coordinator does not let this site in."""
    credentials = tls.channel_credentials(identity)
    with grpc.secure_channel(table.address, credentials, options=tls.channel_options(table.proxy)) as channel:
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
    """

    config: SiteConfig
    clock: Clock = field(default_factory=SystemClock)
    free: Callable[[Path], int] = checks.free_bytes
    available: Callable[[], int | None] = checks.available_memory

    @cached_property
    def credentials(self) -> Credentials:
        return Credentials(Identity(folder=self.config.identity), Role.SITE, self.clock, program="site-agent")

    @property
    def manifest(self) -> Manifest:
        return self.credentials.manifest

    @property
    def destination(self) -> Destination:
        return Destination.parse(self.config.coordinator.address, self.config.coordinator.proxy)

    @shared("the coordinator cannot be reached")
    def served(self) -> tuple[Line, ...]:
        """Who answers at the coordinator's address, and what to think of it."""
        identity = self.credentials.identity
        served = ask(self.destination)
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
            keystore.load_tls_key(self.credentials.identity.tls_key_path())
        except ToolkitError:
            raise Unchecked("there is no key to connect with") from None
        return knock(self.credentials.identity, self.config.coordinator)

    @shared("the initial model cannot be used")
    def initial(self) -> InitialModel:
        return pinned_model(self.config.initial_model, self.manifest)[0]

    @shared("the settings are not those of the manifest")
    def recipe(self) -> Recipe:
        from site_agent.trainer.training import recipe_of  # imports torch

        return recipe_of(self.manifest)

    @shared("the data set cannot be listed")
    def survey(self) -> Survey:
        table = self.config.data
        size = image_size_of(self.manifest)
        return survey(
            table.source,
            image_size=size,
            seed=table.seed,
            class_names=self.manifest.model.classes,
            class_map=table.class_map,
        )

    @shared("the data set cannot be divided")
    def dataset(self) -> FederatedDataset:
        """The fold in force, without pixels."""
        table = self.config.data
        if self.manifest.privacy is not None and ledger_files(self.config).peek() is None:
            raise Unchecked("patients get their sides by a key that is made with the ledger")
        return assemble(
            self.survey.catalogue,
            fold=table.fold,
            rule=side_rule(self.config, self.manifest, self.credentials.identity.data_key(), keep=False),
        )

    @shared("this site's part of the data set is not known")
    def data(self) -> SiteData:
        return ours(self.dataset, self.config.data, self.credentials.subject.member)


CHECKS: Final = CheckList[SiteCheckContext](CHECK_NAMES)
