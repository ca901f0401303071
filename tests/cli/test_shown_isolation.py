"""What `check` and `status` say of the process that sees images."""

from __future__ import annotations

import pytest

from lazaret.checks import CheckVerdict
from site_agent.checks.context import SiteCheckContext
from site_agent.checks.run import isolation
from site_agent.config import SiteConfig
from site_agent.status import isolation_line, overview
from tests.support.site_world import SiteWorld


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SiteWorld:
    made = SiteWorld(tmp_path_factory.mktemp("world"))
    made.start("graz")
    return made


def test_check_tries_it_and_changes_nothing(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SiteConfig.read(world.configs["linz"])
    before = sorted(config.path.parent.rglob("*"))
    context = SiteCheckContext(config=config, clock=world.clock)
    (line,) = isolation(context)
    assert line.verdict is CheckVerdict.OK and "could not open a connection: enforced by" in line.what
    # The planted fault: a network is left open, for several processes.
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    (line,) = isolation(context)
    assert line.verdict is CheckVerdict.WARNING and "was given a network" in line.what
    assert sorted(config.path.parent.rglob("*")) == before


def test_status_shows_the_newest_entry(world: SiteWorld) -> None:
    found = overview(SiteConfig.read(world.configs["graz"]), world.clock)["isolation"]
    assert isolation_line(found).endswith("cannot open a connection: enforced by network namespace, seccomp, Landlock")
    assert "can open a connection" in isolation_line(found | {"connection": True})
    assert "it can read the private keys" in isolation_line(found | {"keys": True})
    assert "train together" in isolation_line(found | {"connection": True, "ranks": True})
