"""Attacks on our own pipeline: canaries, a patient's rows in a table, membership inference, and `npr-lab audit`.

docs/spec/differential-privacy.md, section 7. Each begins at the table, with rows that are there or not, and goes
through the sides to the mechanism: a right mechanism is not private if the split before it is not. The canary audit
(Steinke, Nasr and Jagielski 2023, arXiv 2305.08846)
includes or excludes each of many artificial records at random, trains once with the production code, guesses from the
parameters which were included, and turns the number of correct guesses into a lower bound on epsilon. A bound above the
ledger's epsilon proves a mistake; a bound below it proves nothing, but a pipeline without noise does not stay below.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, binom
from torch import Tensor, nn

from lazaret.errors import ConfigError
from npr.data.catalogue import Catalogue, NamedSplit, assemble
from npr.data.dataset import Samples
from npr.data.sides import KEY_BYTES, KeyedSides, SideRule
from npr.dp.private_site import balanced_softmax_per_record
from npr.dp.sgd import DpSgd, Indices
from security.dp.accountant import RATE_ONE, Spent
from security.dp.ledger import Ledger, Terms, Unit
from security.dp.ledger_store import MemoryStore
from security.dp.noise import NoiseSource, Units
from security.dp.planner import Schedule, propose_multiplier, terms_for
from security.rng import SystemRandomness

UNIFORM = np.array([0.5, 0.5])


def enforced(claimed: Spent) -> float:
    """What a ledger with a pinned schedule promises: the smaller of its two valid bounds (section 6)."""
    return min(claimed.rdp, claimed.pld)


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
        return self.lower_bound <= enforced(self.claimed)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipCheck:
    """How well the loss distinguishes members from others, against what epsilon allows any attack."""

    auc: float
    advantage: float
    allowed_advantage: float
    claimed: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAudit:
    """How well trainings tell whether one patient's rows are in the table.

    :ivar moved: other patients who are trained on with these rows in the table and not without them, or vice versa.
    :ivar trained: whether that patient is on the training side itself.
    """

    moved: int
    trained: bool
    trials: int
    false_alarms: int
    misses: int
    confidence: float
    lower_bound: float
    claimed: Spent

    @property
    def consistent(self) -> bool:
        return self.lower_bound <= enforced(self.claimed)


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
    plan = _AuditPlan.of(epsilon=epsilon, delta=delta, steps=steps, rate=rate, expected=canaries / 2)
    table = _table([(number, 1) for number in np.flatnonzero(coins).tolist()], patients=canaries)
    samples = assemble(table, fold=EVERYBODY, rule=_fresh_sides(EVERYBODY)).sites[0].train
    scores, ledger = _marks(samples, plan, noise)
    guesses, right = _guess(scores[:canaries], coins, share=0.2)
    return CanaryAudit(
        canaries=canaries,
        guesses=guesses,
        right=right,
        confidence=confidence,
        lower_bound=epsilon_lower_bound(canaries, guesses, right, delta=delta, confidence=confidence),
        claimed=ledger.spent(),
        seconds=time.monotonic() - started,
    )


# A table of patients for attacks. White box: each patient has a pixel of their own, bright enough that their gradient
# is always clipped. All carry label 0. Slow steps keep the head, and so the direction of a member, where it was.

EVERYBODY = "everybody trains"


def _fresh_sides(fold: int | str) -> SideRule:
    return KeyedSides(key=SystemRandomness().bytes(KEY_BYTES), fold=fold)


def _table(patients_and_images: Sequence[tuple[int, int]], *, patients: int, names: Sequence[str] = ()) -> Catalogue:
    """Rows of some of `patients` numbered patients, each with some images."""
    numbers = np.repeat([number for number, _ in patients_and_images], [count for _, count in patients_and_images])
    side = max(8, math.isqrt(patients - 1) + 1)
    images = np.zeros((len(numbers), side * side), dtype=np.uint8)
    images[np.arange(len(numbers)), numbers] = 255
    return Catalogue(
        name="audit",
        class_names=("canary", "other"),
        images=images.reshape(-1, side, side, 1),
        labels=np.zeros(len(numbers), dtype=np.int64),
        ids=tuple(f"image {row}" for row in range(len(numbers))),
        units=tuple(names[number] if names else f"patient {number}" for number in numbers),
        unit_kind="patient",
        sites=("site",) * len(numbers),
        splits={EVERYBODY: NamedSplit(sides=("train",) * len(numbers))},
        per_unit=True,
    )


def _marks(
    samples: Samples, plan: _AuditPlan, noise: NoiseSource | None = None
) -> tuple[NDArray[np.float32], Ledger]:
    """Train once, and say for each pixel how far the weights went the way of a member who has it."""
    images = torch.from_numpy(np.asarray(samples.images).reshape(len(samples), -1)).float() / 25.5
    model = _Auditable(images.shape[1])
    before, head = model.body.weight.detach().clone(), model.head.weight.detach().clone()
    labels, units = torch.from_numpy(samples.labels), Units(samples.units)
    ledger = _train(model, images, labels, units, plan, speed=0.05, noise=noise)
    return ((head[0] - head[1]) @ (model.body.weight.detach() - before)).numpy(), ledger


def run_table_audit(
    *,
    rule: SideRule | None = None,
    trained: bool = False,
    patients: int = 1000,
    trials: int = 200,
    epsilon: float = 2.0,
    delta: float = 1e-5,
    confidence: float = 0.95,
) -> TableAudit:
    """Tell from the trained weights whether one patient's rows are in the table, in many trainings of each kind.

    The attacker knows everything else: all other rows, the sides, the initial weights. Where the sides are even, a
    patient more shifts all who come later in the order, so that the sum of many gradients tells of one patient.

    :param rule: what gives the sides; a test passes the even split, and expects `consistent` to be False.
    :param trained: whether to attack a patient of the training side; otherwise one whose images are never trained on.
    """
    sides = rule or _fresh_sides(0)
    name, tables = _target(sides, patients, trained=trained)
    parts = [assemble(table, fold=0, rule=sides).sites[0].train for table in tables]
    without, with_it = ({*part.units} for part in parts)
    moved = (with_it ^ without) - {name}
    # The direction in which the two worlds differ; the patient's own where nobody else moves.
    pixels = {f"patient {number}": number for number in range(patients)} | {name: patients}
    direction = np.zeros(parts[0].images.shape[1] ** 2)
    direction[[pixels[unit] for unit in with_it - without] or [patients]] = 1.0
    direction[[pixels[unit] for unit in without - with_it]] = -1.0
    plan = _AuditPlan.of(epsilon=epsilon, delta=delta, steps=1, rate=1.0, expected=0.8 * patients)
    runs = [[_marks(part, plan) for _ in range(trials + CALIBRATION)] for part in parts]
    scores = np.array([[float(marks @ direction) for marks, _ in world] for world in runs])
    # The threshold comes from trainings that are not judged.
    threshold = float(scores[:, :CALIBRATION].mean(axis=1).mean())
    false_alarms = int((scores[0, CALIBRATION:] > threshold).sum())
    misses = int((scores[1, CALIBRATION:] <= threshold).sum())
    return TableAudit(
        moved=len(moved),
        trained=name in with_it,
        trials=trials,
        false_alarms=false_alarms,
        misses=misses,
        confidence=confidence,
        lower_bound=epsilon_from_errors(trials, false_alarms, misses, delta=delta, confidence=confidence),
        claimed=runs[0][0][1].spent(),
    )


CALIBRATION = 20
CANDIDATES = 40


def _target(sides: SideRule, patients: int, *, trained: bool) -> tuple[str, tuple[Catalogue, Catalogue]]:
    """Of some patients whose side is the one asked for, the one who moves most others; tables without and with it."""
    others = [(number, 1) for number in range(patients)]
    names = [f"patient {number}" for number in range(patients)]
    without = _table(others, patients=patients + 1)
    before = sides(without)
    found: list[tuple[int, str, Catalogue]] = []
    for attempt in range(CANDIDATES):
        name = f"target {attempt}"
        table = _table([*others, (patients, 1)], patients=patients + 1, names=[*names, name])
        *after, own = sides(table)
        if (own == "train") == trained:
            found.append((sum(one != other for one, other in zip(before, after, strict=True)), name, table))
    if not found:
        raise ConfigError("this rule puts no patient on that side", where="audit")
    _, name, table = max(found, key=lambda one: one[0])
    return name, (without, table)


def epsilon_from_errors(trials: int, false_alarms: int, misses: int, *, delta: float, confidence: float) -> float:
    """The largest epsilon that the errors of a test between two worlds refute, `trials` in each (Kairouz et al. 2015).

    Both error rates are taken at their upper bound (Clopper and Pearson), each with half of what confidence leaves.
    """
    wrong = 1 - (1 - confidence) / 2
    alarm, miss = (
        float(beta.ppf(wrong, errors + 1, trials - errors)) if errors < trials else 1.0
        for errors in (false_alarms, misses)
    )
    right = [(1 - delta - miss) / alarm, (1 - delta - alarm) / miss]
    return math.log(max(1.0, *right))


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
    plan = _AuditPlan.of(epsilon=epsilon, delta=delta, steps=steps, rate=0.25, expected=members)
    trained = images[:members], labels[:members], Units(range(members))
    claimed = _train(model, *trained, plan, speed=2.0, noise=noise).spent()
    with torch.no_grad():
        losses = balanced_softmax_per_record(model.logits(model.features(images)), labels, UNIFORM).numpy()
    auc, advantage = loss_attack(losses[:members], losses[members:])
    return MembershipCheck(
        auc=auc, advantage=advantage, allowed_advantage=allowed_advantage(enforced(claimed), delta), claimed=claimed
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _AuditPlan:
    """What is promised, and the public divisor: the number of records that is expected in a batch."""

    schedule: Schedule
    terms: Terms
    divisor: float

    @classmethod
    def of(cls, *, epsilon: float, delta: float, steps: int, rate: float, expected: float) -> _AuditPlan:
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
        terms = terms_for(schedule, population="audit", unit=Unit.PATIENT, delta=delta, cap=epsilon)
        return cls(schedule=schedule, terms=terms, divisor=max(1.0, rate * expected))


def _train(
    model: _Auditable,
    images: Tensor,
    labels: Tensor,
    units: Units,
    plan: _AuditPlan,
    *,
    speed: float,
    noise: NoiseSource | None,
) -> Ledger:
    """The production path: ledger, reservation, DP-SGD. Returns the ledger with what it claims."""
    ledger = Ledger.create(MemoryStore(), plan.terms, version="1")
    events = plan.schedule.round_events(1)
    reservation = ledger.reserve(run="audit", round_number=1, events=events, noise=noise or NoiseSource())

    def losses(indices: Indices) -> Tensor:
        chosen = torch.from_numpy(indices)
        return balanced_softmax_per_record(model.logits(model.features(images[chosen])), labels[chosen], UNIFORM)

    training = DpSgd(
        model,
        torch.optim.SGD(model.parameters(), lr=speed),
        reservation=reservation,
        units=units,
        divisor=plan.divisor,
        micro_batch=1024,
    )
    training.run(losses)
    ledger.commit(reservation)
    return ledger


# `npr-lab audit`: all attacks, with a verdict.

# A loss threshold is chosen after the fact, so even useless losses reach some advantage. With n records on each side
# it stays below this many standard deviations of a difference of two rates in all but about one of 10,000 runs.
DEVIATIONS = 4.0
# A larger epsilon allows an advantage of nearly 1 and could not be contradicted by any attack.
MEMBERSHIP_EPSILON = 1.0


def audit_report(*, canaries: int, epsilon: float, delta: float, records: int = 400) -> dict[str, Any]:
    """All attacks once. `found` above `allowed` means that the implementation or its ledger is wrong."""
    canary = run_canary_audit(canaries=canaries, epsilon=epsilon, delta=delta)
    membership = run_membership_check(records=records, epsilon=min(epsilon, MEMBERSHIP_EPSILON), delta=delta)
    tables = [run_table_audit(trained=trained, epsilon=epsilon, delta=delta) for trained in (False, True)]
    attacks = {
        "canaries": _canaries(canary),
        "a patient of the test side": _rows(tables[0]),
        "a patient of the training side": _rows(tables[1]),
        "membership": _membership(membership, records),
    }
    return {
        "epsilon": epsilon,
        "delta": delta,
        "attacks": attacks,
        "consistent": all(part["consistent"] for part in attacks.values()),
    }


def _canaries(audit: CanaryAudit) -> dict[str, Any]:
    return {
        "found": audit.lower_bound,
        "allowed": enforced(audit.claimed),
        "consistent": audit.consistent,
        **{name: value for name, value in asdict(audit).items() if name != "claimed"},
    }


def _rows(audit: TableAudit) -> dict[str, Any]:
    rest = {name: value for name, value in asdict(audit).items() if name not in ("claimed", "lower_bound")}
    return {"found": audit.lower_bound, "allowed": enforced(audit.claimed), "consistent": audit.consistent, **rest}


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
