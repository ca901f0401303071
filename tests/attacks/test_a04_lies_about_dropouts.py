"""A4: whoever "dropped out" has its mask key opened, whoever "survived" its seed; who has both opened is bare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazaret.errors import RemoteProtocolError, VerificationFailed
from security.secagg import messages
from security.secagg.certificates import Signed
from security.secagg.site import checks
from security.secagg.site.attempt import OpenAttempt
from security.secrets import Secret
from tests.support.evil import VICTIM, EvilCoordinator, assert_recovered, assert_refused, assert_safe, evil


def all_but_the_victim_dropped() -> EvilCoordinator:
    """Everybody has uploaded; the coordinator claims that only the victim and its colluder did."""
    run = evil()

    def claim(shown: messages.Survivors, site: str) -> messages.Survivors:
        kept = tuple(line for line in shown.uploads if line.site in (VICTIM, *run.colluders))
        return replace(shown, uploads=kept)

    run.change(messages.Survivors, claim)
    run.open_round()
    run.launch(run.plan())
    return run


def test_too_few_survivors_are_refused() -> None:
    run = all_but_the_victim_dropped()
    for name in run.honest:
        assert_refused(run, name, VerificationFailed, "check_survivors_count")
    assert not run.said(messages.Agree, by=VICTIM)
    assert_safe(run)


def test_too_few_survivors_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_survivors_count", lambda *_: None)
    run = all_but_the_victim_dropped()
    agreed = run.said(messages.Agree)
    lines = tuple(Signed(site=agree.site, signature=agree.signature) for agree in agreed)
    run.deaf = True
    run.tell_all(messages.Quorum(kx=agreed[0].kx, survivors=agreed[0].survivors, agreements=lines))
    assert_recovered(run)


@pytest.mark.parametrize("claim", ["twice", "out of order", "stranger"])
def test_a_list_of_survivors_that_is_no_set(claim: str) -> None:
    """The old trick of naming a site in two lists has no form here: there is one list, of distinct members."""
    run = evil(wide=False)

    def change(shown: messages.Survivors, site: str) -> messages.Survivors:
        lines = list(shown.uploads)
        odd = {
            "twice": [lines[0], *lines],
            "out of order": lines[::-1],
            "stranger": [*lines[:-1], replace(lines[-1], site="zz")],
        }[claim]
        return replace(shown, uploads=tuple(odd))

    run.change(messages.Survivors, change)
    run.open_round()
    run.launch(run.plan())
    assert_refused(run, VICTIM, VerificationFailed, "check_survivors_members")
    assert run.spoils.recover(1, VICTIM) is None
    run.check_promises()


def asks_twice(run: EvilCoordinator) -> None:
    """The round ends well; then the coordinator asks once more, with the victim on the other side."""
    shown: list[messages.Survivors] = []
    run.change(messages.Survivors, lambda message, site: shown.append(message) or message)
    run.lose(messages.Result, messages.SumFrame)
    run.open_round()
    run.launch(run.plan())
    other = replace(shown[0], uploads=tuple(line for line in shown[0].uploads if line.site != VICTIM))
    run.deaf = True
    run.tell_all(other)


def test_a_second_set_in_the_same_attempt_is_refused() -> None:
    run = evil()
    asks_twice(run)
    assert_refused(run, VICTIM, RemoteProtocolError, "receive")
    assert len(run.said(messages.Agree, by=VICTIM)) == 1
    assert_safe(run)


def test_both_kinds_of_share_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the answer not cut down to one kind for each member, every single update would lie open."""

    def both(self: OpenAttempt, survivors: object) -> Secret:
        shares = [share for site in self.context.sites for share in self.held[site]]
        return Secret(b"".join(share.reveal() for share in shares))

    monkeypatch.setattr(OpenAttempt, "reply", both)
    run = evil()
    asks_twice(run)
    for name in run.honest:
        assert_recovered(run, name)
