"""What a listed site can do against the others while the coordinator is honest: each takes a federation and a liar."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from security.secagg import messages, statements
from security.secagg.fields import Wire
from security.secagg.site.attempt import deal_root
from tests.support.evil import EvilCoordinator

Cheat = Callable[[EvilCoordinator, str], None]


def bad_box(run: EvilCoordinator, liar: str, victims: Iterable[str] | None = None) -> None:
    """The liar seals noise for its victims (for the first honest site if none is named), and signs for good shares."""
    named = set(run.honest[:1] if victims is None else victims)

    def spoil(message: messages.Shares, site: str) -> messages.Shares:
        attempt = run.machine(site).aggregation.attempt
        assert attempt is not None
        sites = attempt.context.sites
        lines = [
            replace(line, box=bytes(len(line.box))) if name in named and line.box else line
            for name, line in zip(sites, message.shares, strict=True)
        ]
        root = attempt.own_root = deal_root(message.kx, site, attempt.adverts, lines)
        signature = run.signer(site).sign(statements.deal(message.kx, root))
        return replace(message, shares=tuple(lines), signature=signature)

    run.change(messages.Shares, spoil, by=liar)


def keeps(*kinds: type[Wire]) -> Cheat:
    """Messages of these kinds are not sent."""
    return lambda run, liar: run.lose(*kinds, by=liar)


def wrong_answer(run: EvilCoordinator, liar: str) -> None:
    """An accusation is answered with shares that were not dealt."""

    def forge(message: messages.Disclosure, site: str) -> messages.Disclosure:
        zero = bytes(32)
        signature = run.signer(site).sign(statements.disclose(message.kx, message.holder, zero, zero, message.pair))
        return replace(message, b_share=zero, s_share=zero, signature=signature)

    run.change(messages.Disclosure, forge, by=liar)


def accuse_in_turn(run: EvilCoordinator, liar: str) -> None:
    """In place of its upload the liar accuses another honest dealer in each attempt; then it goes on, or does not."""

    def accuse(message: messages.UploadHeader, site: str) -> list[Wire]:
        dealer = run.honest[len(run.said(messages.Accusation)) % len(run.honest)]
        signature = run.signer(site).sign(statements.accuse(message.kx, dealer))
        accusation = messages.Accusation(site=site, kx=message.kx, dealer=dealer, signature=signature)
        run.heard.append((site, accusation))
        return [accusation, message]

    run.change(messages.UploadHeader, accuse, by=liar)


def both(*cheats: Cheat) -> Cheat:
    def all_of(run: EvilCoordinator, liar: str) -> None:
        for cheat in cheats:
            cheat(run, liar)

    return all_of
