"""Every site alone: the references for whether federation is worth it."""

from __future__ import annotations

from typing import ClassVar

from npr.methods.base import Kind, Method
from npr.methods.registry import register
from npr.methods.site import Site
from npr.training import NOTHING, LocalReport


@register("local", "every site trains alone; nothing is exchanged")
class Local(Method):
    shared: ClassVar[frozenset[str]] = frozenset()
    personal: ClassVar[bool] = True
    models: ClassVar[tuple[Kind, ...]] = ("local",)
    one_label: ClassVar[str] = ""


@register("frozen", "laboratory only: the initial features, nothing is trained; a site fits its own head to them")
class FrozenFeatures(Local):
    """The head is never trained, so that prototypes or a refitted head predict."""

    wire: ClassVar[bool] = False

    @property
    def trains_head(self) -> bool:
        return False

    def local_round(self, site: Site, round_number: int) -> LocalReport:
        del site, round_number
        return NOTHING
