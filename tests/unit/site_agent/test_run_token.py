"""A site whose signing key stops answering: it ends, and says nothing that is not signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazaret.errors import KeyUnavailable
from security.crypto.signing import SigningKey
from security.secagg import messages
from tests.support.site_world import SLOT_SECONDS, SiteWorld


def test_a_key_that_is_gone_ends_the_agent_and_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = SiteWorld(tmp_path)
    world.start_all()
    sites = tuple(world.agents)
    world.hub.order(sites)
    for site in sites:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    lost = world.agents["graz"].seat.signer.key
    sign = SigningKey.sign

    def gone(self: SigningKey, label: bytes, signer: str, *fields: bytes) -> bytes:
        if self is lost:
            raise KeyUnavailable("the token does not sign", where="token hospital")
        return sign(self, label, signer, *fields)

    with monkeypatch.context() as patch:
        patch.setattr(SigningKey, "sign", gone)
        with pytest.raises(KeyUnavailable):
            world.hub.aggregate()
    assert not world.hub.sent_by("graz", messages.Advert) and not world.hub.sent_by("graz", messages.Abort)
