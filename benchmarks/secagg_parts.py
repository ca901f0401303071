"""What both processes of the bench share: one federation from one seed, a stopwatch, and the floor of the machine."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protos.stream_end import empty_log_head
from security.crypto import prg
from security.crypto.prg import CHUNK_BYTES, Words
from security.crypto.signing import SigningKey
from security.identity.membership import COVERED_ROSTER, AggregationPolicy, AuditMode, RosterEntry
from security.secagg import messages, statements
from security.secagg import state as states
from security.secagg.clips import Clips
from security.secagg.context import PROTOCOL_VERSION, CohortMember, RoundContext
from security.secagg.layout import Block, Layout
from security.secagg.relay import SignedHead
from security.secagg.statements import Signer
from security.secagg.thresholds import default_colluders
from security.secrets import Secret

COORDINATOR = "coordinator"
WEIGHT_CAP = 1024
STATISTICS = 100  # one value in so many is a running statistic, as in convolutional networks
TENSORS = 200


@dataclass(frozen=True)
class Federation:
    """Keys, policy and plan that two processes derive alike. The seed is drawn for one bench and thrown away."""

    seed: bytes
    sites: int
    params: int

    def _derived(self, name: str) -> bytes:
        return hashlib.sha256(self.seed + name.encode()).digest()

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(f"site-{number:03d}" for number in range(1, self.sites + 1))

    def signer(self, name: str) -> Signer:
        return Signer(name, SigningKey(Secret(self._derived(name))))

    def log_head(self, name: str) -> SignedHead:
        """What the party's messages carry."""
        return empty_log_head(name, self.policy.federation, self._derived(f"log {name}"))

    def _entry(self, name: str) -> RosterEntry:
        return RosterEntry(site=name, cert=self._derived(f"cert {name}"), key=self.signer(name).key.verify_key)

    @cached_property
    def layout(self) -> Layout:
        """Many tensors of very different size and a share of running statistics."""
        clips = Clips(learning_rate=1e-3, steps=100)
        channels = max(1, self.params // STATISTICS // 2)
        left = self.params - 2 * channels
        cuts = sorted({round(left * (step / TENSORS) ** 3) for step in range(1, TENSORS)} - {0, left})
        sizes = [high - low for low, high in zip([0, *cuts], [*cuts, left], strict=True)]
        tensors: list[Block] = [clips.weights(f"tensor.{index}", (size,)) for index, size in enumerate(sizes)]
        initial = np.linspace(0.1, 9.0, channels)
        tensors += [clips.running_mean("running.mean", initial), clips.running_variance("running.var", initial)]
        return Layout.of(
            tensors, roster_size=self.sites, weight_cap=WEIGHT_CAP, loss_exponent=14, hits_maximum=WEIGHT_CAP
        )

    def model(self) -> states.State:
        return np.full(self.layout.state_words, 0.25, dtype="<f4")

    @cached_property
    def policy(self) -> AggregationPolicy:
        return AggregationPolicy(
            federation="bench",
            manifest_version=1,
            manifest_hash=self._derived("manifest"),
            run="bench",
            roster=tuple(self._entry(name) for name in self.names),
            coordinator=self._entry(COORDINATOR),
            initial_state_hash=states.state_hash(self.model()),
            config_hashes=frozenset({self._derived("config")}),
            layout=self.layout,
            c=default_colluders(self.sites),
            audit=AuditMode.COVERED if self.sites <= COVERED_ROSTER else AuditMode.SAMPLED,
        )

    @property
    def config_hash(self) -> bytes:
        return self._derived("config")

    def plan(self) -> messages.Plan:
        policy, sizes = self.policy, self.policy.thresholds(self.sites)
        context = RoundContext(
            version=PROTOCOL_VERSION,
            federation=policy.federation,
            manifest_hash=policy.manifest_hash,
            run=policy.run,
            round=1,
            attempt=1,
            n=sizes.n,
            t=sizes.t,
            a=sizes.a,
            c=sizes.c,
            m=sizes.m,
            members=tuple(CohortMember(site=entry.site, cert=entry.cert) for entry in policy.roster),
            coordinator_cert=policy.coordinator.cert,
            suite=policy.suite,
            repeats=(),
            sums=(),
            state_hash=policy.initial_state_hash,
            config_hash=self.config_hash,
            layout_hash=self.layout.layout_hash,
            prev_result=policy.manifest_hash,
        )
        unsigned = messages.Plan(context=context, check=None, aborts=(), repeats=(), signature=bytes(64))
        return replace(unsigned, signature=self.signer(COORDINATOR).sign(statements.plan(context)))


@dataclass
class Stopwatch:
    """CPU seconds by name. Only this process's own time counts, so that a busy machine disturbs little."""

    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = time.process_time()
        try:
            yield
        finally:
            self.spent[name].append(time.process_time() - started)

    def watch(self, owner: Any, attribute: str) -> None:
        """Time every call of a function or method from now on."""
        plain: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.time(attribute):
                return plain(*args, **kwargs)

        setattr(owner, attribute, timed)

    def least(self, name: str) -> float:
        return min(self.spent[name])

    def total(self, *names: str) -> float:
        return sum(sum(self.spent[name]) for name in names)

    def median(self, name: str) -> float:
        return statistics.median(self.spent[name]) if self.spent[name] else 0.0


class Floor:
    """The least that one mask stream can cost here: its key stream, and one addition of a vector."""

    def __init__(self, words: int, dtype: np.dtype[Any]) -> None:
        self._bytes = words * dtype.itemsize
        self._one: Words = np.ones(words, dtype=dtype)
        self._other: Words = np.ones(words, dtype=dtype)
        self._zeros, self._scratch = bytes(CHUNK_BYTES), bytearray(CHUNK_BYTES)
        self.watch = Stopwatch()

    def measure(self) -> None:
        stream = Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(prg.BLOCK_BYTES))).encryptor()
        with self.watch.time("keystream"):
            for _ in range(-(-self._bytes // CHUNK_BYTES)):
                stream.update_into(self._zeros, self._scratch)
        with self.watch.time("add"):
            np.add(self._one, self._other, out=self._one)

    @property
    def keystream(self) -> float:
        return self.watch.median("keystream")

    @property
    def add(self) -> float:
        return self.watch.median("add")


def peak_bytes() -> int:
    """The most memory this process has held. Not `getrusage`: that remembers the parent of a child."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def warm_memory(vectors: int, size: int) -> None:
    """Touch memory and give it back, without a trace in the peak.

    A page that the host of a virtual machine has not yet backed costs far more at its first touch than the work on it.
    """
    kept = [np.ones(size, dtype=np.uint8) for _ in range(vectors)]
    kept.clear()
    Path("/proc/self/clear_refs").write_text("5")
