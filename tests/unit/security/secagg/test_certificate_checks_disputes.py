"""Every comparison in the checks of a dispute, asked by itself, and for whom shares leave a site."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import PolicyViolation, RemoteProtocolError, VerificationFailed
from security.secagg import certificate_checks, messages, statements
from security.secagg.certificates import AbortCertificate, AbortLine, Signed
from security.secagg.messages import Accusation
from security.secrets import Secret
from tests.support.evil import VICTIM, EvilCoordinator, evil

LIAR, OTHER = "site-03", "site-01"


def dealt() -> EvilCoordinator:
    run = evil(wide=False)
    run.open_round()
    run.launch(run.plan())
    return run


def test_a_later_member_has_the_secret_of_the_pair_and_an_earlier_one_none() -> None:
    run = evil(wide=False)
    run.open_round()
    run.deaf = True
    run.launch(run.plan())
    attempt = run.machine().aggregation.attempt
    assert attempt is not None
    context, advert, good = attempt.context, attempt.advert, attempt.pairs[OTHER]
    certificate_checks.check_pair(context, advert, OTHER, good)
    for holder, pair, match in ((OTHER, None, "missing"), (OTHER, Secret(bytes(32)), "not the one in the advert")):
        with pytest.raises(VerificationFailed, match=match):
            certificate_checks.check_pair(context, advert, holder, pair)
    earlier = run.machine(OTHER).aggregation.attempt
    assert earlier is not None
    certificate_checks.check_pair(context, earlier.advert, VICTIM, None)
    with pytest.raises(VerificationFailed, match="one too many"):
        certificate_checks.check_pair(context, earlier.advert, VICTIM, good)


def test_an_accusation_is_of_this_attempt_by_its_holder_against_another_member() -> None:
    run = dealt()
    context, kx = run.planned.attempts[-1].context, run.planned.attempts[-1].dealing.kx

    def said(site: str = LIAR, dealer: str = VICTIM, over: bytes = kx) -> Accusation:
        signature = run.sites[LIAR].machine.core.signer.sign(statements.accuse(over, dealer))
        return Accusation(site=site, kx=over, dealer=dealer, signature=signature)

    certificate_checks.check_accusation(run.policy, context, kx, said())
    smaller = replace(context, n=3, members=context.members[1:])
    for wrong, members in (
        (said(over=bytes(32)), context),
        (said(), smaller),
        (said(dealer=LIAR), context),
        (said(site=OTHER), context),
    ):
        with pytest.raises(VerificationFailed):
            certificate_checks.check_accusation(run.policy, members, kx, wrong)


def test_published_shares_and_those_of_colluders_stay_below_the_quorum() -> None:
    context = dealt().planned.attempts[-1].context
    assert (context.t, context.c) == (3, 1)
    certificate_checks.check_disclosures(context, [OTHER, OTHER])
    with pytest.raises(PolicyViolation, match="more shares"):
        certificate_checks.check_disclosures(context, [OTHER, LIAR])


def test_aborts_of_holders_whose_share_is_public_keep_nothing_secret() -> None:
    run = dealt()
    context = run.planned.attempts[-1].context
    lines = tuple(AbortLine(site=site, code=1, signature=bytes(64)) for site in context.sites)
    left = certificate_checks.still_secret(AbortCertificate(ctx=context.ctx(), lines=lines), (LIAR,))
    assert [line.site for line in left.lines] == [site for site in context.sites if site != LIAR]


def test_an_accusation_of_another_dealer_gets_no_share_of_this_one() -> None:
    """Else the coordinator would show one honest accusation to every dealer, and have all their shares."""
    run = evil(wide=False)
    run.lose(messages.Survivors)
    run.open_round()
    kx = run.launch(run.plan()).dealing.kx
    signature = run.signer(LIAR).sign(statements.accuse(kx, OTHER))
    with pytest.raises(RemoteProtocolError, match="another dealer is accused"):
        run.machine().receive(Accusation(site=LIAR, kx=kx, dealer=OTHER, signature=signature))
    assert not run.said(messages.Disclosure)


def test_shares_are_for_the_set_that_was_agreed_to() -> None:
    """Two certified sets cannot be; were there one, this site would not sign its shares for it."""
    run = evil(wide=False)
    run.lose(messages.Quorum)
    run.open_round()
    kx, other = run.launch(run.plan()).dealing.kx, b"U" * 32
    said = {name: site.machine.core.signer.sign(statements.agree(kx, other)) for name, site in run.sites.items()}
    signed = tuple(Signed(site=name, signature=signature) for name, signature in said.items())
    with pytest.raises(RemoteProtocolError, match="another set than this site agreed to"):
        run.machine().receive(messages.Quorum(kx=kx, survivors=other, agreements=signed))
    assert not run.said(messages.Unmask, by=VICTIM)
