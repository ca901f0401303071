"""Every event has an emitter in the programs that users run; what changed between starts, and what people did, too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from coordinator.ingress_log import changes
from lazaret.errors import AuditLogError, ConfigError
from security.audit.verify import verify
from security.identity.manifest import Revocation
from security.log import events as ev
from security.log.log_commands import log_commands
from security.log.schema import SCHEMAS
from tests.support.audit_attacks import Lonely, unchecked, weighty
from tests.support.consortium_world import World
from tests.support.site_world import SiteWorld

ROOT = Path(__file__).parents[4]
BOTH, SITE, HUB = "both", "site", "coordinator"
# Which module makes each event, and in whose log it can be. Modules of security/log work for both.
EMITTERS = {
    "log.genesis": (BOTH, "security/log/opening.py"),
    "manifest.adopted": (BOTH, "security/log/writer.py"),
    "run.offered": (SITE, "site_agent/next_run.py"),
    "run.accepted": (SITE, "site_agent/next_run.py"),
    "run.stopped": (SITE, "site_agent/log_events.py"),
    "agent.start": (BOTH, "security/log/opening.py"),
    "software.differs": (BOTH, "security/log/opening.py"),
    "agent.stop": (BOTH, "site_agent/client.py", "coordinator/run.py"),
    "config.changed": (BOTH, "security/log/writer.py"),
    "policy.changed": (SITE, "security/log/writer.py"),
    "peer.enrolled": (HUB, "coordinator/ingress_log.py"),
    "peer.revoked": (HUB, "coordinator/ingress_log.py"),
    "data.opened": (SITE, "site_agent/log_events.py"),
    "plugin.loaded": (SITE, "site_agent/log_events.py"),
    "trainer.isolated": (SITE, "site_agent/log_events.py"),
    "round.invited": (SITE, "security/secagg/site/entries.py"),
    "round.declined": (SITE, "security/secagg/site/entries.py"),
    "model.received": (SITE, "site_agent/log_events.py"),
    "train.done": (SITE, "site_agent/log_events.py"),
    "dp.reserved": (SITE, "site_agent/budget.py"),
    "dp.committed": (SITE, "site_agent/budget.py"),
    "egress": (SITE, "security/log/egress.py"),
    "egress.blocked": (SITE, "security/log/egress.py"),
    "receipt": (SITE, "site_agent/log_events.py"),
    "ingress": (HUB, "coordinator/ingress_log.py"),
    "ingress.partial": (HUB, "coordinator/ingress_log.py"),
    "secagg.survivors": (BOTH, "security/secagg/site/entries.py", "coordinator/ingress_log.py"),
    "secagg.unmasked": (BOTH, "security/secagg/site/entries.py", "coordinator/ingress_log.py"),
    "aggregate.published": (HUB, "coordinator/ingress_log.py"),
    "result.voted": (BOTH, "security/secagg/site/entries.py"),
    "checkpoint.seen": (BOTH, "site_agent/witness.py", "coordinator/ingress_log.py"),
    "cosigned": (BOTH, "site_agent/witness.py", "coordinator/witness.py", "security/log/writer.py"),
    "heartbeat": (BOTH, "security/log/machine.py"),
    "net.counter": (BOTH, "security/log/egress.py"),
    "clock.adjusted": (BOTH, "security/log/machine.py"),
    "key.rotated": (BOTH, "security/log/writer.py"),
    "log.recovered": (BOTH, "security/log/opening.py"),
    "segment.sealed": (BOTH, "security/log/machine.py"),
    "annex.erased": (BOTH, "security/log/writer.py"),
    "operator.action": (BOTH, "security/log/log_commands.py"),
    "access.exported": (BOTH, "security/log/log_commands.py"),
}


def _made_in(path: Path) -> set[str]:
    """Types of the events that a module constructs."""
    names = {schema.cls.__name__: name for name, schema in SCHEMAS.items()}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found.add(names.get(called, ""))
    return found


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_event_is_made_by_a_real_program(name: str) -> None:
    _, *modules = EMITTERS[name]
    for module in modules:
        assert name in _made_in(ROOT / module), module


def test_specification_names_the_same_logs() -> None:
    spec = (ROOT / "docs" / "spec" / "audit-log.md").read_text()
    told = {
        name: row[2]
        for row in re.finditer(r"^\| ((?:`[a-z.]+`(?:, )?)+) \| (both|site|coordinator) \|", spec, re.MULTILINE)
        for name in re.findall(r"`([a-z.]+)`", row[1])
    }
    assert told == {name: who for name, (who, *_) in EMITTERS.items()}


# Settings that differ from those of the last start


def _start(lonely: Lonely, config: str) -> None:
    lonely.log.append(
        ev.AgentStart(
            version="0.2.0",
            package="1" * 64,
            dependencies="2" * 64,
            proto="3" * 64,
            image=None,
            sbom=None,
            config=config,
            insecure=(),
        )
    )


def _restart(lonely: Lonely, config: str, policy: str | None, *, say: bool = True) -> None:
    lonely.log.append(ev.AgentStop(reason="end"))
    lonely.log.close()
    log = lonely.reopen()
    if say:
        log.note_settings(config=config, policy=policy, who="root")
    _start(lonely, config)
    log.checkpoint()


def test_changed_settings_are_said_once_and_noted(lonely: Lonely) -> None:
    lonely.log.note_settings(config="a" * 64, policy="0" * 64, who="root")
    _start(lonely, "a" * 64)
    _restart(lonely, "a" * 64, "0" * 64)
    before = verify(lonely.folder, lonely.keys)
    assert not {"config.changed", "policy.changed"} & before.types.keys()
    _restart(lonely, "b" * 64, "c" * 64)
    _restart(lonely, "b" * 64, "c" * 64)
    after = verify(lonely.folder, lonely.keys)
    assert (after.types["config.changed"], after.types["policy.changed"]) == (1, 1)
    assert lonely.codes() == set()
    assert "SettingsChanged" in {finding.code for finding in after.findings}


def test_settings_that_changed_in_silence(lonely: Lonely) -> None:
    _start(lonely, "a" * 64)
    _restart(lonely, "b" * 64, None, say=False)
    assert lonely.codes() == {"SettingsUnannounced"}
    with unchecked("SettingsUnannounced"):
        assert lonely.codes() == set(), "twin"


def test_change_that_does_not_follow_from_the_last_one(lonely: Lonely) -> None:
    lonely.log.append(ev.PolicyChanged(old="d" * 64, new="e" * 64, who="root", reason="x", document=None))
    lonely.log.checkpoint()
    assert lonely.codes() == {"SettingsUnannounced"}


# Who may take part


def test_peers_that_come_leave_and_renew(tmp_path: Path) -> None:
    manifest = World.make(tmp_path).publish()
    everybody = list(changes(None, manifest))
    assert [event.body()["site"] for event in everybody] == list(manifest.sites)
    assert list(changes(manifest, manifest)) == []
    left, renewed, *others = manifest.roster
    gone = Revocation(certificate="ab" * 32, member=left.id, reason="key lost", at_ms=1)
    renewed = renewed.model_copy(update={"tls_keys": (*renewed.tls_keys, "cd" * 32)})
    after = manifest.model_copy(update={"roster": (renewed, *others), "revocations": (gone,)})
    revoked, enrolled = changes(manifest, after)
    assert (revoked.type, revoked.body()["site"], revoked.body()["reason"]) == ("peer.revoked", left.id, "key lost")
    assert (enrolled.type, enrolled.body()["spki"]) == ("peer.enrolled", "cd" * 32)


def test_real_site_says_that_its_file_was_edited(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path)
    world.start("graz")
    world.kill("graz")
    path = world.configs["graz"]
    path.write_text(path.read_text() + "\nmost_rounds = 7\n")  # its last table is [policy]
    world.start("graz")
    (config,), (policy,) = world.entries("graz", "config.changed"), world.entries("graz", "policy.changed")
    starts = world.entries("graz", "agent.start")
    assert [config["old"], config["new"]] == [start["config"] for start in starts]
    assert policy["old"] != policy["new"] and "most_rounds" not in str(policy)
    world.kill("graz")
    world.start("graz")
    assert len(world.entries("graz", "config.changed")) == 1


# What people do


def _run(lonely: Lonely, *words: str) -> Result:
    option = click.option("--config", "config_path", type=Path)
    commands = {command.name: command for command in log_commands(lambda _: lonely.reopen(), option)}
    return CliRunner().invoke(commands[words[0]], words[1:])


def test_log_is_handed_to_an_auditor(lonely: Lonely, tmp_path: Path) -> None:
    lonely.log.append(ev.OperatorAction(command="x", role="y"), annex={"images": 3})
    lonely.log.close()
    target = tmp_path / "for the auditor"
    words = ("log-export", str(target), "--auditor", "Dr. Maier, TÜV", "--purpose", "yearly audit")
    assert _run(lonely, *words).exit_code == 0
    result = verify(target, lonely.keys)
    assert result.types["access.exported"] == 1 and weighty(result.findings) == set()
    assert not (target / "annex").exists() and (lonely.folder / "annex").exists()
    assert isinstance(_run(lonely, *words).exception, ConfigError), "nothing is overwritten"


def test_actions_and_erasures_are_recorded(lonely: Lonely) -> None:
    seq = lonely.log.append(ev.OperatorAction(command="x", role="y"), annex={"images": 3})
    lonely.log.close()
    assert _run(lonely, "log-note", "replaced the disk").exit_code == 0
    assert _run(lonely, "log-erase", "0", str(seq), "--authority", "data protection officer").exit_code == 0
    assert isinstance(_run(lonely, "log-erase", "3", "1", "--authority", "x").exception, ConfigError)
    assert isinstance(_run(lonely, "log-note", "two\nlines").exception, ConfigError)
    result = verify(lonely.folder, lonely.keys)
    assert (result.types["operator.action"], result.types["annex.erased"]) == (2, 1)
    assert weighty(result.findings) == set()
    assert {finding.code for finding in result.findings} == {"AnnexUnavailable", "RulesUnknown"}


def test_a_running_agent_keeps_its_log(lonely: Lonely) -> None:
    refused = _run(lonely, "log-note", "x").exception
    assert isinstance(refused, AuditLogError) and "stop the agent" in (refused.hint or "")
