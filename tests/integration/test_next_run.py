"""From run to run by wire: the coordinator carries manifest and model, each hospital checks both and decides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from safetensors.numpy import load_file, save_file

from coordinator.effects import ENDED
from coordinator.run import ModelFile
from coordinator.run_queue import StopFile
from lazaret.errors import ConfigError, ManifestRejected, PolicyViolation, VerificationFailed
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.crypto.ring import FRAME_BYTES
from security.identity import acceptance
from security.identity.manifest import Manifest
from security.identity.pinned_files import InitialModel
from security.log.reader import LogReader
from security.secagg.relay import ManifestFrame, ModelFrame
from security.secagg.state import State, canonical, flatten
from security.secagg.statements import run_stop
from site_agent import assembly, next_run
from site_agent.config import SiteConfig
from site_agent.next_run import accept
from site_agent.policy import SitePolicy
from site_agent.session import SessionPhase
from tests.support.consortium_world import SITES
from tests.support.site_world import policy_table
from tests.support.whole_federation import WholeFederation, whole_federation

pytestmark = pytest.mark.timeout(240)
WITHIN = policy_table(accept_runs='"within_policy"')
Change = Callable[[str], str]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    with whole_federation(tmp_path, sites=SITES, rounds=1, policy=WITHIN) as made:
        yield made


def finish_first(federation: WholeFederation) -> None:
    federation.start_all()
    federation.run_rounds(1)


def publish_second(federation: WholeFederation, change: Change = lambda plan: plan, *, run: str = "run-2") -> Path:
    """Another run with another model. The consortium gives both to the operator alone, who installs them."""
    world, folder = federation.world, federation.world.authority.folder
    first = load_file(folder / "initial.safetensors")
    save_file({name: values + np.float32(0.25) for name, values in first.items()}, folder / f"{run}.safetensors")
    text = world.authority.plan_path.read_text().replace('run = "run-1"', f'run = "{run}"')
    world.write_plan(change(text.replace('initial = "initial.safetensors"', f'initial = "{run}.safetensors"')))
    federation.manifest = world.publish()
    federation.model_path = folder / f"{run}.safetensors"
    federation.adopt_at_hub()
    return federation.model_path


def entries(federation: WholeFederation, site: str, name: str) -> list[dict[str, Any]]:
    return [record.body for record in LogReader(federation.agents[site].state_dir.log).checked(name)]


def waits(federation: WholeFederation) -> bool:
    return all(agent.session.phase is SessionPhase.AWAITING_RUN for agent in federation.agents.values())


def test_three_agents_go_from_run_1_to_run_2_by_wire(federation: WholeFederation) -> None:
    """No file is copied to a site, and none is started again by hand."""
    finish_first(federation)
    model = publish_second(federation)
    federation.run(lambda: sorted(federation.started) == sorted(SITES))
    federation.run_rounds(1)
    assert federation.survivors() == [set(SITES)] and not federation.left
    for site in SITES:
        agent = federation.agents[site]
        fetched = agent.state_dir.folder / "initial" / f"{federation.manifest.model.initial_file}.safetensors"
        assert fetched.read_bytes() == model.read_bytes()
        assert agent.manifest.run == "run-2" and agent.session.machine.core.head.round == 1
        (entry,) = entries(federation, site, "run.accepted")
        assert entry["by"] == "policy" and entry["fetched"]
        assert entry["model"] == federation.manifest.model.initial_file and entry["bytes"] == model.stat().st_size
        assert (agent.state_dir.folder / "runs" / "run-1" / "wal").exists()
    logs = [federation.folder / "hub-state" / "log", *(agent.state_dir.log for agent in federation.agents.values())]
    federation.stop_all()
    root = federation.world.authority.folder / "root.pem"
    crossed = cross(logs, {path: keys_for(path, root) for path in logs})
    assert crossed.exit_code == 0, [finding for finding in crossed.findings if finding.severity.value != "note"]


# A coordinator that swaps a byte of the model.


class Swapping(ModelFile):
    """Sends the model with one bit of its last byte turned."""

    def frames(self, first: int) -> Iterator[ModelFrame]:
        for frame in super().frames(first):
            last = frame.index * FRAME_BYTES + len(frame.data) == frame.length
            data = frame.data[:-1] + bytes([frame.data[-1] ^ 1]) if last else frame.data
            yield ModelFrame(digest=frame.digest, length=frame.length, index=frame.index, data=data)


def swap_a_byte(federation: WholeFederation) -> None:
    assert federation.shell is not None and federation.shell.model is not None
    federation.shell.model = Swapping(federation.shell.model.path, federation.shell.model.digest)


def test_a_swapped_byte_in_the_model_is_refused(federation: WholeFederation) -> None:
    finish_first(federation)
    publish_second(federation)
    swap_a_byte(federation)
    federation.run(lambda: set(federation.left) == set(SITES))
    assert all(isinstance(error, VerificationFailed) for error in federation.left.values())
    for site in SITES:
        agent = federation.agents[site]
        assert agent.manifest.run == "run-1" and agent.identity.manifest(now_ms=federation.world.now).run == "run-1"
        assert not list((agent.state_dir.folder / "initial").iterdir()), "nothing of it is kept"
        assert not entries(federation, site, "run.accepted")
    # An honest coordinator's is taken on the next stream.
    assert federation.shell is not None
    model = federation.shell.model
    federation.shell.model = ModelFile(model.path, model.digest)  # type: ignore[union-attr]
    federation.run(lambda: sorted(federation.started) == sorted(SITES))


def test_twin_without_the_check_a_swapped_byte_becomes_the_model(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_first(federation)
    model = publish_second(federation)
    swap_a_byte(federation)
    pinned, honest = federation.manifest.model.initial_file, next_run._digest
    monkeypatch.setattr(next_run, "_digest", lambda path: pinned if path.parent.name == "initial" else honest(path))
    for module in (next_run, assembly):
        monkeypatch.setattr(module, "pinned_model", believed)
    federation.run(lambda: sorted(federation.started) == sorted(SITES))
    swapped = bytearray(model.read_bytes())
    swapped[-1] ^= 1
    begun_with = {entries(federation, site, "run.accepted")[0]["model"] for site in SITES}
    assert begun_with == {hashlib.sha256(swapped).hexdigest()}


def believed(path: Path, manifest: Manifest) -> tuple[InitialModel, State]:
    """`pinned_model` without its checks."""
    model, layout = InitialModel.read(path), manifest.aggregation.layout
    return model, canonical(flatten(layout, {block.name: model.tensors[block.name] for block in layout.state_blocks}))


# A run that the consortium did not sign.


def forge_a_run(federation: WholeFederation) -> None:
    """The coordinator has the consortium's manifest, and gives it another run of its own choice."""
    forged = json.loads(federation.world.published())
    current = federation.manifest
    forged["manifest"] |= {"run": "run-3", "version": current.version + 1, "previous": current.digest.hex()}
    data = rfc8785.dumps(forged) + b"\n"
    frame = ManifestFrame(version=current.version + 1, length=len(data), index=0, data=data)
    for site in list(federation.agents):
        federation.streams[site].put([frame])


def test_a_run_that_the_consortium_did_not_sign_is_refused(federation: WholeFederation) -> None:
    finish_first(federation)
    forge_a_run(federation)
    federation.run(lambda: set(federation.left) == set(SITES))
    assert all(isinstance(error, ManifestRejected) for error in federation.left.values())
    for site in SITES:
        assert federation.world.identity(site).manifest(now_ms=federation.world.now) == federation.manifest


def test_twin_without_the_signature_the_coordinator_begins_a_run_of_its_own(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_first(federation)
    monkeypatch.setattr(acceptance, "check_signature", lambda *_: None)
    forge_a_run(federation)
    federation.run(lambda: sorted(federation.started) == sorted(SITES))
    assert {agent.manifest.run for agent in federation.agents.values()} == {"run-3"}


# A run outside of the hospital's policy.

STRICT = policy_table(accept_runs='"within_policy"', methods='["fednpr-per"]')


def other_method(plan: str) -> str:
    return plan.replace('method = "fednpr-per"', 'method = "fedavg"')


def test_a_run_outside_of_the_policy_is_refused(tmp_path: Path) -> None:
    with whole_federation(tmp_path, sites=SITES, rounds=1, policy=STRICT) as federation:
        finish_first(federation)
        publish_second(federation, other_method)
        federation.run(lambda: waits(federation) and all(agent.next_run.offer for agent in federation.agents.values()))
        for _ in range(20):
            federation.step()
        assert not federation.started and not federation.left
        for site in SITES:
            agent = federation.agents[site]
            (entry,) = entries(federation, site, "run.offered")
            assert entry["next"] == "run-2" and entry["reason"].startswith("[policy] methods")
            assert agent.outbox.sent["ModelRequest"] == 0 and agent.manifest.run == "run-1"
            config = SiteConfig.read(federation.configs[site])
            with pytest.raises(PolicyViolation, match="fedavg is not among those permitted"):
                accept(config, agent.identity, "run-2", now_ms=federation.world.now)


def test_twin_without_the_policy_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SitePolicy, "check_federation", lambda *_: None)
    with whole_federation(tmp_path, sites=SITES, rounds=1, policy=STRICT) as federation:
        finish_first(federation)
        publish_second(federation, other_method)
        federation.run(lambda: sorted(federation.started) == sorted(SITES))


# A hospital that wants to be asked.


def test_a_hospital_that_wants_to_be_asked_is_asked_once_and_goes_on_without_a_restart(tmp_path: Path) -> None:
    with whole_federation(tmp_path, sites=SITES, rounds=1) as federation:
        finish_first(federation)
        publish_second(federation)
        federation.run(lambda: waits(federation) and all(agent.next_run.offer for agent in federation.agents.values()))
        federation.disconnect("graz")
        federation.run(lambda: "graz" in federation.streams)
        for _ in range(20):
            federation.step()
        assert not federation.started
        assert not any(agent.outbox.sent["ModelRequest"] for agent in federation.agents.values())
        for site in SITES:
            assert len(entries(federation, site, "run.offered")) == 1
            config = SiteConfig.read(federation.configs[site])
            with pytest.raises(ConfigError, match="no run run-7 waits here"):
                accept(config, federation.agents[site].identity, "run-7", now_ms=federation.world.now)
            assert accept(config, federation.agents[site].identity, "run-2", now_ms=federation.world.now).run == "run-2"
        federation.run(lambda: sorted(federation.started) == sorted(SITES))
        federation.run_rounds(1)
        assert [entries(federation, site, "run.accepted")[0]["by"] for site in SITES] == ["operator"] * 3


# Runs that wait, and a run that ends early.


def test_the_operators_signed_word_ends_a_run_and_the_sites_wait_for_the_next_one(tmp_path: Path) -> None:
    with whole_federation(tmp_path, sites=SITES, rounds=50, policy=WITHIN) as federation:
        finish_first(federation)
        shell = federation.shell
        assert shell is not None
        StopFile(shell.storage.folder).set("run-1", "enough")
        federation.run(lambda: all(agent.session.stopped for agent in federation.agents.values()))
        rounds, trained = len(federation.rounds), federation.agents["graz"].session.rounds_done
        for _ in range(40):
            federation.step()
        assert len(federation.rounds) == rounds and federation.rounds[-1][3] == ENDED
        assert federation.agents["graz"].session.rounds_done == trained
        federation.kill("graz")
        federation.start("graz")
        assert federation.agents["graz"].session.stopped, "a restarted site knows"
        assert [len(entries(federation, site, "run.stopped")) for site in SITES] == [1, 1, 1]
        federation.kill_hub()
        federation.start_hub()
        assert len(federation.rounds) == rounds, "and so does a restarted coordinator"
        publish_second(federation)
        federation.run(lambda: sorted(federation.started) == sorted(SITES))
        federation.run_rounds(1)


def test_a_stopped_site_declines_whatever_the_coordinator_orders(tmp_path: Path) -> None:
    """The word can only stop: a coordinator that goes on after it has nobody left who trains."""
    with whole_federation(tmp_path, sites=SITES, rounds=50) as federation:
        finish_first(federation)
        shell = federation.shell
        assert shell is not None
        for site in SITES:
            federation.streams[site].put([shell._run_stop()])
        federation.run(lambda: all(agent.session.declined for agent in federation.agents.values()))
        assert all("has ended this run" in agent.session.declined[1] for agent in federation.agents.values())  # type: ignore[index]


def test_a_word_that_the_coordinator_did_not_sign_or_for_another_run_stops_nothing(tmp_path: Path) -> None:
    with whole_federation(tmp_path, sites=SITES, rounds=50) as federation:
        finish_first(federation)
        shell = federation.shell
        assert shell is not None
        good, signer = shell._run_stop(), shell.engine.core.signer
        other = signer.sign(run_stop("run-0", good.manifest_hash))
        for word in (replace(good, signature=bytes(64)), replace(good, run="run-0", signature=other)):
            federation.streams["graz"].put([word])
            federation.step()
            assert not federation.agents["graz"].session.stopped
        federation.run_rounds(1)
        assert "graz" in federation.survivors()[-1]
