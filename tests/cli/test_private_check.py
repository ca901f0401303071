"""`site-agent check` in a private federation: cost, ledger, unit, and a trial round that books nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lazaret.checks import CheckVerdict, Line, run
from site_agent.checks.context import SiteCheckContext
from site_agent.checks.run import CHECKS
from site_agent.config import SiteConfig
from site_agent.privacy import ledger_files
from tests.support.check_world import problems
from tests.support.private_world import HOSPITALS, PrivateWorld

GRAZ = HOSPITALS[0]
# Nobody listens in this world.
ALONE = ("coordinator", "clock")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(world: PrivateWorld, *more: str) -> list[Line]:
    context = SiteCheckContext(config=SiteConfig.read(world.configs[GRAZ]), clock=world.clock)
    with closing(context):
        return list(run(CHECKS, context, skip=(*ALONE, *more)))


def test_a_private_hospital_before_its_first_round(tmp_path: Path) -> None:
    world = PrivateWorld(tmp_path, sites=HOSPITALS[:3])
    found = problems(check(world, "images", "trial"))
    assert set(found) == {"privacy"} and "no privacy ledger yet" in found["privacy"][0].what
    assert "site-agent ledger --create" in found["privacy"][0].hint

    world.create_ledgers()
    files = ledger_files(SiteConfig.read(world.configs[GRAZ]))
    before = files.peek()
    lines = check(world)
    assert {line.check for line in lines if line.verdict is not CheckVerdict.OK} == {*ALONE, "processing"}, lines
    told = {line.check: line.what for line in reversed(lines)}
    assert "after 3 rounds the ledger will have booked epsilon" in told["privacy"]
    assert "training takes about" in told["trial"]
    assert files.peek() == before, "a trial releases nothing, so it books nothing"


def test_what_would_void_epsilon(tmp_path: Path) -> None:
    world = PrivateWorld(tmp_path, sites=HOSPITALS[:3])
    world.create_ledgers()
    config = world.configs[GRAZ]
    config.write_text(config.read_text().replace("[policy]", '[policy]\nrequired_classes = ["MEL"]'))
    found = problems(check(world, "images", "trial", "privacy"))
    assert set(found) == {"policy"} and "make epsilon invalid" in found["policy"][0].what
