"""Differential privacy as options of a cell: `dp.epsilon` turns it on, the others say how.

They are options like any other, so that `--grid dp.epsilon=null,8,3` draws accuracy against epsilon in one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from npr.dp.federation import PrivateFederation, PrivatePlan
from npr.federation import Federation
from npr.lab.plan import Frozen, Value
from security.dp.settings import PREFIX, PrivateSettings
from security.errors import ConfigError


class PrivateOptions(Frozen):
    """What `dp.KEY` may be. The noise of the gradients follows from epsilon and the rest."""

    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    steps: int = Field(default=10, ge=1)
    rate: float = Field(default=0.25, gt=0, le=1)
    clip: float = Field(default=1.0, gt=0)
    counts_sigma: float = Field(default=5.0, gt=0)
    prototypes_sigma: float = Field(default=10.0, gt=0)
    prototypes_every: int = Field(default=5, ge=1)
    dimensions: int = Field(default=64, ge=1)

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> PrivateOptions:
        """From the options of a cell; those without the prefix are not for us."""
        told = {key.removeprefix(PREFIX): value for key, value in values.items() if key.startswith(PREFIX)}
        try:
            options = cls.model_validate(told)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{PREFIX}{first['loc'][0]}: {first['msg'].lower()}", where="--dp") from error
        if told and "epsilon" not in told:
            raise ConfigError("differential privacy with no epsilon", where="--dp", hint="--dp epsilon=8")
        return options

    def plan(self, *, rounds: int, prototypes: bool) -> PrivatePlan | None:
        """The schedule with the least noise that keeps the whole run within epsilon; None when privacy is off."""
        if self.epsilon is None:
            return None
        settings = PrivateSettings(
            steps=self.steps,
            rate=self.rate,
            counts_sigma=self.counts_sigma,
            prototypes_sigma=self.prototypes_sigma if prototypes else None,
            prototypes_every=self.prototypes_every,
            dimensions=self.dimensions,
        )
        schedule = settings.schedule(rounds=rounds, multiplier=1.0, clip=self.clip)
        return PrivatePlan.for_epsilon(
            self.epsilon, delta=self.delta, schedule=schedule, dimensions=self.dimensions
        )


KEYS = frozenset(PREFIX + name for name in PrivateOptions.model_fields)


def privacy_of(federation: Federation) -> dict[str, Any] | None:
    """What each site has spent, for the results; None without privacy."""
    if not isinstance(federation, PrivateFederation):
        return None
    spent = federation.spent()
    return {
        "unit": federation.dataset.sites[0].train.unit_kind,
        "spent": {name: {"rdp": round(each.rdp, 4), "pld": round(each.pld, 4)} for name, each in spent.items()},
    }
