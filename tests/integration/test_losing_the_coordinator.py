"""The coordinator's disk is lost in mid-run: it is seen, not built upon, and the run continues from what sites hold."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.backup import take_up
from coordinator.checks import CHECKS, CoordinatorCheckContext
from coordinator.database import FILE
from lazaret.checks import CheckVerdict, run
from lazaret.errors import ConfigError, VerificationFailed
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.audit.findings import Severity
from security.audit.verify import verify
from security.clock import SystemClock
from security.identity.membership import aggregation_policy
from security.identity.pki import Role
from security.log.machine import HEARTBEAT_MS
from security.secagg.certificates import Ack
from security.secagg.handover import Handover
from security.secagg.relay import CloseReason
from site_agent.cli import cli as site_agent
from site_agent.state_commands import write_handover
from tests.support.whole_federation import SITES, WholeFederation, whole_federation

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    with whole_federation(tmp_path, rounds=4) as made:
        yield made


def after_two_rounds(federation: WholeFederation) -> None:
    federation.start_all()
    federation.run_rounds(2)
    federation.run(lambda: all(agent.state_dir.covered.exists() for agent in federation.agents.values()))
    for _ in range(4):
        federation.step()
    federation.kill_hub()


def write_toml(federation: WholeFederation, identity: str = "hub", state: str = "hub-state") -> Path:
    path = federation.folder / "coordinator.toml"
    model = f'initial_model = "{federation.model_path}"'
    path.write_text(f'identity = "{identity}"\nstate = "{state}"\nlisten = "127.0.0.1:1"\n{model}\n')
    return path


def handed_over(federation: WholeFederation, site: str = "graz") -> Path:
    target = federation.folder / f"{site}.safetensors"
    write_handover(federation.agents[site].state_dir, federation.agents[site].manifest, target)
    return target


@pytest.mark.parametrize("how", ["missing", "emptied", "old"])
def test_a_database_without_the_published_rounds_is_refused(federation: WholeFederation, how: str) -> None:
    database = federation.folder / "hub-state" / FILE
    federation.start_all()
    federation.run_rounds(1)
    for extra in ("-wal", "-shm", ""):
        if (path := database.with_name(FILE + extra)).exists():
            shutil.copy(path, federation.folder / f"old{extra}")
    federation.run_rounds(1)
    federation.kill_hub()
    for extra in ("-wal", "-shm", ""):
        database.with_name(FILE + extra).unlink(missing_ok=True)
        if how == "old" and (federation.folder / f"old{extra}").exists():
            shutil.copy(federation.folder / f"old{extra}", database.with_name(FILE + extra))
    if how == "emptied":
        database.write_bytes(b"")
    context = CoordinatorCheckContext.read(write_toml(federation))
    context.clock = federation.clock
    found = [line for line in run(CHECKS, context) if line.check == "database"]
    assert [line.verdict for line in found] == [CheckVerdict.PROBLEM], found
    assert "the privacy log has published round 2" in found[0].what and "coordinator recover" in found[0].hint
    with pytest.raises(ConfigError, match="the privacy log has published round 2"):
        federation.start_hub()


def test_a_lost_database_is_noticed_after_long_idle(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many segments of heartbeats lie between the last result and the end of the log."""
    for name in ("machine", "store", "reader"):
        monkeypatch.setattr(f"security.log.{name}.SEGMENT", 64)
    federation.start_all()
    federation.run_rounds(1)
    assert federation.shell is not None
    for _ in range(4 * 64):
        federation.clock.advance(HEARTBEAT_MS)
        federation.shell.books.log.tick()
    federation.kill_hub()
    for extra in ("-wal", "-shm", ""):
        (federation.folder / "hub-state" / f"{FILE}{extra}").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="the privacy log has published round 1"):
        federation.start_hub()


def test_a_lost_database_is_taken_up_from_a_site(federation: WholeFederation) -> None:
    """Keys and log are there, the database is not: the same coordinator continues, and so does every site."""
    after_two_rounds(federation)
    for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
        (federation.folder / "hub-state" / name).unlink(missing_ok=True)
    found = take_up(write_toml(federation), handed_over(federation), clock=federation.clock)
    assert (found["round"], found["completed"]) == (2, 2)
    federation.start_hub()
    federation.run_rounds(2)
    assert federation.survivors()[-1] == set(SITES) and not federation.left
    assert federation.engine.completed == 4, "the run ends where it was planned to end"


def test_another_coordinator_takes_the_run_up(federation: WholeFederation) -> None:
    """Everything of the old one is lost: another one is enrolled, under the same run, and nobody acts at a hospital."""
    after_two_rounds(federation)
    state, copy = federation.folder / "hub-state", federation.folder / "copy"
    shutil.copytree(state / "log", copy)
    shutil.rmtree(state)
    world = federation.world
    world.authority.revoke("hub", "its disk is lost", now_ms=world.now)
    world.enroll("hub-2", Role.COORDINATOR, hosts=("localhost", "127.0.0.1"))
    federation.manifest = world.publish()
    federation.hub = "hub-2"
    federation.give_manifest("hub-2")
    take_up(write_toml(federation, "hub-2"), handed_over(federation), clock=federation.clock)
    federation.start_hub()
    federation.run_rounds(2)
    assert federation.survivors()[-1] == set(SITES) and not federation.left
    assert {agent.manifest.coordinator.id for agent in federation.agents.values()} == {"hub-2"}
    # Each coordinator answers for what was sent to it. Without the lost log that cannot be decided, unless it is said.
    logs = [state / "log", *(agent.state_dir.log for agent in federation.agents.values())]
    federation.stop_all()
    assert weighty(federation, logs) == {"LogMissing"}
    assert weighty(federation, logs, lost=("hub",)) == set()
    assert weighty(federation, [*logs, copy]) == {"NoStop", "UnsealedTail"}, "it was killed, and nothing else"
    with pytest.raises(ConfigError, match="hub-3 is no party"):
        weighty(federation, logs, lost=("hub-3",))


def weighty(federation: WholeFederation, logs: list[Path], lost: tuple[str, ...] = ()) -> set[str]:
    keys = {path: keys_for(path, federation.world.authority.folder / "root.pem") for path in logs}
    return {found.code for found in cross(logs, keys, lost=lost).findings if found.severity is not Severity.NOTE}


def test_an_older_handover_costs_time_and_nobody_forks(federation: WholeFederation) -> None:
    """A site that has a later result is told why it is turned away, and comes back when the operator has it too."""
    federation.start_all()
    federation.run_rounds(1)
    federation.run(lambda: federation.agents["graz"].state_dir.covered.exists())
    old = handed_over(federation)
    federation.run_rounds(1)
    for _ in range(4):
        federation.step()
    federation.kill_hub()
    for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
        (federation.folder / "hub-state" / name).unlink(missing_ok=True)
    shutil.rmtree(federation.folder / "hub-state" / "log")  # or its own log would show that this is too old
    take_up(write_toml(federation), old, clock=federation.clock)
    federation.start_hub()
    with pytest.raises(AssertionError, match="did not happen"):
        federation.run(lambda: federation.published > 1, seconds=10)
    assert "does not know the newest result" in str(federation.left["graz"])


def test_a_handover_is_believed_for_its_signatures_only(federation: WholeFederation, tmp_path: Path) -> None:
    after_two_rounds(federation)
    policy = aggregation_policy(federation.manifest, now_ms=federation.clock.now_ms())
    good = Handover.read(handed_over(federation), policy)
    changed = good.state.copy()
    changed[0] += 1
    forged = {
        "other tensors": Handover.of(good.covered, changed, 2),
        "no rounds": Handover.of(good.covered, good.state, 0),
    }
    acks = good.covered.check.acks[:1]
    few = type(good.covered)(result=good.covered.result, check=type(good.covered.check)(acks=acks))
    forged["too few signatures"] = Handover.of(few, good.state, 2)
    for name, one in forged.items():
        path = tmp_path / f"{name}.safetensors"
        one.write(path, policy.layout)
        with pytest.raises(VerificationFailed):
            Handover.read(path, policy)


def test_every_reason_to_close_a_stream_has_words_at_the_site() -> None:
    from security.secagg.relay import Goodbye
    from site_agent.effects import parting

    for reason in CloseReason:
        assert parting(Goodbye(code=reason)).error.hint


def lost_before_the_certificate(federation: WholeFederation) -> None:
    """Round 2 is published and accepted by all; then the coordinator is gone, with what could have proven the sum."""
    federation.start_all()
    federation.run_rounds(1)
    federation.run(lambda: all(agent.state_dir.covered.exists() for agent in federation.agents.values()))
    federation.deaf = {(site, Ack) for site in SITES}
    heads = [agent.session.machine.core for agent in federation.agents.values()]
    federation.run(lambda: all(core.head.round == 2 for core in heads))
    assert not any(core.head.certified for core in heads)
    federation.kill_hub()
    shutil.rmtree(federation.folder / "hub-state")
    federation.deaf = set()
    world = federation.world
    world.authority.revoke("hub", "its disk is lost", now_ms=world.now)
    world.enroll("hub-2", Role.COORDINATOR, hosts=("localhost", "127.0.0.1"))
    federation.manifest, federation.hub = world.publish(), "hub-2"
    federation.give_manifest("hub-2")
    assert take_up(write_toml(federation, "hub-2"), handed_over(federation), clock=federation.clock)["round"] == 1
    federation.start_hub()


def stepped_back(federation: WholeFederation, site: str) -> None:
    """What the hospital does: stop, `site-agent step-back`, start."""
    federation.kill(site)
    done = CliRunner().invoke(site_agent, ["--config", str(federation.configs[site]), "step-back", "--reason", "lost"])
    assert done.exit_code == 0, (done.output, done.exception)
    federation.start(site)


@pytest.mark.long
def test_sites_with_a_result_that_nobody_can_verify_go_on(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: federation.clock.now_ms())
    monkeypatch.setattr(SystemClock, "mono_ms", lambda _: federation.clock.mono_ms())
    lost_before_the_certificate(federation)
    # As it was: they are turned away for good.
    with pytest.raises(AssertionError, match="did not happen"):
        federation.run(lambda: federation.published > 1, seconds=10)
    assert all("step-back" in str(federation.left[site].hint) for site in SITES)
    sums = {site: len(federation.agents[site].session.machine.core.journal.uploaded) for site in SITES}
    federation.left.clear()
    for site in SITES:
        stepped_back(federation, site)
        journal = federation.agents[site].session.machine.core.journal
        assert len(journal.uploaded) == sums[site] > 0, "what was sent stays counted"
    federation.run_rounds(3)
    assert federation.survivors()[-1] == set(SITES) and not federation.left
    assert federation.engine.completed == 4
    root, logs = federation.world.authority.folder / "root.pem", []
    for site in SITES:
        logs.append(federation.agents[site].state_dir.log)
    federation.stop_all()
    for path in logs:
        failed = [one for one in verify(path, keys_for(path, root)).findings if one.severity is Severity.FAIL]
        assert not failed, failed


def test_a_verified_result_is_never_given_up(federation: WholeFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemClock, "now_ms", lambda _: federation.clock.now_ms())
    monkeypatch.setattr(SystemClock, "mono_ms", lambda _: federation.clock.mono_ms())
    after_two_rounds(federation)
    before = federation.agents["graz"].state_dir.wal.read_bytes()
    wal = federation.agents["graz"].state_dir.wal
    federation.kill("graz")
    words = ["--config", str(federation.configs["graz"]), "step-back", "--reason", "x"]
    refused = CliRunner().invoke(site_agent, words)
    assert isinstance(refused.exception, ConfigError) and "is verified" in str(refused.exception)
    assert wal.read_bytes() == before
