"""How a federation trains privately, as the `dp.*` settings of its manifest say it. Equal at all sites, hence public.

The manifest's table [privacy] holds the promise (epsilon, delta, clip, least noise, unit); these settings hold the
schedule that keeps it (docs/spec/differential-privacy.md, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self

from security.dp.events import counts_event, prototypes_event, rate_at_least
from security.dp.planner import Schedule
from security.errors import ConfigError

PREFIX: Final = "dp."
Norm = Literal["frozen", "group"]
NORMS: Final = ("frozen", "group")
_WHOLE: Final = frozenset({"steps", "prototypes_every", "dimensions"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSettings:
    """What all sites do alike in a private round.

    :param rate: chance of a patient to be drawn in one step.
    :param prototypes_sigma: noise of a prototype release; None for a method without prototypes.
    :param dimensions: width that features are projected to before prototypes are released.
    :param norm: what stands in the place of BatchNorm in the initial model (npr/dp/freeze_norm.py).
    """

    steps: int = 10
    rate: float = 0.05
    counts_sigma: float = 5.0
    prototypes_sigma: float | None = 10.0
    prototypes_every: int = 5
    dimensions: int = 64
    norm: Norm = "group"

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{value!r} is not a whole number above zero", where=PREFIX + name)
        if self.norm not in NORMS:
            raise ConfigError(f"{self.norm!r} is not one of {', '.join(NORMS)}", where=f"{PREFIX}norm")
        rate_at_least(self.rate)
        counts_event(self.counts_sigma)
        if self.prototypes_sigma is not None:
            prototypes_event(self.prototypes_sigma)

    def schedule(self, *, rounds: int, multiplier: float, clip: float, metrics_sigma: float | None = None) -> Schedule:
        """The whole run at this much gradient noise."""
        return Schedule(
            rounds=rounds,
            steps=self.steps,
            rate=rate_at_least(self.rate),
            multiplier=multiplier,
            clip=clip,
            counts_sigma=self.counts_sigma,
            prototypes_sigma=self.prototypes_sigma,
            prototypes_every=self.prototypes_every,
            metrics_sigma=metrics_sigma,
        )

    def to_settings(self) -> dict[str, int | float | str]:
        """For a plan's [training.settings]; what is None is left out."""
        return {PREFIX + name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, where: str = "manifest [training.settings]") -> Self | None:
        """From all settings of a manifest, where decimals are text; None without a single `dp.` key."""
        told = {name.removeprefix(PREFIX): value for name, value in settings.items() if name.startswith(PREFIX)}
        if not told:
            return None
        known = [field.name for field in fields(cls)]
        for name in told:
            if name not in known:
                raise ConfigError(f"unknown setting {PREFIX}{name}", where=where, hint=f"there are {', '.join(known)}")
        try:
            values: dict[str, Any] = {
                name: value if name in _WHOLE or name == "norm" else float(value) for name, value in told.items()
            }
        except (TypeError, ValueError) as error:
            raise ConfigError("a dp. setting is not a number", where=where) from error
        # Absent means no prototypes; the default of the class is for people who type options.
        return cls(**{"prototypes_sigma": None} | values)
