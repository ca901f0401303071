"""A method of one's own by the shipped commands, in processes of their own over gRPC: the lab's bits, or nothing."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from npr import plugin
from npr.lab import plugins
from npr.methods import registry
from scripts.local_federation.federation import FederationFolders, Party
from scripts.local_federation.sums import manifest_at
from security.audit.agreement import keys_for
from security.audit.compare import cross
from security.log.reader import LogReader
from security.secagg.state import state_hash
from tests.integration.test_wire_equals_lab import PLAN, in_the_lab, lay_out, over_the_wire
from tests.integration.test_wire_equals_lab import one_thread as one_thread  # a fixture

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method.py"
DIGEST = hashlib.sha256(EXAMPLE.read_bytes()).hexdigest()
ROUNDS = 1
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as `npr-lab --plugin` has it; afterwards nothing of it is left."""
    registry.names()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(plugin, "_loaded", {})
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv(plugins.VARIABLE, str(EXAMPLE))
    plugins.load_plugins()


def prepared(folder: Path) -> FederationFolders:
    plan = PLAN.replace("rounds = 5", f'rounds = {ROUNDS}\nplugin = "{EXAMPLE}"')
    method = ("--method", "focal", "--set", "gamma=1.5")
    folders = lay_out(folder, rounds=ROUNDS, method=method, plan=plan, policy=f'plugins = ["{DIGEST}"]')
    for name in folders.sources:
        (folders.site(name) / "plugins").mkdir()
        shutil.copyfile(EXAMPLE, folders.site(name) / "plugins" / EXAMPLE.name)
    return folders


def started(folders: FederationFolders, name: str, *words: str) -> tuple[int, str]:
    """A command that ends by itself, an agent that is refused or another one: how it ends, and what it says."""
    output = folders.folder / "refused"
    output.unlink(missing_ok=True)
    command = ["site_agent", *words, "--config", folders.site(name) / "site.toml"]
    site = Party(name, command, output, folders.site(name))
    site.start()
    return site.wait_dead(seconds=60), site.text()


def test_a_plugin_trains_a_round_over_the_wire_as_in_the_lab(tmp_path: Path, lab: None) -> None:
    folders = prepared(tmp_path / "federation")
    (result,) = over_the_wire(folders, ROUNDS)
    assert len(result.survivors) == 3 and result.checked
    layout = manifest_at(folders.coordinator / "identity").aggregation.layout
    (state,) = in_the_lab(folders, layout, ROUNDS)
    assert state_hash(state).hex() == result.after.hex()
    root = folders.consortium / "root.pem"
    for log in folders.logs[1:]:
        assert [record.body["plugin"] for record in LogReader(log).records("plugin.loaded")] == [DIGEST]
    crossed = cross(folders.logs, {path: keys_for(path, root) for path in folders.logs})
    # Whether the last checkpoint of so short a run was witnessed before everybody stopped is no matter of this test.
    assert not [finding for finding in crossed.findings if finding.severity.value == "fail"]

    # What was trained is evaluated by the same file, in another process.
    name = next(iter(folders.sources))
    code, said = started(folders, name, "evaluate")
    assert code == 0 and "Traceback" not in said, said

    # The same agents, with one byte of the file swapped; then with the approval taken back.
    file, config = folders.site(name) / "plugins" / EXAMPLE.name, folders.site(name) / "site.toml"
    file.write_bytes(EXAMPLE.read_bytes().replace(b"gamma", b"gemma", 1))
    for words in ((), ("evaluate",), ("check",)):
        code, said = started(folders, name, *words)
        assert code != 0 and DIGEST in said and hashlib.sha256(file.read_bytes()).hexdigest() in said
    shutil.copyfile(EXAMPLE, file)
    config.write_text(config.read_text().replace(DIGEST, "0" * 64))
    for words in ((), ("evaluate",)):
        code, said = started(folders, name, *words)
        assert code != 0 and DIGEST in said and "0" * 64 in said and "Traceback" not in said
    assert len(list(LogReader(folders.site(name) / "state" / "log").records("train.done"))) == ROUNDS
