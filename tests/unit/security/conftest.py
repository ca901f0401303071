from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.audit_attacks import Lonely
from tests.support.audit_logs import Federation
from tests.support.audit_parties import FIVE
from tests.support.consortium_world import World


@pytest.fixture
def lonely(tmp_path: Path) -> Lonely:
    return Lonely(tmp_path)


@pytest.fixture(scope="session")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A federation under a really signed manifest, with a crash, a dropout and a rotation behind it."""
    folder = tmp_path_factory.mktemp("signed")
    federation = Federation.from_world(World.make(folder / "world", FIVE), folder / "logs")
    federation.play(2)
    federation.restart("linz", stop=False)
    federation.play(1, dropouts=("vienna",))
    federation.members["graz"].log.rotate("epoch over")
    federation.play(1)
    federation.stop()
    return federation


@pytest.fixture(scope="session")
def root_pem(signed: Federation) -> Path:
    return signed.hub.folder.parent.parent / "world" / "consortium" / "root.pem"
