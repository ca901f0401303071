"""Attacks on our own pipeline: a one-run canary audit, a membership-inference check, and `npr-lab audit`.

docs/spec/differential-privacy.md, section 7. The canary audit (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846)
includes or excludes each of many artificial records at random, trains once with the production code, guesses from the
parameters which were included, and turns the number of correct guesses into a lower bound on epsilon. A bound above the
ledger's epsilon proves a mistake; a bound below it proves nothing, but a pipeline without noise does not stay below.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor, nn

from lazaret.errors import ConfigError
from npr.dp.private_site import balanced_softmax_per_record
from npr.dp.sgd import DpSgd, Indices
from security.dp.accountant import RATE_ONE, Spent
from security.dp.ledger import Ledger, Unit
from security.dp.ledger_store import MemoryStore
from security.dp.noise import NoiseSource
from security.dp.planner import Schedule, propose_multiplier, terms_for
from security.dp.sampling import Units

UNIFORM = np.array([0.5, 0.5])


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAudit:
    """`lower_bound` holds with the stated confidence; `claimed` is the ledger's own epsilon."""

    canaries: int
    guesses: int
    right: int
    confidence: float
    lower_bound: float
    claimed: Spent
    seconds: float

    @property
    def consistent(self) -> bool:
        """False is proof of a wrong implementation or a wrong ledger."""
        return self.lower_bound <= self.claimed.rdp


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipCheck:
    """How well the loss distinguishes members from others, against what epsilon allows any attack."""

    auc: float
    advantage: float
    allowed_advantage: float
    claimed: Spent


class _Auditable(nn.Module):
    """Two linear layers without biases. The first gives each canary weights that no other record touches."""

    def __init__(self, inputs: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, width, bias=False)
        self.head = nn.Linear(width, 2, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.body(x))

    def logits(self, h: Tensor) -> Tensor:
        return torch.as_tensor(self.head(h))


def run_canary_audit(
    *,
    canaries: int = 1000,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    steps: int = 40,
    rate: float = 0.25,
    confidence: float = 0.95,
    noise: NoiseSource | None = None,
) -> CanaryAudit:
    """Train once on the canaries whose coin fell on "in" and bound epsilon from the guesses.

    :param noise: the source under test; a test passes one without noise and expects `consistent` to be False.
    """
    started = time.monotonic()
    coins = NoiseSource().words(canaries) >> np.uint64(63) == 1
    # White box: one input of its own for each canary, large enough that its gradient is always clipped.
    images = 10.0 * torch.eye(canaries)[torch.from_numpy(coins)]
    model = _Auditable(canaries)
    before, head = model.body.weight.detach().clone(), model.head.weight.detach().clone()
    # All canaries carry label 0. Slow steps keep the head, and so the direction that marks a member, where it was.
    labels = torch.zeros(len(images), dtype=torch.long)
    claimed = _train(
        model, images, labels, epsilon=epsilon, delta=delta, steps=steps, rate=rate, speed=0.05, noise=noise
    )
    scores = (head[0] - head[1]) @ (model.body.weight.detach() - before)
    guesses, right = _guess(scores.numpy(), coins, share=0.2)
    return CanaryAudit(
        canaries=canaries,
        guesses=guesses,
        right=right,
        confidence=confidence,
        lower_bound=epsilon_lower_bound(canaries, guesses, right, delta=delta, confidence=confidence),
        claimed=claimed,
        seconds=time.monotonic() - started,
    )


def _guess(scores: NDArray[np.float32], coins: NDArray[np.bool_], *, share: float) -> tuple[int, int]:
    """Call the highest scores "in" and the lowest "out"; abstain in between, where guesses are worth little."""
    count = int(share * len(scores))
    ranked = np.argsort(scores)
    return 2 * count, int(coins[ranked[-count:]].sum() + (~coins[ranked[:count]]).sum())


def epsilon_lower_bound(canaries: int, guesses: int, right: int, *, delta: float, confidence: float) -> float:
    """The largest epsilon that the number of right guesses refutes."""
    if right_is_chance(canaries, guesses, right, 0.0, delta) > 1 - confidence:
        return 0.0
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        refuted = right_is_chance(canaries, guesses, right, middle, delta) <= 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


def right_is_chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Upper bound on the chance of so many right guesses if the training is (epsilon, delta)-DP (theorem 5.2)."""
    success = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, success))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, success))
    slope = float((below / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, tail + 2 * canaries * delta * slope)


def run_membership_check(
    *, records: int = 400, epsilon: float = 1.0, delta: float = 1e-5, steps: int = 100, noise: NoiseSource | None = None
) -> MembershipCheck:
    """Train on half of some records with random labels, then distinguish members from the rest by their loss."""
    draws = torch.from_numpy(NoiseSource().gaussian(np.empty(records * records)))
    images = draws.view(records, records).float()
    labels = torch.from_numpy((NoiseSource().words(records) >> np.uint64(63)).astype(np.int64))
    members = records // 2
    model = _Auditable(records)
    train = images[:members], labels[:members]
    claimed = _train(model, *train, epsilon=epsilon, delta=delta, steps=steps, rate=0.25, speed=2.0, noise=noise)
    with torch.no_grad():
        losses = balanced_softmax_per_record(model.logits(model.features(images)), labels, UNIFORM).numpy()
    auc, advantage = loss_attack(losses[:members], losses[members:])
    return MembershipCheck(
        auc=auc, advantage=advantage, allowed_advantage=allowed_advantage(claimed.rdp, delta), claimed=claimed
    )


def loss_attack(members: NDArray[np.float32], others: NDArray[np.float32]) -> tuple[float, float]:
    """(AUC, largest TPR - FPR) of calling low losses members."""
    # Only here: sites that train import this package too, and measure no attack.
    from sklearn.metrics import auc, roc_curve

    is_member = np.repeat([True, False], [len(members), len(others)])
    false, true, _ = roc_curve(is_member, -np.concatenate([members, others]), drop_intermediate=False)
    return float(auc(false, true)), float((true - false).max())


def allowed_advantage(epsilon: float, delta: float) -> float:
    """No attack on an (epsilon, delta)-DP training has a larger TPR - FPR in expectation."""
    return (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1)


def _train(
    model: _Auditable,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    delta: float,
    steps: int,
    rate: float,
    speed: float,
    noise: NoiseSource | None,
) -> Spent:
    """The production path: plan, ledger, reservation, DP-SGD. Returns what the ledger claims."""
    if not len(images):
        raise ConfigError("an audit needs records")
    schedule = Schedule(
        rounds=1,
        steps=steps,
        rate=int(rate * RATE_ONE),
        multiplier=1.0,
        clip=1.0,
        counts_sigma=None,
        prototypes_sigma=None,
    )
    schedule = replace(schedule, multiplier=propose_multiplier(schedule, epsilon=epsilon, delta=delta))
    terms = terms_for(schedule, population="audit", unit=Unit.IMAGE, delta=delta, cap=epsilon)
    ledger = Ledger.create(MemoryStore(), terms, version="1")
    events = schedule.round_events(1)
    reservation = ledger.reserve(run="audit", round_number=1, events=events, noise=noise or NoiseSource())

    def losses(indices: Indices) -> Tensor:
        chosen = torch.from_numpy(indices)
        return balanced_softmax_per_record(model.logits(model.features(images[chosen])), labels[chosen], UNIFORM)

    training = DpSgd(
        model,
        torch.optim.SGD(model.parameters(), lr=speed),
        reservation=reservation,
        units=Units(range(len(images))),
        divisor=rate * len(images),
        micro_batch=1024,
    )
    training.run(losses)
    ledger.commit(reservation)
    return ledger.spent()


# `npr-lab audit`: both attacks, with a verdict.

# A loss threshold is chosen after the fact, so even useless losses reach some advantage. With n records on each side
# it stays below this many standard deviations of a difference of two rates in all but about one of 10,000 runs.
DEVIATIONS = 4.0
# A larger epsilon allows an advantage of nearly 1 and could not be contradicted by any attack.
MEMBERSHIP_EPSILON = 1.0


def audit_report(*, canaries: int, epsilon: float, delta: float, records: int = 400) -> dict[str, Any]:
    """Both attacks once. `found` above `allowed` means that the implementation or its ledger is wrong."""
    canary = run_canary_audit(canaries=canaries, epsilon=epsilon, delta=delta)
    membership = run_membership_check(records=records, epsilon=min(epsilon, MEMBERSHIP_EPSILON), delta=delta)
    attacks = {"canaries": _canaries(canary), "membership": _membership(membership, records)}
    return {
        "epsilon": epsilon,
        "delta": delta,
        "attacks": attacks,
        "consistent": all(part["consistent"] for part in attacks.values()),
    }


def _canaries(audit: CanaryAudit) -> dict[str, Any]:
    return {
        "found": audit.lower_bound,
        "allowed": audit.claimed.rdp,
        "consistent": audit.consistent,
        **{name: value for name, value in asdict(audit).items() if name != "claimed"},
    }


def _membership(check: MembershipCheck, records: int) -> dict[str, Any]:
    slack = DEVIATIONS * math.sqrt(0.5 / (records // 2))
    allowed = min(1.0, check.allowed_advantage + slack)
    return {
        "found": check.advantage,
        "allowed": allowed,
        "consistent": check.advantage <= allowed,
        "auc": check.auc,
        "allowed_in_expectation": check.allowed_advantage,
    }
