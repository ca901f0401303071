"""Who makes a quorum, and which rosters are refused."""

from __future__ import annotations

import dataclasses

import pytest

from lazaret.errors import (
    ConfigError,
)
from security.log.note import KeyType, NoteSigner
from security.log.roster import COORDINATOR, SITE, Party, Roster


def _party(name: str, role: str, number: int) -> Party:
    return Party(
        name=name,
        role=role,
        origin=f"{name}/audit",
        root=NoteSigner.from_seed(f"{name}/audit", bytes([number]) * 32).key,
        cosigner=NoteSigner.from_seed(f"{name}/witness", bytes([number + 100]) * 32, KeyType.COSIGNER).key,
    )


PARTIES = (_party("hub", COORDINATOR, 1), *(_party(name, SITE, 2 + at) for at, name in enumerate("abcd")))
ROSTER = Roster(parties=PARTIES)


def test_quorum_of_a_site() -> None:
    hub, _, b, c, d = (party.cosigner for party in PARTIES)
    assert ROSTER.missing_for_quorum("a/audit", [hub, b, c]) == ()
    assert ROSTER.missing_for_quorum("a/audit", [b, c, d]) == ("hub",)
    assert ROSTER.missing_for_quorum("a/audit", [hub, b]) == ("1 more of c, d",)
    assert len(ROSTER.missing_for_quorum("a/audit", [])) == 2


def test_quorum_of_the_coordinator() -> None:
    _, a, b, *_ = (party.cosigner for party in PARTIES)
    assert ROSTER.missing_for_quorum("hub/audit", [a, b]) == ()
    assert ROSTER.missing_for_quorum("hub/audit", [a])


def test_nobody_witnesses_itself() -> None:
    assert PARTIES[1].cosigner not in ROSTER.cosigners_for("a/audit")


def test_roster_refuses_shared_keys_and_names() -> None:
    with pytest.raises(ConfigError, match="name"):
        Roster(parties=(PARTIES[1], dataclasses.replace(PARTIES[2], name="a")))
    with pytest.raises(ConfigError, match="key"):
        Roster(parties=(PARTIES[1], dataclasses.replace(PARTIES[2], root=PARTIES[1].root)))
    with pytest.raises(ConfigError, match="coordinator"):
        Roster(parties=(PARTIES[0], dataclasses.replace(PARTIES[1], role=COORDINATOR)))
    with pytest.raises(ConfigError, match="mixed up"):
        dataclasses.replace(PARTIES[1], root=PARTIES[1].cosigner)
    with pytest.raises(ConfigError, match="not"):
        dataclasses.replace(PARTIES[1], role="guest")
