"""A20: boxes are swapped, sent back to their dealer, or kept from another attempt.

A box that is not the one in the dealer's signed list is the coordinator's doing, and nobody is accused of it. A
colluder that lists a copy of somebody else's box is refused by the box itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lazaret.errors import VerificationFailed
from security.secagg import messages, statements
from security.secagg.messages import Deliver, DeliveredShare
from security.secagg.site import checks
from security.secagg.site.attempt import deal_root
from tests.support.evil import VICTIM, EvilCoordinator, assert_refused, assert_safe, evil

Boxes = tuple[DeliveredShare, ...]


def box_of(entry: DeliveredShare, box: bytes) -> DeliveredShare:
    return replace(entry, share=replace(entry.share, box=box))


def swapped(run: EvilCoordinator, shares: Boxes) -> Boxes:
    first, second, *rest = shares
    return box_of(first, second.share.box), box_of(second, first.share.box), *rest


def whole_lines_swapped(run: EvilCoordinator, shares: Boxes) -> Boxes:
    first, second, *rest = shares
    return replace(second, dealer=first.dealer), replace(first, dealer=second.dealer), *rest


def sent_back(run: EvilCoordinator, shares: Boxes) -> Boxes:
    own = run.said(messages.Shares, by=VICTIM)[-1].shares
    return tuple(box_of(entry, own[at].box) for at, entry in enumerate(shares, start=1))


def kept(run: EvilCoordinator, shares: Boxes) -> Boxes:
    """From an earlier attempt that died before anything was sent."""
    old = {said.site: said.shares[0].box for said in reversed(run.said(messages.Shares))}
    return tuple(box_of(entry, old[entry.dealer]) for entry in shares)


def tampered(change: Callable[[EvilCoordinator, Boxes], Boxes]) -> EvilCoordinator:
    run = evil(wide=False)
    run.open_round()
    run.lose(Deliver)
    attempt = run.launch(run.plan())
    aborts = run.aborts_of(attempt, run.sites)
    run.rules.clear()
    run.change(Deliver, lambda message, site: replace(message, shares=change(run, message.shares)), to=VICTIM)
    run.launch(run.plan(aborts=[aborts]))
    return run


@pytest.mark.parametrize("change", [swapped, whole_lines_swapped, sent_back, kept])
def test_a_box_that_is_not_in_the_signed_list(change: Callable[[EvilCoordinator, Boxes], Boxes]) -> None:
    run = tampered(change)
    assert_refused(run, VICTIM, VerificationFailed, "check_delivered_path")
    assert not run.said(messages.Accusation), "the coordinator tampered: no dealer is accused"
    assert not run.said(messages.UploadFrame, by=VICTIM)
    run.check_promises()


@pytest.mark.parametrize("change", [swapped, sent_back, kept])
def test_a_box_that_is_not_in_the_signed_list_twin(
    change: Callable[[EvilCoordinator, Boxes], Boxes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the path to the signed root, the victim signs an accusation against an honest dealer."""
    monkeypatch.setattr(checks, "check_delivered_path", lambda *_: None)
    run = tampered(change)
    assert "site-01" in [said.dealer for said in run.said(messages.Accusation, by=VICTIM)]


def test_a_copied_box_in_a_signed_list() -> None:
    """The colluder lists the victim's boxes as its own. They do not open under its name, and it is accused itself."""
    run = evil()

    def copy(message: messages.Shares, site: str) -> messages.Shares:
        stolen = run.said(messages.Shares, by=VICTIM)[-1].shares
        lines = list(message.shares)
        for at in (1, 2):
            lines[at] = replace(lines[at], box=stolen[at].box)
        attempt = run.machine(site).aggregation.attempt
        assert attempt is not None
        root = deal_root(message.kx, site, attempt.adverts, lines)
        attempt.own_root = root
        return replace(message, shares=tuple(lines), signature=run.signer(site).sign(statements.deal(message.kx, root)))

    run.change(messages.Shares, copy, by="site-03")
    run.open_round()
    run.launch(run.plan())
    for name in ("site-01", "site-02"):
        assert [said.dealer for said in run.said(messages.Accusation, by=name)] == ["site-03"]
    assert_safe(run)
