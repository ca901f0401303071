"""The parties of a small federation that writes real privacy logs: names, keys, places on disk, what they state."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from lazaret import software
from security.dp.accountant import ACCOUNTANT, Parts, dp_sgd_event, rate_at_least
from security.dp.filter import BudgetFilter
from security.identity.pki import Role
from security.log import events as ev
from security.log.note import KeyType, NoteSigner
from security.log.roster import COORDINATOR, Party
from security.log.schema import decimal
from security.log.store import Disk
from security.log.witness import Witness
from security.log.writer import AuditLog
from security.rng import CountedRandomness
from tests.support.consortium_world import World, subject

SITES = ("graz", "linz", "vienna")
FIVE = ("graz", "linz", "steyr", "vienna", "wels")
HUB = "hub"
RUN = "run-1"
NOW = 1_800_000_000_000
VECTOR = 270_000
MODEL_0 = sha256(b"the initial model").hexdigest()
DP = BudgetFilter(order=5.0, delta=1e-5, cap=8.0)
DP_ROUND = (dp_sgd_event(multiplier=1.1, clip=1.0, rate=rate_at_least(0.02), steps=40),)


def digest(*parts: object) -> str:
    """A stand-in for a digest that the protocol would give."""
    return sha256("|".join(map(str, parts)).encode()).hexdigest()


def origin(name: str) -> str:
    """The log's name, as enrolment makes it."""
    return f"{name}.lesions/audit"


class QuickDisk(Disk):
    """Writes without waiting for the disk: these logs need not survive a power cut."""

    def sync(self, descriptor: int) -> None:
        pass

    def publish(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)


@dataclass
class Member:
    """One party with its keys, its open log and its witness."""

    party: Party
    root: NoteSigner
    cosigner: NoteSigner
    folder: Path
    log: AuditLog = field(init=False)
    witness: Witness = field(init=False)
    spent: Parts = ()
    spent_before: Parts = ()
    sent: int = 0

    @property
    def keys(self) -> Path:
        return self.folder.with_name(self.folder.name + ".keys")


def new_member(name: str, role: str, folder: Path, rng: CountedRandomness) -> Member:
    """Fresh keys and a place on disk."""
    root = NoteSigner.from_seed(origin(name), rng.bytes(32))
    cosigner = NoteSigner.from_seed(f"{name}.lesions/witness", rng.bytes(32), KeyType.COSIGNER)
    party = Party(name=name, role=role, origin=origin(name), root=root.key, cosigner=cosigner.key)
    return Member(party=party, root=root, cosigner=cosigner, folder=folder / name)


def member_of(world: World, party: Party, folder: Path) -> Member:
    role = Role.COORDINATOR if party.role == COORDINATOR else Role.SITE
    who, identity = subject(party.name, role), world.identity(party.name)
    return Member(
        party=party, root=identity.audit_root(who), cosigner=identity.cosigner(who), folder=folder / party.name
    )


def data_opened(name: str) -> ev.DataOpened:
    """What a site states about its data."""
    return ev.DataOpened(
        fingerprint=digest("hmac", name),
        controller=f"Hospital {name.capitalize()}",
        purpose="model training",
        legal_basis="consent, study 12",
        subjects="patients of the skin clinic",
        categories="dermoscopic images, diagnoses",
        retention="10 years",
        change="opened for the first time",
    )


def payment(
    kind: type[ev.DpReserved] | type[ev.DpCommitted], number: int, spent: Parts, before: Parts
) -> ev.DpReserved | ev.DpCommitted:
    """A round of private training, set aside or used."""
    return kind(
        reservation=digest("reservation", number)[:32],
        mechanisms=tuple(event.to_json() for event in DP_ROUND),
        delta=decimal(DP.delta),
        unit="patient",
        relation="add-or-remove-one",
        accountant=ACCOUNTANT,
        order=decimal(DP.order),
        plan=None,
        epsilon_round=f"{DP.epsilon(spent) - DP.epsilon(before):.6f}",
        epsilon_total=f"{DP.epsilon(spent):.6f}",
        cap=decimal(DP.cap),
    )


def agent_start(name: str) -> ev.AgentStart:
    """The software that everybody runs."""
    return ev.AgentStart(
        version=software.version(),
        package=digest("package"),
        dependencies=digest("constraints"),
        proto=digest("proto"),
        image=None,
        sbom=None,
        config=digest("config", name),
        insecure=(),
    )
