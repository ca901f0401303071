"""A28: a colluder signs two adverts in one attempt, so that two groups of sites have two transcripts of keys, one CTX.

Nothing is dealt across the groups: a list is signed over its own KX. ABORT names CTX and ends both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import VerificationFailed
from security.crypto import merkle
from security.crypto.key_agreement import BOX_BYTES, PAIR_BYTES
from security.secagg import certificate_checks, messages, statements
from security.secagg.certificates import AbortCertificate, AbortLine, Advert
from security.secagg.messages import DealtShare, Deliver, DeliveredShare, Shares, SignedRoot
from security.secagg.site import checks
from security.secagg.site.attempt import deal_leaves
from tests.support.evil import VICTIM, EvilCoordinator, assert_refused, assert_safe, evil

TWO_FACED = "site-04"
GROUPS = (("site-00", "site-01"), ("site-02", "site-03"))


def two_transcripts(run: EvilCoordinator) -> messages.Plan:
    """Adverts go out in two versions; then each group is given what there is of lists, gaps filled by the attacker."""
    run.open_round()
    run.deaf = True
    plan = run.plan()
    adverts = {said.site: said for name in run.sites for said in run.tell(name, plan) if isinstance(said, Advert)}
    second = replace(adverts[TWO_FACED], log_size=1)
    second = replace(second, signature=run.signer(TWO_FACED).sign(statements.advert(run.policy, second)))
    for group, face in zip(GROUPS, (adverts[TWO_FACED], second), strict=True):
        shown = tuple((adverts | {TWO_FACED: face})[name] for name in plan.context.sites)
        for name in group:
            run.tell(name, messages.Adverts(ctx=plan.context.ctx(), adverts=shown))
    return plan


def deliver_with_gaps(run: EvilCoordinator, plan: messages.Plan) -> None:
    """Sites of the other group have no list under this KX: the attacker makes one up."""
    sites = plan.context.sites
    for name in run.honest:
        kx = run.said(Shares, by=name)[-1].kx
        lists: dict[str, tuple[tuple[DealtShare, ...], bytes]] = {}
        for dealer in sites:
            mine = [said for said in run.said(Shares, by=dealer) if said.kx == kx]
            made_up = tuple(
                DealtShare(
                    b_hash=bytes(32),
                    s_hash=bytes(32),
                    box=bytes(0 if to == dealer else BOX_BYTES),
                    pair=bytes(PAIR_BYTES if to > dealer else 0),
                )
                for to in sites
            )
            lists[dealer] = (mine[-1].shares, mine[-1].signature) if mine else (made_up, bytes(64))
        attempt = run.machine(name).aggregation.attempt
        assert attempt is not None
        leaves = {dealer: deal_leaves(kx, dealer, attempt.adverts, lines) for dealer, (lines, _) in lists.items()}
        roots = tuple(SignedRoot(site=d, root=merkle.root(leaves[d]), signature=lists[d][1]) for d in sites)
        at = plan.context.position(name) - 1
        shares = tuple(
            DeliveredShare(dealer=d, share=lists[d][0][at], path=merkle.Tree(leaves[d]).inclusion_path(at))
            for d in sites
            if d != name
        )
        run.tell(name, Deliver(kx=kx, roots=roots, shares=shares))


def test_neither_group_uploads_and_nobody_is_accused() -> None:
    run = evil(5)
    plan = two_transcripts(run)
    assert len({said.kx for said in run.said(Shares)}) == 2
    deliver_with_gaps(run, plan)
    for name in run.honest:
        assert_refused(run, name, VerificationFailed, "check_deal_roots")
    assert not run.said(messages.UploadFrame) and not run.said(messages.Accusation)
    assert_safe(run)


def test_one_abort_certificate_ends_both() -> None:
    run = evil(5, wide=False)
    plan = two_transcripts(run)
    ctx = plan.context.ctx()
    for name in run.honest:
        request = messages.AbortRequest(
            context=plan.context, signature=run.core.signer.sign(statements.abort_request(ctx))
        )
        run.tell(name, request)
    lines = tuple(AbortLine(site=a.site, code=a.code, signature=a.signature) for a in run.said(messages.Abort))
    mixed = AbortCertificate(ctx=ctx, lines=(lines[0], lines[2], lines[3]))
    certificate_checks.check_abort_certificate(run.policy, plan.context.sites, plan.context.thresholds, mixed)
    assert {memory.kx for name in run.honest for memory in run.machine(name).core.journal.attempts.values()} == {
        said.kx for said in run.said(Shares)
    }
    run.check_promises()


def test_two_adverts_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the signatures on lists, boxes that nobody made let honest sites accuse each other."""
    monkeypatch.setattr(checks, "check_deal_roots", lambda *_: None)
    run = evil(5)
    plan = two_transcripts(run)
    deliver_with_gaps(run, plan)
    accused = {said.dealer for said in run.said(messages.Accusation, by=VICTIM)}
    assert accused & set(GROUPS[1]), "an honest site of the other group"
