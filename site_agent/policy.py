"""What this hospital permits. The coordinator cannot override it; a refusal names the rule, in the local log only."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lazaret.errors import NotNow, PolicyViolation

if TYPE_CHECKING:  # they load numpy, which starts threads; the trainer reads this module before it is isolated
    from security.identity.manifest import Manifest, PluginFile
    from security.identity.membership import Membership

ASK_AGAIN_SECONDS: Final = 3600
_OWN_RULE: Final = "a rule of this hospital, in site.toml"


def _check_hours(text: str) -> str:
    found = re.fullmatch(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", text)
    if not found:
        raise ValueError("expected two times of day such as 20:00-06:00")
    return text


class Range(BaseModel):
    """The range of a setting."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    least: float | int | None = None
    most: float | int | None = None


class SitePolicy(BaseModel):
    """The table [policy] of site.toml. What is left out does not restrict; but no plugin is approved unless listed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    methods: tuple[str, ...] | None = None
    architectures: tuple[str, ...] | None = None
    settings: dict[str, Range] = Field(default_factory=dict)
    least_cohort: Annotated[int, Field(ge=2, le=255)] = 3
    most_rounds: Annotated[int, Field(ge=1)] | None = None
    most_bytes_per_round: Annotated[int, Field(ge=1)] | None = None
    hours: Annotated[str, AfterValidator(_check_hours)] | None = None
    require_privacy: bool = False
    most_epsilon: Annotated[float, Field(gt=0)] | Annotated[int, Field(gt=0)] | None = None
    most_epsilon_alone: Annotated[float, Field(gt=0)] | Annotated[int, Field(gt=0)] | None = None
    most_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    require_covered_audit: bool = False
    required_classes: tuple[str, ...] = ()
    share_metrics: bool = True
    share_scores: bool = False
    plugins: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = ()
    accept_runs: Literal["ask", "within_policy"] = "ask"

    def check_federation(self, manifest: Manifest) -> None:
        """Everything that the manifest alone decides.

        :raises PolicyViolation: where the federation is not one that this hospital takes part in.
        """
        training = manifest.training
        if self.methods is not None and training.method not in self.methods:
            raise _refused("methods", f"{training.method} is not among those permitted")
        if self.architectures is not None and manifest.model.architecture not in self.architectures:
            raise _refused("architectures", f"{manifest.model.architecture} is not among those permitted")
        for name, allowed in self.settings.items():
            _check_setting(name, allowed, training.settings.get(name))
        if self.require_covered_audit and manifest.audit.mode != "covered":
            raise _refused("require_covered_audit", "sums are only sampled in this federation")
        self.check_plugin(training.plugin)
        self._check_privacy(manifest)

    def check_plugin(self, pinned: PluginFile | None) -> None:
        """A method that no release has runs here only if this hospital has approved exactly its file.

        :raises PolicyViolation: if it has not. Names both digests.
        """
        if pinned is not None and pinned.sha256 not in self.plugins:
            raise _refused(
                "plugins",
                f"the manifest pins the plugin {pinned.name} with SHA-256 {pinned.sha256}; "
                f"approved here: {', '.join(self.plugins) or 'none'}",
            )

    def check_consent(self, manifest: Manifest, site: str) -> None:
        """Who consents to scores is in the manifest, and must be in this table too.

        :raises PolicyViolation: if the manifest counts on scores of this hospital that it does not give. To send
            nothing instead would leave the others' scores among fewer sites than the manifest promises.
        """
        if manifest.scored(site) and not self.share_scores:
            raise _refused("share_scores", "the manifest lists this hospital among those whose scores are summed")

    def _check_privacy(self, manifest: Manifest) -> None:
        if self.require_privacy and manifest.privacy is None:
            raise _refused("require_privacy", "this federation trains without differential privacy")
        if self.most_delta is not None and manifest.privacy is not None:
            delta = float(manifest.privacy.delta)
            if delta > self.most_delta:
                raise _refused("most_delta", f"the manifest's delta of {delta:g} is above {self.most_delta:g}")
        if self.most_epsilon is not None and manifest.privacy is not None:
            asked = float(manifest.privacy.epsilon)
            if asked > self.most_epsilon:
                raise _refused("most_epsilon", f"the manifest's epsilon of {asked} is above {self.most_epsilon}")
        if self.most_epsilon_alone is not None and manifest.privacy is not None:
            # Imported here: it loads numpy (see above).
            from site_agent.privacy import run_alone

            alone = run_alone(manifest)
            if not alone <= self.most_epsilon_alone:
                raise _refused(
                    "most_epsilon_alone",
                    f"if all other sites collude, this run costs {alone:.2f}, above {self.most_epsilon_alone}",
                )

    def check_private(self) -> None:
        """Rules that read the data are not possible under differential privacy: a refusal reveals something of them."""
        if self.required_classes:
            raise _refused("required_classes", "an exact test for absent classes would make epsilon invalid")

    def check_order(self, manifest: Manifest, round_number: int, *, done: int, now: dt.datetime) -> None:
        """Whether to train this round, now (local time).

        :param done: rounds that this site has trained so far, lost ones included.
        """
        self.check_federation(manifest)
        rounds = manifest.training.rounds
        if round_number > _latest_round(rounds):
            raise PolicyViolation(
                f"round {round_number} of a run of {rounds} rounds", where="manifest [training] rounds"
            )
        if self.most_rounds is not None and done >= self.most_rounds:
            raise _refused("most_rounds", f"this site has trained {done} rounds already")
        if self.hours is not None and not _within(self.hours, now.time()):
            begin = _next_start(self.hours, now)
            raise NotNow(
                f"{now:%H:%M} is outside of {self.hours}, next at {begin:%Y-%m-%d %H:%M}",
                seconds=max(1, math.ceil(begin.timestamp() - now.timestamp())),
                where="[policy] hours",
                hint=_OWN_RULE,
            )
        vector = manifest.aggregation.layout.byte_length
        if self.most_bytes_per_round is not None and vector > self.most_bytes_per_round:
            raise _refused("most_bytes_per_round", f"the vector alone has {vector} bytes")

    def check_classes(self, names: Sequence[str], counts: Sequence[int]) -> None:
        """Whether there are training images of every required class.

        :param counts: training images of each class, in the order of `names`.
        """
        held = dict(zip(names, counts, strict=True))
        for name in self.required_classes:
            if name not in held:
                raise _refused("required_classes", f"there is no class {name!r}; there are {', '.join(names)}")
            if held[name] == 0:
                raise PolicyViolation(
                    f"class {name!r} has no training image",
                    where="[policy] required_classes",
                    hint="check [data] source and fold; or remove the class from the list, if that is intended",
                )

    def check_cohort(self, size: int) -> None:
        """Whether the cohort is large enough for this hospital."""
        if size < self.least_cohort:
            raise _refused("least_cohort", f"a cohort of {size} is smaller than {self.least_cohort}")

    def check_bytes(self, sent: int) -> None:
        """Whether one more message stays within the bytes of a round."""
        if self.most_bytes_per_round is not None and sent > self.most_bytes_per_round:
            raise _refused("most_bytes_per_round", f"{sent} bytes in one round")


def _latest_round(rounds: int) -> int:
    """Rounds that were lost use numbers up, so that a run reaches numbers above its rounds; within reason."""
    return 4 * rounds + 16


def _check_setting(name: str, allowed: Range, found: bool | int | str | None) -> None:
    try:
        value = float(found) if found is not None else None
    except ValueError:
        value = None
    if value is None:
        raise _refused(f"settings.{name}", "the manifest does not set it to a number")
    if (allowed.least is not None and value < allowed.least) or (allowed.most is not None and value > allowed.most):
        raise _refused(f"settings.{name}", f"{value:g} is outside of {allowed.least} to {allowed.most}")


def _within(hours: str, now: dt.time) -> bool:
    start, end = (dt.time.fromisoformat(part) for part in hours.split("-"))
    return start <= now < end if start <= end else now >= start or now < end


def _next_start(hours: str, now: dt.datetime) -> dt.datetime:
    """When the hours begin again, in the local time of that day: clocks may be changed in between."""
    start = dt.time.fromisoformat(hours.partition("-")[0])
    today = dt.datetime.combine(now.date(), start)
    return today if today > now.replace(tzinfo=None) else today + dt.timedelta(days=1)


def _refused(rule: str, why: str) -> PolicyViolation:
    return PolicyViolation(why, where=f"[policy] {rule}", hint=_OWN_RULE)


def check_standing(membership: Membership, *, now_ms: int) -> None:
    """Whether a cohort can come about until the end of a round that is ordered now, with certificates as they are. A
    round that cannot end well would cost work, and a part of the privacy budget (docs/threat-model.md).

    :raises NotNow: if it cannot; the consortium has to renew certificates.
    :raises PolicyViolation: if the manifest has expired.
    """
    membership.policy.check_fresh(now_ms)
    until = now_ms + 1000 * membership.manifest.timing.train
    then, today, site = membership.at(until).policy, membership.at(now_ms).policy, membership.signer.site
    if (ends := today.ended(now_ms) or then.ended(until)) is not None:
        raise NotNow(
            f"{ends} must be valid until the end of the round",
            seconds=ASK_AGAIN_SECONDS,
            where="manifest",
            hint="the consortium renews it, and publishes a new manifest",
        )
    able = [entry.site for entry in today.roster if today.lists(entry.site) and then.lists(entry.site)]
    least = 2 if today.allow_two_site and len(today.roster) == 2 else today.least_cohort
    if site in able and len(able) >= least:
        return
    whose = f"{len(able)} sites have one, {least} are needed" if site in able else "this site has none"
    raise NotNow(
        f"certificates must be valid until the end of the round: {whose}",
        seconds=ASK_AGAIN_SECONDS,
        where="manifest [roster]",
        hint="renew: `site-agent renew`, `consortium renew`, and a new manifest",
    )


def attempt_bytes(manifest: Manifest, members: int) -> int:
    """What one attempt costs at most: the vector, and beside it some hundred bytes for each member and chunk."""
    vector = manifest.aggregation.layout.byte_length
    return vector + vector // 256 + 4096 + 512 * members
