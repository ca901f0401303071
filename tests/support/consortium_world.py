"""A small federation on disk for tests: a consortium, a coordinator and some sites, all with real keys."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from security.clock import Clock, ManualClock
from security.consortium.authority import Authority
from security.consortium.plan import FederationPlan
from security.identity.acceptance import seal, sign
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentAnswer, EnrolmentRequest
from security.identity.manifest import Manifest
from security.identity.pki import Role, Subject, fingerprint

NOW = 1_800_000_000_000
DAY = 86_400_000
SITES = ("graz", "linz", "vienna")
PLAN = f"""
run = "run-1"
[model]
initial = "initial.safetensors"
architecture = "tiny"
code_digest = "{"ab" * 32}"
classes = ["bcc", "melanoma", "nevus"]
personal = ["head.*"]
[training]
method = "fednpr-per"
rounds = 5
steps = 50
config_hashes = ["{"cd" * 32}"]
[training.settings]
learning_rate = 0.001
batch_size = 64
"""
PRIVACY = """
[privacy]
epsilon = 8
delta = 0.00001
clip = 1
noise_floor = 0.8
unit = "patient"
"""
SHARED_NOISE = f"""
run = "run-1"
[model]
initial = "initial.safetensors"
architecture = "tiny"
code_digest = "{"ab" * 32}"
classes = ["bcc", "melanoma", "nevus"]
personal = ["conv.*", "bn.*"]
[training]
method = "fedavg"
rounds = 5
steps = 1
weights = "samples"
config_hashes = ["{"cd" * 32}"]
[training.settings]
learning_rate = 1.0
"dp.noise" = "shared"
"dp.steps" = 1
"dp.rate" = 1.0
"dp.engine" = "opacus"
[aggregation]
ring_bits = 32
weight_cap = 256
"""


def write_initial_model(path: Path, metadata: dict[str, str] | None = None) -> None:
    tensors = {
        "conv.weight": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 2, 2),
        "bn.weight": np.ones(2, np.float32),
        "bn.running_mean": np.array([0.5, -0.25], np.float32),
        "bn.running_var": np.array([1.0, 0.01], np.float32),
        "bn.num_batches_tracked": np.array(7, np.int64),
        "head.weight": np.zeros((3, 2), np.float32),
    }
    save_file(tensors, path, metadata)


def subject(member: str, role: Role = Role.SITE, federation: str = "lesions") -> Subject:
    return Subject(federation=federation, role=role, member=member)


@cache
def _template(sites: tuple[str, ...]) -> World:
    folder = Path(tempfile.mkdtemp(prefix="lazaret-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return World.enrolled(folder, sites)


@dataclass
class World:
    """Everything of one federation, and a clock."""

    folder: Path
    authority: Authority
    clock: Clock

    @classmethod
    def make(cls, folder: Path, sites: Sequence[str] = SITES) -> World:
        """A fresh copy of a federation that was enrolled once: keys and fsyncs are what takes time."""
        template = _template(tuple(sites))
        shutil.copytree(template.folder, folder, dirs_exist_ok=True)
        return cls(folder, Authority.open(folder / "consortium"), ManualClock(wall=NOW))

    @classmethod
    def enrolled(cls, folder: Path, sites: Sequence[str] = SITES, federation: str = "lesions") -> World:
        clock = ManualClock(wall=NOW)
        authority = Authority.create(folder / "consortium", federation, passphrase=None, now_ms=NOW)
        world = cls(folder, authority, clock)
        world.write_plan(PLAN)
        write_initial_model(authority.folder / "initial.safetensors")
        world.enroll("hub", Role.COORDINATOR, hosts=("localhost", "127.0.0.1"))
        for site in sites:
            world.enroll(site)
        return world

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    @property
    def root_fingerprint(self) -> str:
        return fingerprint(self.authority.root)

    @property
    def key(self):  # type: ignore[no-untyped-def]  # the root key's own type
        return self.authority.unlock(None)

    def write_plan(self, text: str) -> None:
        self.authority.plan_path.write_text(text)

    def write_plugin(self, plan: str, source: bytes = b"# a method\n", name: str = "own_method.py") -> str:
        """Put a method's own file beside the plan; returns the plan that names it."""
        (self.authority.folder / name).write_bytes(source)
        return plan.replace("[training]\n", f'[training]\nplugin = "{name}"\n', 1)

    def identity(self, member: str) -> Identity:
        return Identity(folder=self.folder / member)

    def request(self, member: str, role: Role = Role.SITE, hosts: Sequence[str] = ()) -> EnrolmentRequest:
        return self.identity(member).create(subject(member, role, self.authority.federation), hosts=hosts)

    def enroll(self, member: str, role: Role = Role.SITE, hosts: Sequence[str] = (), days: int = 365) -> None:
        self.authority.enroll(self.key, self.request(member, role, hosts), now_ms=self.now, days=days)
        self.install(member)

    def install(self, member: str) -> None:
        answer = EnrolmentAnswer.read(self.authority.answer_path(member))
        self.identity(member).install(answer, root_fingerprint=self.root_fingerprint, now_ms=self.now)

    def publish(self) -> Manifest:
        plan = FederationPlan.read(self.authority.plan_path)
        second = self.authority.unlock_ml_dsa(None) if plan.audit.ml_dsa else None
        return self.authority.publish(self.key, plan, ml_dsa=second, now_ms=self.now)

    def turn_on_ml_dsa(self) -> None:
        """Every member makes its second key, and the plan asks for it; `publish` is still to come."""
        for record in list(self.authority.members()):
            request = self.identity(record.member).renew(record.subject, ml_dsa=True)
            self.authority.renew(self.key, record.member, request, now_ms=self.now, days=365)
            self.install(record.member)
        self.write_plan(self.authority.plan_path.read_text() + "\n[audit]\nml_dsa = true\n")

    def signed(self, manifest: Manifest) -> bytes:
        """Any manifest under the real root's signature: what a careless or coerced consortium could send out."""
        return seal(manifest, sign(manifest, self.key))

    def published(self) -> bytes:
        return self.authority.manifest_path.read_bytes()
