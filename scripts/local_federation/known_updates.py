"""A site that does not learn: its update of a round is a known vector, so that every sum can be computed beforehand."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from security.crypto.ring import DEFAULT_BITS
from security.identity.enrolment import Identity
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel
from security.log.events import TrainerIsolated
from security.log.writer import AuditLog
from security.secagg import fixed_point
from security.secagg.layout import Layout, Vector
from site_agent.config import SiteConfig
from site_agent.contribution import LocalResult
from site_agent.local_work import Learner
from site_agent.state_dir import StateDir

SAMPLES = 7
PLAN = f"""
run = "run-1"
[model]
initial = "initial.safetensors"
architecture = "numbers"
code_digest = "{"ab" * 32}"
classes = ["bcc", "melanoma", "nevus"]
[training]
method = "fedavg"
rounds = {{rounds}}
steps = 50
config_hashes = ["{"cd" * 32}"]
[training.settings]
learning_rate = 0.001
{{settings}}[aggregation]
ring_bits = {{ring_bits}}
weight_cap = 8
{{aggregation}}[timing]
train = {{train}}
message = {{message}}
upload = {{upload}}
"""


def number_plan(
    rounds: int,
    *,
    train: int,
    message: int,
    upload: int,
    ring_bits: int = DEFAULT_BITS,
    aggregation: str = "",
    settings: str = "",
) -> str:
    """federation.toml of such sites: one layer of numbers, and how many seconds each step may take.

    :param aggregation: further lines of that table; `settings` likewise.
    """
    return PLAN.format(
        rounds=rounds,
        train=train,
        message=message,
        upload=upload,
        ring_bits=ring_bits,
        aggregation=aggregation,
        settings=settings,
    )


def write_numbers(path: Path, words: int) -> None:
    """The initial model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"layer.weight": np.linspace(-1, 1, words, dtype=np.float32)}, path)


def update_of(site: str, round_number: int, size: int) -> Vector:
    """Half of what the clips allow at most would be too much for running statistics; a thousandth fits all."""
    seed = int.from_bytes(hashlib.sha256(f"{site} {round_number}".encode()).digest()[:8], "big")
    values = np.random.default_rng(seed).uniform(-1e-3, 1e-3, size)
    return values.astype("<f4")


def words_of(layout: Layout, site: str, round_number: int) -> np.ndarray[Any, Any]:
    """The very words that such a site masks in a round."""
    update = update_of(site, round_number, layout.state_words)
    return fixed_point.encode(layout, update, weight=SAMPLES, loss=1.0, hits=1).words


class NumberLearner:
    """Takes no torch, and as many seconds as a file `work` beside the state says: none without it. It finds the model
    of the round that a file `doubts` names worse than all others.
    """

    def __init__(self, site: str, home: Path | None = None) -> None:
        self._site = site
        self._work, self._doubts = (float(_setting(home, name) or 0) for name in ("work", "doubts"))
        self._scores: dict[bytes, float] = {}

    def train(self, round_number: int, state: Vector) -> LocalResult:
        time.sleep(self._work)
        return LocalResult(
            update=update_of(self._site, round_number, len(state)),
            samples=SAMPLES,
            loss_sum=1.0,
            hits=1,
            steps=1,
            wall_ms=1,
        )

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]:
        score = self._scores.setdefault(state[:1024].tobytes(), 0.1 if round_number == self._doubts else 0.8)
        return {"round": round_number, "validation": {"bacc": score}}

    def adopted(self, manifest: Manifest) -> None:
        pass

    def close(self) -> None:
        pass


def _setting(home: Path | None, name: str) -> str | None:
    return (home / name).read_text() if home is not None and (home / name).exists() else None


def sees_no_image(log: AuditLog | None) -> None:
    """What the log of a stand-in says in the place of a trainer: nothing here sees an image."""
    if log is not None:
        mechanisms = dict.fromkeys(("network_namespace", "seccomp", "landlock"), True)
        log.append(TrainerIsolated(asked="best", **mechanisms, connection=False, keys=False, ranks=False))


def make_number_learner(
    config: SiteConfig,
    manifest: Manifest,
    initial: InitialModel,
    state_dir: StateDir,
    identity: Identity,
    site: str,
    budget: object = None,
    log: AuditLog | None = None,
) -> tuple[Learner, str | None]:
    """In the place of the one that opens images and imports torch."""
    del manifest, initial, state_dir, identity, budget
    sees_no_image(log)
    return NumberLearner(site, config.state.parent), "00" * 32  # the fingerprint of no data
