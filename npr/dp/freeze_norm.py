"""BatchNorm mixes the records of a batch, so under DP it goes.

A pretrained model keeps its public statistics as a frozen scale and shift (timm's FrozenBatchNorm), which keeps the
pretrained fit. A model trained from nothing has no statistics worth keeping and gets GroupNorm, which looks at one
record at a time and trains. Opacus' validator and a check of our own look at the result.
"""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from npr import _torchvision  # noqa: F401  (must run before timm is imported)
from security.errors import ConfigError

from timm.layers import BatchNormAct2d, freeze_batch_norm_2d  # isort: skip

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
            hint="choose a backbone whose layers look at one record at a time",
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
