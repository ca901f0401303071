"""Which models and settings may be trained under differential privacy (the upstream rule).

docs/spec/differential-privacy.md, section 2. BatchNorm mixes the records of a batch, so it is replaced. A pretrained
model keeps its public statistics as a frozen scale and shift (timm's FrozenBatchNorm), which keeps the pretrained fit.
A model trained from scratch has no such statistics and gets GroupNorm, which uses one record at a time. Opacus'
validator and a check of our own examine the result.
"""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lazaret.errors import ConfigError
from npr import _torchvision  # noqa: F401  (must run before timm is imported)

from timm.layers import BatchNormAct2d, freeze_batch_norm_2d  # isort: skip
from typing import Any, Final

from lazaret.errors import PolicyViolation
from npr.config import TrainConfig
from npr.methods import registry

GROUPS = 32


def without_batch_norm(model: nn.Module, *, pretrained: bool) -> nn.Module:
    """The same model with every BatchNorm replaced. Raises ConfigError if something that mixes records is left."""
    # Imported here: it takes as long as torch itself, and whoever trains without DP never needs it.
    from opacus.validators import ModuleValidator

    replaced = freeze_batch_norm_2d(model) if pretrained else _with_group_norm(model)
    was_training = replaced.training
    # The validator looks at modules in training mode only.
    problems: list[object] = list(ModuleValidator.validate(replaced.train(), strict=False))
    replaced.train(was_training)
    # It knows layers by their exact type and lets subclasses pass, timm's BatchNormAct2d among them.
    problems += [module for module in replaced.modules() if isinstance(module, _BatchNorm)]
    if problems:
        raise ConfigError(
            f"{type(model).__name__} cannot be trained under DP: {problems[0]}",
            hint="choose a backbone whose layers use one record at a time",
        )
    return replaced


def _with_group_norm(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.BatchNorm2d):
        norm = nn.GroupNorm(math.gcd(GROUPS, module.num_features), module.num_features, eps=module.eps)
        # timm fuses the activation into the norm layer; book-keeping needs the norm's own output, so they part here.
        return nn.Sequential(norm, module.drop, module.act) if isinstance(module, BatchNormAct2d) else norm
    for name, child in module.named_children():
        replacement = _with_group_norm(child)
        if replacement is not child:
            setattr(module, name, replacement)
    return module


# The upstream rule: what a clipped gradient reads, apart from its own patient, must be public or already booked. This
# is the list of ordinary settings that break it, or that a private round does not support. Each is refused with the
# reason, before the data are read. Batch size and epochs are not checked: the schedule has its own.

SUPPORTED_METHODS: Final = frozenset({"local", "fedavg", "fednpr", "fedper", "fednpr-per"})
"""One clipped vector over head and body, per-record losses. Methods that fit a head apart or match features are out."""

PERSONAL_HEAD: Final = "head and body are clipped together and get the same noise, so the head is private too"

# Key, the one value that is allowed, and what any other value would do.
_ALLOWED: Final[tuple[tuple[str, Any, str], ...]] = (
    ("labels", "one", "the noise of counts and prototypes is for patients whose images are each of one class"),
    ("assign", "nearest", "one record moves others to other sub-clusters, without bound"),
    ("prototype_source", "exact", "features of sampled records would be used a second time"),
    ("prototype_momentum", 0.0, "has no private form"),
    ("clusters_by", "count", "reads features to choose the number of prototypes"),
    ("lambda_rounds", 0, "has no private form"),
    ("personal_start", "shared", "seeds the head on records"),
    ("predict_present_only", False, "reveals exactly which classes a site does not have"),
    ("local_bn", False, "there is no BatchNorm under DP"),
    ("npr_balance", "none", "reads exact counts"),
    ("prior_floor", None, "the floor of the private prior comes from its noise"),
    ("supervision", "bsm", "has no private form"),
    ("logit_norm", "none", "has no private form"),
    ("lambda_added", False, "has no private form"),
)


def violations(config: TrainConfig) -> list[str]:
    """Every setting that would void epsilon or be ignored, with the reason and what to set instead."""
    found = [
        f"{key} = {getattr(config, key)!r}: {reason}; use {allowed!r}"
        for key, allowed, reason in _ALLOWED
        if getattr(config, key) != allowed
    ]
    if config.method not in SUPPORTED_METHODS:
        found.append(f"method = {config.method!r}: no private form; use one of {', '.join(sorted(SUPPORTED_METHODS))}")
    elif registry.build(config).prototype_share > 0.0:
        found.append(f"predict = {config.predict!r}: needs prototypes that are not booked; use 'head'")
    return found


def check_upstream(config: TrainConfig) -> None:
    """Raises PolicyViolation naming every violation."""
    if found := violations(config):
        raise PolicyViolation("; ".join(found), where="differential privacy", hint="differential-privacy.md, section 2")
