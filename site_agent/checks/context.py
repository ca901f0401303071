"""What the checks of a site look at, made once each. Clock, disk and memory are passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from npr.data.catalogue import assemble
from npr.data.dataset import FederatedDataset, SiteData
from npr.data.survey import Survey, survey
from security import keystore
from security.clock import Clock, SystemClock
from security.consortium.enrolment import Identity
from security.consortium.initial_model import InitialModel, pinned_model
from security.consortium.manifest import Manifest
from security.errors import ToolkitError
from security.pki import Role
from security.preflight import machine
from security.preflight.dialling import Destination, ask, judge
from security.preflight.lines import Line, Unchecked, Verdict, shared
from security.preflight.papers import Papers
from site_agent.checks.knocking import Answer, knock
from site_agent.config import SiteConfig
from site_agent.data import check_class_count, image_size_of, ours

if TYPE_CHECKING:
    from npr.wire_layout import Recipe


@dataclass(eq=False, kw_only=True)
class Context:
    """One site's set-up.

    :param free: bytes that can still be written to a folder.
    :param available: bytes of memory that can still be taken; None where the system does not tell.
    """

    config: SiteConfig
    clock: Clock = field(default_factory=SystemClock)
    free: Callable[[Path], int] = machine.free_bytes
    available: Callable[[], int | None] = machine.available_memory

    @cached_property
    def papers(self) -> Papers:
        return Papers(Identity(folder=self.config.identity), Role.SITE, self.clock, program="site-agent")

    @property
    def manifest(self) -> Manifest:
        return self.papers.manifest

    @property
    def destination(self) -> Destination:
        return Destination.parse(self.config.coordinator.address, self.config.coordinator.proxy)

    @shared("the coordinator cannot be reached")
    def served(self) -> tuple[Line, ...]:
        """Who answers at the coordinator's address, and what to think of it."""
        identity = self.papers.identity
        served = ask(self.destination)
        return tuple(judge(served, self.destination, identity.root(), self._manifest(), now_ms=self.papers.now_ms))

    def _manifest(self) -> Manifest | None:
        """What is wrong with it is told elsewhere."""
        try:
            return self.manifest
        except (ToolkitError, Unchecked):
            return None

    @shared("the coordinator could not be asked")
    def answer(self) -> Answer:
        """Nobody but our coordinator is shown this site's certificate."""
        if any(line.verdict is Verdict.PROBLEM for line in self.served):
            raise Unchecked("the coordinator could not be asked")
        try:
            keystore.load_tls_key(self.papers.identity.tls_key_path())
        except ToolkitError:
            raise Unchecked("there is no key to show the coordinator") from None
        return knock(self.papers.identity, self.config.coordinator)

    @shared("the initial model cannot be used")
    def initial(self) -> InitialModel:
        return pinned_model(self.config.initial_model, self.manifest)[0]

    @shared("the settings are not those of the manifest")
    def recipe(self) -> Recipe:
        from site_agent.trainer import recipe_of  # imports torch

        return recipe_of(self.manifest)

    @shared("the data set cannot be listed")
    def survey(self) -> Survey:
        table = self.config.data
        size = image_size_of(self.manifest)
        return survey(table.source, image_size=size, seed=table.seed, class_names=table.class_names)

    @shared("the data set cannot be divided")
    def dataset(self) -> FederatedDataset:
        """The fold in force, without pixels."""
        table = self.config.data
        found = assemble(
            self.survey.catalogue,
            fold=table.fold,
            folds=table.folds,
            seed=table.seed,
            validation=float(table.validation),
        )
        check_class_count(found, table, self.manifest.model.classes)
        return found

    @shared("this site's part of the data set is not known")
    def data(self) -> SiteData:
        return ours(self.dataset, self.config.data, self.papers.subject.member)
