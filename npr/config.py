"""How a site trains: one frozen object, validated once, with a canonical digest that results and manifests carry."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final, Literal

import rfc8785
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lazaret.errors import ConfigError

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

Norm = Literal["batch", "frozen", "group"]  # of a model's layers
LabelsOfImage = Literal["one", "many"]


DEVICE: Final = r"^(auto|cpu|mps|(cuda|xpu)(:[0-9]{1,3})?)$"
Precision = Literal["auto", "float32", "bfloat16", "float16"]


class DeviceSettings(BaseModel):
    """Where a site computes and in which precision (docs/devices.md). Each site's own: it is in no digest, because
    what sites share is computed from whole numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Annotated[str, Field(pattern=DEVICE)] = "auto"
    precision: Precision = "auto"
    deterministic: bool = False
    micro_batch: Count | None = None
    checkpointing: bool = False
    compiled: bool = False


class TrainConfig(BaseModel):
    """Training settings; the defaults are the paper's where the paper is right, see docs/methods.md for each key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = "fednpr"
    method_options: dict[str, bool | int | float | str] = Field(default_factory=dict)

    # Whether an image has one class of several, or any number of labels (npr/task.py).
    labels: LabelsOfImage = "one"

    # Optimisation. Rounds count from 1; from round `milestones[i]` on, the rate is multiplied by `decay` once more.
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 5e-4
    head_decay: NotNegative = 0.0
    batch_size: Count = 64
    local_epochs: Count = 1
    milestones: tuple[int, ...] = (60, 70)
    decay: Positive = 0.1
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    optimizer_state: Literal["persist", "reset"] = "persist"
    augmentation: Literal["none", "standard", "paper"] = "standard"
    local_bn: bool = False

    # Supervision. `prior_floor` is None for an exact mask of absent classes; the released code adds 1e-9 instead.
    supervision: Literal["bsm", "ce", "none"] = "bsm"
    prior_floor: Positive | None = None

    # Non-parametric regularisation.
    lambda_npr: NotNegative = 0.1
    temperature: Positive = 0.1
    logit_norm: Literal["none", "layernorm"] = "none"
    npr_balance: Literal["none", "prior", "class_mean"] = "none"
    lambda_added: bool = False
    lambda_rounds: Annotated[int, Field(ge=0)] = 0
    clusters: Count = 4
    clusters_by: Literal["count", "explained"] = "count"
    min_per_cluster: Count = 4
    sinkhorn_smoothing: Positive = 0.05
    assign: Literal["sinkhorn_argmax", "sinkhorn_soft", "nearest", "random_subset"] = "sinkhorn_argmax"
    alternations_first: Count = 3
    alternations: Count = 1
    prototype_momentum: Share = 0.0
    prototype_source: Literal["exact", "epoch"] = "exact"

    # Personal heads and prediction. Up to round `personal_after` the head is shared like the rest; then it stays home.
    # `predict = "auto"` is what the method was registered with.
    personal_after: Annotated[int, Field(ge=0)] = 0
    personal_start: Literal["shared", "prototypes"] = "shared"
    predict: Literal["auto", "head", "prototype", "both"] = "auto"
    predict_mix: Share = 0.5
    predict_present_only: bool = False

    @classmethod
    def parse(cls, values: dict[str, Any], *, where: str | None = None) -> TrainConfig:
        """Build from plain values; a mistake names its key."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{key} = {first.get('input')!r}: {first['msg'].lower()}",
                where=where,
                hint="keys and their values are listed in docs/methods.md",
            ) from error

    def changed(self, **values: Any) -> TrainConfig:
        """A copy with other values, validated again."""
        return TrainConfig.parse(self.model_dump() | values)

    @property
    def config_hash(self) -> str:
        """SHA-256 of the canonical JSON of every key."""
        return hashlib.sha256(rfc8785.dumps(self.model_dump(mode="json"))).hexdigest()

    def rate(self, round_number: int) -> float:
        """The learning rate of a round, counted from 1."""
        return self.learning_rate * self.decay ** sum(round_number >= milestone for milestone in self.milestones)


# What the authors' released code does where it differs from the paper's text or from what we hold right: an epsilon
# prior instead of a mask, decay on every row, standardised logits, lambda added instead of multiplied (so that NPR
# always weighs 1), sub-clusters that are random subsets, K whatever the class size, Adam kept over the rounds, and the
# head alone predicts.
PAPER_LITERAL: dict[str, Any] = {
    "prior_floor": 1e-9,
    "head_decay": 5e-4,
    "optimizer": "adam",
    "optimizer_state": "persist",
    "logit_norm": "layernorm",
    "temperature": 1.0,
    "lambda_added": True,
    "assign": "random_subset",
    "min_per_cluster": 1,
    "alternations_first": 1,
    "alternations": 1,
    "augmentation": "paper",
    "predict": "head",
}


def paper_literal(config: TrainConfig) -> TrainConfig:
    """`config` with every switch set the way the released code behaves."""
    return config.changed(**PAPER_LITERAL)
