"""A sum that is wrong stops the run: every site keeps the proof, and both operators read why in one line (A11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.status import overview as coordinator_overview
from coordinator.status import standstill
from security.audit.cli import main as privacy_audit
from security.crypto.masking import Accumulator
from security.secagg.site import result_checks
from security.secagg.site.result_checks import WrongSum
from site_agent.config import SiteConfig
from site_agent.status import overview as site_overview
from tests.support.whole_federation import SITES, WholeFederation

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[WholeFederation]:
    made = WholeFederation(tmp_path)
    made.start_all()
    made.run_rounds(1)
    yield made
    if made.shell is not None:
        made.kill_hub()
    for site in list(made.agents):
        made.kill(site)


def judge(federation: WholeFederation, site: str, *, spoil: bool = False, pinned: bool = True) -> Result:
    """What an auditor is told of the file that a site has kept."""
    (path,) = (federation.folder / f"{site}-agent" / "state" / "evidence").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    copy = federation.folder / "handed-over"
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if spoil else content)
    identity = federation.world.identity(site)
    words = ["--manifest", identity.manifest_path, "--root-key", identity.root_path] if pinned else []
    return CliRunner().invoke(privacy_audit, ["check-proof", str(copy), *map(str, words)])


def add_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that adds one to the first value of every sum, and signs what comes of it."""
    honest = Accumulator.unmask

    def wrong(self: Accumulator, *arguments: object, **more: object) -> None:
        honest(self, *arguments, **more)  # type: ignore[arg-type]
        self.total[0] += 1

    monkeypatch.setattr(Accumulator, "unmask", wrong)


def test_after_a_wrong_sum_nobody_goes_on_and_everybody_is_told(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wrongly(monkeypatch)
    # Each site that looks at the chunk stops; its part is handed on to the next, who stops as well.
    federation.run(lambda: set(federation.left) == set(SITES))
    assert all(isinstance(error, WrongSum) for error in federation.left.values())
    assert federation.published == 2
    for site in SITES:
        told = judge(federation, site)
        assert told.exit_code == 0 and "WrongSum: hub signed a sum" in told.output and "proves it" in told.output
        told = site_overview(SiteConfig.read(federation.configs[site]), federation.clock)
        assert "not the sum of the uploads" in told["stopped"] and len(told["evidence"]) == 1
        # Started again it stays stopped: only its operator decides.
        federation.start(site)
    federation.left.clear()
    federation.run(lambda: set(federation.left) == set(SITES))
    assert judge(federation, SITES[0], pinned=False).exit_code == 3
    spoiled = judge(federation, SITES[0], spoil=True)
    assert spoiled.exit_code in (1, 2) and "proves" not in spoiled.output  # false, or no longer readable

    config = federation.folder / "coordinator.toml"
    config.write_text('identity = "hub"\nstate = "hub-state"\nlisten = "127.0.0.1:1"\ninitial_model = "m"\n')
    federation.clock.advance(300_000)
    told = coordinator_overview(config, federation.clock)
    # Who had nothing to look at has said so; who had has not said that it is right.
    assert told["unchecked"]["round"] == 2 and len(told["unchecked"]["missing"]) >= 2
    line = standstill(told, federation.clock.now_ms())
    assert line is not None and line.startswith("stalled: the sum of round 2") and "\n" not in line


def test_without_the_check_the_wrong_sum_is_taken_twin(
    federation: WholeFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_checks, "check_chunk_sum", lambda *_: None)
    add_wrongly(monkeypatch)
    federation.run_rounds(1)
    assert not federation.left


def test_a_false_alarm_convicts_nobody(federation: WholeFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    def cry_wolf(*_: object) -> None:
        raise WrongSum("a site that lies about a good sum")

    monkeypatch.setattr(result_checks, "check_chunk_sum", cry_wolf)
    federation.run(lambda: bool(federation.left))
    (site, *_) = federation.left
    told = judge(federation, site)
    assert told.exit_code == 1 and "it is not wrong" in told.output and "proves" not in told.output
