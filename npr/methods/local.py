"""Local learning: every site alone, with the same number of steps. The reference for whether federation is worth it."""

from __future__ import annotations

from typing import ClassVar

from npr.methods.base import Kind, Method
from npr.methods.registry import register


@register("local", "every site trains alone; nothing is exchanged")
class Local(Method):
    shared: ClassVar[frozenset[str]] = frozenset()
    personal: ClassVar[bool] = True
    models: ClassVar[tuple[Kind, ...]] = ("local",)
