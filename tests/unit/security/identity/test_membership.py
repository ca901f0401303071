"""One membership: adopting a manifest is one assignment per party, and whoever asks afterwards is told the new one."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from security.crypto.signing import SigningKey
from security.identity.enrolment import renew
from security.identity.membership import Membership, Seat
from security.identity.pki import Role
from security.rng import CountedRandomness
from security.secagg import relay
from security.secagg.effects import Send
from security.secagg.statements import Signer
from security.secagg.transitions import SiteState
from tests.support.consortium_world import DAY, World
from tests.support.hub_world import Hub
from tests.support.site_world import SiteWorld

ROOT = Path(__file__).resolve().parents[4]
SITE = "graz"
SIGNER = Signer(SITE, SigningKey.generate(CountedRandomness(b"membership")))
# What a membership holds, by the names under which a copy of it would be kept.
HELD = {"membership", "manifest", "policy", "roster", "layout", "signer", "destination", "standing", "mandate", "seat"}


def reachable(start: object) -> Iterator[object]:
    """Everything an object holds on to, over any number of steps; not what a module or a class holds."""
    seen, todo = {id(start)}, [start]
    while todo:
        found = todo.pop()
        yield found
        if isinstance(found, FunctionType):
            nearby: list[Any] = [*(found.__closure__ or ()), *(found.__defaults__ or ())]
        else:
            nearby = gc.get_referents(found)
        for other in nearby:
            if id(other) not in seen and not isinstance(other, ModuleType | type):
                seen.add(id(other))
                todo.append(other)


def remembered(holder: object, old: Membership) -> list[str]:
    """Parts of an older membership that an object can still get at."""
    parts = [old, old.manifest, old.policy, old.roster, old.signer]
    kept = {id(found) for found in reachable(holder)}
    return [type(part).__name__ for part in parts if id(part) in kept]


def renewed(world: World, member: str, role: Role) -> None:
    request = renew(world.identity(member), role)
    world.authority.renew(world.key, member, request, now_ms=world.now, days=365)
    world.install(member)


def test_a_site_that_adopts_a_manifest_remembers_nothing_of_the_old_one(tmp_path: Path) -> None:
    """The newer manifest has other keys of this site and of the coordinator, and a fourth member."""
    world = SiteWorld(tmp_path)
    world.start_all()
    agent = world.agents[SITE]
    old = agent.seat.membership
    assert remembered(agent, old), "what is looked for can be found"
    renewed(world.base, SITE, Role.SITE)
    renewed(world.base, "hub", Role.COORDINATOR)
    world.base.enroll("steyr")
    newer = world.base.publish()
    data = world.base.published()
    world.hub.send(SITE, relay.ManifestFrame(version=2, length=len(data), index=0, data=data))

    new = agent.seat.membership
    assert new is not old and new.manifest == newer and SITE not in world.left
    assert remembered(agent, old) == []
    core = agent.session.machine.core
    assert (agent.manifest, agent.session.manifest) == (new.manifest, new.manifest)
    assert core.policy is new.policy and core.policy.layout.roster_size == 4
    assert core.signer is new.signer and new.signer.key.verify_key.raw == newer.site(SITE).signing_key
    assert agent.witnessing.witness.roster is new.roster and "steyr" in new.roster.by_name
    assert new.destination == newer.coordinator.tls_keys[-1] != old.destination
    world.hub.take(SITE, agent.run((Send(relay.Pong(number=1)),)))
    assert world.entries(SITE, "egress")[-1]["destination"] == new.destination


def test_a_certificate_that_ends_takes_the_same_way_at_a_site(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path)
    world.base.authority.renew(world.base.key, "vienna", None, now_ms=world.base.now, days=10)
    newer = world.base.publish()
    for member in ("hub", SITE):
        world.base.identity(member).install_manifest(world.base.published(), now_ms=world.base.now)
    agent = world.start(SITE)
    world.manifest = newer
    world.hub.connect(SITE)
    old = agent.seat.membership
    assert old.policy.lists("vienna")
    world.clock.advance(11 * DAY)
    agent.session.machine.state = SiteState.DEALT
    list(agent.ticked())
    assert agent.seat.membership is old, "an attempt ends under the membership it began under"
    agent.session.machine.state = SiteState.IDLE
    list(agent.ticked())
    assert not agent.session.machine.core.policy.lists("vienna")
    assert agent.seat.membership is not old and agent.seat.manifest is old.manifest
    kept = agent.seat.membership
    list(agent.ticked())
    assert agent.seat.membership is kept


def test_a_certificate_that_ends_takes_the_same_way_at_the_coordinator(tmp_path: Path) -> None:
    hub = Hub.make(tmp_path)
    seat, engine = hub.ready.seat, hub.ready.shell.engine
    assert engine.core.mandate is seat and hub.ready.manifest is seat.manifest
    old = seat.membership
    engine.tick()
    assert seat.membership is old
    hub.world.clock.advance(400 * DAY)  # type: ignore[attr-defined]
    engine.tick()
    assert seat.membership is not old and not any(seat.policy.lists(site) for site in hub.ready.manifest.sites)
    # The manifest is the same one; what has changed is the policy that follows from it.
    assert not any(found is old.policy or found is old for found in reachable(hub.ready.shell))
    hub.close()


def test_a_membership_follows_from_manifest_key_and_time_alone(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    manifest = world.publish()
    first = Membership.of(manifest, SIGNER, now_ms=world.now)
    assert first.at(world.now + DAY) is first
    assert first.at(int(first.until_ms) - 1) is first
    ended = first.at(int(first.until_ms))
    assert ended is not first and ended.since_ms == first.until_ms and ended.signer is SIGNER
    back = ended.at(world.now)
    assert back == first and back.policy == first.policy, "a clock that is set right again changes it back"
    assert Membership.of(manifest, SIGNER, now_ms=world.now, dp_active=True).at(int(first.until_ms)).policy.dp_active
    with pytest.raises(FrozenInstanceError):
        first.manifest = manifest  # type: ignore[misc]


def assigned(path: Path) -> Iterator[tuple[str, str]]:
    """Attributes that are set outside of a constructor, with the function that does it."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
            continue
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for part in parts:
                    if isinstance(part, ast.Attribute):
                        yield function.name, part.attr


def test_there_is_one_assignment() -> None:
    """Nothing in the parties and their machines sets a part of a membership but `Seat.take`."""
    rooms = ("site_agent", "coordinator", "security/secagg", "security/identity")
    found = [
        (path.relative_to(ROOT).as_posix(), function, name)
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        for function, name in assigned(path)
        if name.lstrip("_") in HELD
    ]
    seen = ("security/secagg/site/journal.py", "apply", "manifest")  # a record: which manifest was seen
    assert set(found) == {("security/identity/membership.py", "take", "_membership"), seen} and len(found) == 2


def test_a_seat_tells_the_membership_it_holds(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    first = Membership.of(world.publish(), SIGNER, now_ms=world.now)
    second = Membership.of(world.publish(), SIGNER, now_ms=world.now, dp_active=True)
    seat = Seat(first)
    seat.take(second)
    told = (seat.membership, seat.manifest, seat.policy, seat.roster, seat.layout, seat.signer, seat.destination)
    held = (second, second.manifest, second.policy, second.roster, second.layout, second.signer, second.destination)
    assert all(mine is theirs for mine, theirs in zip(told, held, strict=True))
