"""A1: the coordinator puts keys of its own in the place of other sites' keys and sits between them.

Two rules stand in the way, and each alone is enough: adverts are signed, and so are the dealers' lists over KX, the
hash of all adverts. An honest peer never signs a list over keys it did not see.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import VerificationFailed
from security.crypto.key_agreement import HybridPair
from security.crypto.signing import SigningKey
from security.rng import CountedRandomness
from security.secagg import messages, statements
from security.secagg.coordinator.uploads import Dealing
from security.secagg.site import checks
from security.secagg.site.attempt import AdvertisedLog, OpenAttempt
from security.secagg.statements import Signer
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil


def between(run: EvilCoordinator) -> None:
    """Play every other site towards the victim: keys, lists and boxes are the attacker's."""
    run.open_round()
    run.deaf = True
    plan = run.plan()
    advert = run.tell(VICTIM, plan)[0]
    randomness = CountedRandomness(b"puppets")
    keys = {name: SigningKey.generate(randomness) for name in run.sites if name != VICTIM}
    puppets = [
        OpenAttempt.begin(Signer(name, key), plan.context, sequence=1, heads=AdvertisedLog(), randomness=randomness)
        for name, key in keys.items()
    ]
    believed = tuple(replace(e, key=keys[e.site].verify_key) if e.site in keys else e for e in run.policy.roster)
    dealing = Dealing(replace(run.policy, roster=believed), plan.context)
    for one in (advert, *(puppet.advert for puppet in puppets)):
        dealing.take_advert(one)
    for puppet in puppets:
        run.spoils.pairs |= {pair.public: pair for pair in (puppet.mask_pair, puppet.share_pair)}
        run.spoils.mask_seeds[puppet.mask_pair.public] = puppet.mask_seed
        puppet.take_adverts(dealing.shown().adverts)
        dealing.take_shares(puppet.deal(randomness))
    for said in run.tell(VICTIM, dealing.shown()):
        if isinstance(said, messages.Shares):
            dealing.take_shares(said)
            run.tell(VICTIM, dealing.deliver_to(VICTIM))


def test_a_key_of_the_coordinators_own_is_refused() -> None:
    run = evil()
    made = HybridPair.generate(CountedRandomness(b"mine"))
    run.spoils.pairs[made.public] = made

    def swap(shown: messages.Adverts, site: str) -> messages.Adverts:
        first, second, *rest = shown.adverts
        return replace(shown, adverts=(first, replace(second, mask_key=made.public), *rest))

    run.change(messages.Adverts, swap, to=VICTIM)
    run.open_round()
    run.launch(run.plan())
    assert_refused(run, VICTIM, VerificationFailed, "check_advert_signatures")
    assert not run.said(messages.UploadFrame), "nobody has sent a byte of a masked vector"
    assert_safe(run)


def test_playing_every_other_site_is_refused() -> None:
    run = evil()
    between(run)
    assert_refused(run, VICTIM, VerificationFailed, "check_advert_signatures")
    assert_safe(run)


def test_signed_lists_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the signatures on adverts, the ones over KX stop the same attack one step later."""
    monkeypatch.setattr(checks, "check_advert_signatures", lambda *_: None)
    run = evil()
    between(run)
    assert_refused(run, VICTIM, VerificationFailed, "check_deal_roots")
    assert_safe(run)


def test_playing_every_other_site_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signature is looked at: the victim shares its secrets out to the attacker."""
    monkeypatch.setattr(statements, "verify", lambda *_: None)
    run = evil()
    between(run)
    assert_recovered(run)


def test_the_own_advert_changed() -> None:
    """A site that is shown another key for itself would deal under keys that it does not hold."""
    run = evil()
    run.change(
        messages.Adverts,
        lambda shown, site: replace(shown, adverts=(replace(shown.adverts[0], log_size=7), *shown.adverts[1:])),
        to=VICTIM,
    )
    run.open_round()
    run.launch(run.plan())
    assert_refused(run, VICTIM, VerificationFailed, "check_advert_signatures")
    assert_safe(run)
