"""Which models may be trained under differential privacy, and which way their clipped sums are computed and tested.

Two engines have the same form and stand behind the same sampler, clip, noise and ledger. `fast` is `ClippedGradient`:
closed formulas for the layers of convolutional networks. `opacus` takes per-record gradients from Opacus'
`GradSampleModule` (its own formulas, and functorch for other layers), which knows many more layers and needs the memory
of one model for each record. `auto` takes the fast one wherever it has a formula for every trainable layer.

Neither is trusted: before anything is booked, gradients of two records are compared with autograd, one by one. A model
that fails is refused when its file is made, and again when an agent starts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from lazaret.errors import ConfigError, LocalProtocolError, PolicyViolation, ToolkitError
from npr import backbones  # noqa: F401  (must run before timm is imported)
from npr.config import TrainConfig
from npr.device import number, on_host, to_host
from npr.dp.clipping import NORM_MARGIN, ClippedGradient, check_losses, split_like
from npr.methods import registry
from security.dp.accountant import RATE_ONE, MechanismEvent, merged
from security.dp.planner import Engine

from timm.layers import BatchNormAct2d, freeze_batch_norm_2d  # isort: skip

# Which models and settings may be trained under differential privacy (the upstream rule).
#
# docs/spec/differential-privacy.md, section 2. BatchNorm mixes the records of a batch, so it is replaced. A pretrained
# model keeps its public statistics as a frozen scale and shift (timm's FrozenBatchNorm), which keeps the pretrained
# fit. A model trained from scratch has no such statistics and gets GroupNorm, which uses one record at a time. Opacus'
# validator and a check of our own examine the result.


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
    elif registry.build(config).finetune_epochs:
        found.append("finetune_epochs: reads the patients once more, which is not booked; use 0")
    return found


def check_upstream(config: TrainConfig) -> None:
    """Raises PolicyViolation naming every violation."""
    if found := violations(config):
        raise PolicyViolation("; ".join(found), where="differential privacy", hint="differential-privacy.md, section 2")


# The two engines, and the comparison with autograd.

TOLERANCE: Final = 1e-4
"""Largest relative error of a norm, and of the sum of two gradients, against autograd."""


class ClippedSum(Protocol):
    """Accumulates sum_n min(1, C/|g_n|) g_n over micro-batches into one flat vector."""

    clip: float
    parameters: list[nn.Parameter]
    sum: Tensor

    def zero(self) -> None: ...

    def split(self, vector: Tensor) -> list[Tensor]: ...

    def add(self, per_record_loss: Callable[[], Tensor]) -> Tensor: ...


class OpacusGradient:
    """The clipped sum from per-record gradients that Opacus' hooks compute."""

    def __init__(self, model: nn.Module, *, clip: float) -> None:
        self.clip = clip
        self._model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise ConfigError("the model has no trainable parameter")
        size = sum(parameter.numel() for parameter in self.parameters)
        self.sum = torch.zeros(size, dtype=self.parameters[0].dtype, device=self.parameters[0].device)

    def zero(self) -> None:
        self.sum.zero_()

    def split(self, vector: Tensor) -> list[Tensor]:
        return split_like(vector, self.parameters)

    def add(self, per_record_loss: Callable[[], Tensor]) -> Tensor:
        """As in `ClippedGradient`: each record is clipped by itself, and one that is not finite contributes zero."""
        rows, losses = self.rows(per_record_loss)
        if not rows:
            return losses
        with torch.no_grad():
            norms = torch.stack([torch.linalg.vector_norm(row, dim=1).square() for row in rows]).sum(0).sqrt()
            weights = (self.clip / (norms * (1 + NORM_MARGIN))).clamp_max(1.0)
            kept = norms.isfinite().nonzero().squeeze(1)
            for part, row in zip(split_like(self.sum, self.parameters), rows, strict=True):
                part += (weights[kept] @ row[kept]).view(part.shape)
        return norms

    def rows(self, per_record_loss: Callable[[], Tensor]) -> tuple[list[Tensor], Tensor]:
        """For each parameter one row for each record, not clipped; none for an empty batch. And the losses."""
        with _hooked(self._model):
            losses = check_losses(per_record_loss())
            if not len(losses):
                return [], losses.detach()
            torch.autograd.backward(losses.sum())
            return [self._gradients(parameter, len(losses)) for parameter in self.parameters], losses.detach()

    def _gradients(self, parameter: nn.Parameter, records: int) -> Tensor:
        found = getattr(parameter, "grad_sample", None)
        if not isinstance(found, Tensor) or len(found) != records:
            # A gradient that is missing would be released without a clip; one of several passes would miss cross terms.
            raise LocalProtocolError("Opacus has no gradient of each record for a trainable parameter")
        return found.flatten(1)


@contextmanager
def _hooked(model: nn.Module) -> Iterator[None]:
    """Opacus' hooks on the model, in training mode, and nothing of them left behind, also after an error."""
    # Imported here: it takes as long as torch itself, and whoever trains without it never needs it.
    from opacus import GradSampleModule

    # Opacus and functorch warn about speed; what counts here is that the result equals that of autograd.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from _with_hooks(model, GradSampleModule)


def _with_hooks(model: nn.Module, wrap: Callable[..., nn.Module]) -> Iterator[None]:
    inplace = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    try:
        hooked: Any = wrap(model, loss_reduction="sum", strict=False)
    except NotImplementedError as error:
        raise ConfigError(f"Opacus cannot compute gradients of each record: {error}") from error
    for module in inplace:
        module.inplace = False  # type: ignore[assignment]  # its hooks do not allow views that are overwritten
    try:
        yield
    finally:
        for module in inplace:
            module.inplace = True  # type: ignore[assignment]
        hooked.remove_hooks()
        for module in model.modules():
            for name in ("activations", "max_batch_len"):
                if hasattr(module, name):
                    delattr(module, name)
        for parameter in model.parameters():
            parameter.grad = None
            for name in ("grad_sample", "_current_grad_sample", "_forward_counter"):
                if hasattr(parameter, name):
                    delattr(parameter, name)


def resolved(model: nn.Module, wanted: Engine) -> Engine:
    """`fast` or `opacus`: what `auto` means for this model."""
    if wanted != "auto":
        return wanted
    try:
        ClippedGradient(model, clip=1.0)
    except ConfigError:
        return "opacus"
    return "fast"


def clipped_sum(model: nn.Module, *, clip: float, engine: Engine) -> ClippedSum:
    if resolved(model, engine) == "fast":
        return ClippedGradient(model, clip=clip)
    return OpacusGradient(model, clip=clip)


def check_exact(model: nn.Module, wanted: Engine, *, channels: int, image_size: int) -> Engine:
    """The engine for this model, after two records were compared with autograd. The records are public noise.

    :raises PolicyViolation: if no engine can train the model with the norms of autograd.
    """
    tried: tuple[Engine, ...] = (wanted,)
    if wanted == "auto":
        tried = ("fast", "opacus") if resolved(model, "auto") == "fast" else ("opacus",)
    problems = []
    for engine in tried:
        try:
            error = largest_error(model, engine, channels=channels, image_size=image_size)
        except (ToolkitError, RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as problem:
            reason = (problem.message if isinstance(problem, ToolkitError) else str(problem)).split("\n")[0]
            problems.append(f"engine {engine} cannot train this model privately ({reason.split('. ')[0][:160]})")
            continue
        if error <= TOLERANCE:
            return engine
        problems.append(f"engine {engine} has gradient norms that differ from autograd by {error:.2g}")
    raise PolicyViolation(
        "; ".join(problems),
        where="differential privacy",
        hint="with wrong norms a patient could change the sum by more than the clip: choose another architecture "
        "(docs/dp-models.md lists some)",
    )


def largest_error(model: nn.Module, engine: Engine, *, channels: int, image_size: int) -> float:
    """Largest relative error of two records' norms and of their sum, in training mode, against autograd one by one.

    On a copy in double precision: some models have gradients of which single precision, autograd's included, holds
    three digits only, and it is the formulas that are tested here.
    """
    # On the processor whatever device trains: Apple's cards have no double precision.
    model = on_host(model).double().train()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, channels, image_size, image_size, generator=generator).double()
    # Two brightnesses, so that a norm that is taken over the whole batch is not right by chance.
    images = (images * torch.tensor([0.5, 2.0]).view(2, 1, 1, 1)).contiguous(memory_format=torch.channels_last)
    labels = torch.tensor([0, 1])

    def losses(of: slice) -> Tensor:
        return functional.cross_entropy(model(images[of]), labels[of], reduction="none")

    _without_dropout(model)
    with torch.no_grad():
        # A map that starts at zero, such as an adapter's, would hide wrong gradients of what comes before it.
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1 and not bool(to_host(parameter.any())):
                parameter.normal_(std=0.1, generator=generator)
    clipped = clipped_sum(model, clip=1e30, engine=engine)
    norms = clipped.add(lambda: losses(slice(0, 2)))
    rows = [_autograd(losses(slice(n, n + 1)).sum(), clipped.parameters) for n in range(2)]
    truth = torch.stack([row.norm() for row in rows])
    total = torch.stack(rows).sum(0)
    of_norms = number(((norms - truth).abs() / truth).max())
    of_sum = number((clipped.sum - total).norm() / total.norm())
    return max(of_norms, of_sum)


def _autograd(loss: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def _without_dropout(model: nn.Module) -> None:
    """Dropout and stochastic depth would draw other masks in each pass; they keep their rate in one of three places."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), float) and (
                name != "p" or "drop" in type(module).__name__.lower()
            ):
                setattr(module, name, 0.0)


def opacus_epsilons(history: Sequence[MechanismEvent], delta: float) -> dict[str, float]:
    """A second opinion on a ledger by code that shares nothing with dp-accounting: Opacus' RDP and PRV accountants."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    parts = [(multiplier, rate / RATE_ONE, steps) for multiplier, rate, steps in merged(history)]
    found = {}
    for name, accountant in (("opacus_rdp", RDPAccountant()), ("opacus_prv", PRVAccountant())):
        accountant.history = parts
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = float(accountant.get_epsilon(delta)) if parts else 0.0
    return found
