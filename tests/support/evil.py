"""A coordinator that lies, and sites that help it.

`EvilCoordinator` is a whole federation of real machines with the attacker on the wire: it changes, drops, repeats or
invents what sites are shown (C0 to C5), keeps everything they say, and knows the full state of its colluders.
`spoils.Spoils` is what it holds, and the best decoder for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lazaret.errors import ToolkitError
from protos.loopback import COORDINATOR
from security.clock import ManualClock
from security.crypto.prg import Words
from security.rng import CountedRandomness
from security.secagg import messages, statements
from security.secagg import state as states
from security.secagg.certificates import AbortCertificate, AbortLine, RepeatCertificate
from security.secagg.context import EarlierSum, RepeatOf
from security.secagg.coordinator.attempt import CoordinatorAttempt
from security.secagg.coordinator.rounds import CoordinatorRound
from security.secagg.effects import Effect, Effects, Ended
from security.secagg.fields import Wire
from security.secagg.layout import Layout
from security.secagg.site.machine import SiteMachine
from security.secagg.statements import Signer
from tests.support.secagg_world import CONFIG, RecordedFederation, names, random_updates, small_layout
from tests.support.spoils import Spoils, correlation

VICTIM = "site-00"
# The correlation of a vector with independent noise has standard deviation 1/sqrt(d). At this length 0.01 is five of
# them: noise exceeds it less than once in a million tests.
WIDE = 262_144
LEAK = 0.01
WON = 0.99

Change = Callable[[Any, str], Any]


@lru_cache(maxsize=8)
def wide_layout(roster: int) -> Layout:
    return small_layout(roster, words=WIDE)


@lru_cache(maxsize=16)
def _wide_updates(roster: int, seed: int) -> dict[str, Words]:
    updates = random_updates(wide_layout(roster), names(roster), seed)
    for words in updates.values():
        words.flags.writeable = False
    return updates


@dataclass(frozen=True)
class Rule:
    """What happens to messages of one kind; `site` is the other end, None for every one."""

    kind: type[Wire]
    change: Change
    to: str | None
    by: str | None

    def fits(self, sender: str, receiver: str, message: Wire) -> bool:
        return isinstance(message, self.kind) and self.to in (None, receiver) and self.by in (None, sender)


class EvilCoordinator(RecordedFederation):
    """Real machines on both sides, and an attacker that owns the coordinator, the wire and the colluders."""

    def __init__(self, *args: Any, colluders: Iterable[str] = (), **options: Any) -> None:
        self.colluders = tuple(colluders)
        self.rules: list[Rule] = []
        self.heard: list[tuple[str, Wire]] = []
        self.noted: dict[str, list[Effect]] = {}
        self.deaf = False  # then the coordinator's own machine does not get what sites say: the attacker drives
        super().__init__(*args, **options)
        self.spoils = Spoils(self.policy.layout)
        self.hook = self._tamper

    # On the wire.

    def change(self, kind: type[Wire], change: Change, *, to: str | None = None, by: str | None = None) -> None:
        """From now on `change(message, receiver or sender)` says what arrives: a message, a list, or None."""
        self.rules.append(Rule(kind, change, to, by))

    def lose(self, *kinds: type[Wire], to: str | None = None, by: str | None = None) -> None:
        for kind in kinds:
            self.change(kind, lambda message, site: None, to=to, by=by)

    def _tamper(self, sender: str, receiver: str, message: Wire) -> Iterable[Wire]:
        up = receiver == COORDINATOR
        if up and self.sites[sender].online:
            self.heard.append((sender, message))
            self.spoils.hear(sender, message)
        for rule in self.rules:
            if rule.fits(sender, receiver, message):
                changed = rule.change(message, sender if up else receiver)
                arrives = [] if changed is None else changed if isinstance(changed, list) else [changed]
                break
        else:
            arrives = [message]
        if up:
            return [] if self.deaf else arrives
        for shown in arrives:
            self.spoils.show(shown)
        return arrives

    def tell(self, site: str, message: Wire) -> list[Wire]:
        """Say something to one site, as bytes; returns what it answered."""
        before = len(self.heard)
        self._send(COORDINATOR, site, message)
        self.pump()
        return [said for who, said in self.heard[before:] if who == site]

    def tell_all(self, message: Wire, sites: Iterable[str] | None = None) -> list[Wire]:
        return [said for site in (self.sites if sites is None else sites) for said in self.tell(site, message)]

    def said(self, kind: type[Wire], by: str | None = None) -> list[Any]:
        return [message for who, message in self.heard if isinstance(message, kind) and by in (None, who)]

    # What the colluders know, the attacker knows.

    def _do_site(self, name: str, effects: Effects) -> None:
        if name in self.colluders and (attempt := self.sites[name].machine.aggregation.attempt) is not None:
            for pair in (attempt.mask_pair, attempt.share_pair):
                self.spoils.pairs[pair.public] = pair
            self.spoils.mask_seeds[attempt.advert.mask_key] = attempt.mask_seed
            self.spoils.seeds[attempt.advert.commitment] = attempt.seed
        super()._do_site(name, effects)

    def _note(self, party: str, effect: Effect) -> None:
        self.noted.setdefault(party, []).append(effect)
        if isinstance(effect, Ended) and effect.error is not None and party in self.sites:
            self.sites[party].errors.append(effect.error)

    def signer(self, colluder: str) -> Signer:
        assert colluder in self.colluders, "the attacker has no honest site's key"
        return self.sites[colluder].machine.core.signer

    def lenient(self, **changes: Any) -> None:
        """The attacker's own side plays by other rules: coordinator and colluders, never an honest site."""
        self.core.mandate.policy = replace(self.core.policy, **changes)
        for name in self.colluders:
            self.sites[name].machine.core.mandate.policy = replace(self.sites[name].machine.core.policy, **changes)

    # Rounds.

    def begin_round(self, updates: Any, drops: Any = None) -> None:
        super().begin_round(updates, drops)
        for name in self.colluders:
            if name in updates:
                self.spoils.inputs[self.round, name] = updates[name]
        self.truth = {(self.round, name): words for name, words in updates.items()} | getattr(self, "truth", {})

    def open_round(self, seed: int = 1) -> dict[str, Words]:
        updates = self.updates(seed)
        self.begin_round(updates)
        return updates

    def updates(self, seed: int) -> dict[str, Words]:
        layout = self.policy.layout
        if layout is wide_layout(layout.roster_size):
            return dict(_wide_updates(layout.roster_size, seed))
        return random_updates(layout, self.sites, seed)

    def plan(
        self,
        cohort: Iterable[str] | None = None,
        *,
        aborts: Iterable[AbortCertificate] = (),
        repeats: Iterable[RepeatCertificate] = (),
        context_repeats: tuple[RepeatOf, ...] = (),
        **changes: Any,
    ) -> messages.Plan:
        """A plan signed by the coordinator, with any field of its context changed.

        It lists the sums on the model that it has certificates for, and does not call aborted: to leave them out is an
        attack of its own (A13).
        """
        aborts = list(aborts)
        dead = {found.ctx for found in aborts}
        known = [found for found in self.planned.known(self.planned.start.state_hash) if found.ctx not in dead]
        made = self.planned._plan(sorted(self.sites if cohort is None else cohort), aborts, [], known)
        number, listed = self.planned.start.round, {(found.round, found.sites) for found in made.context.sums}
        listed |= {(number, tuple(line.site for line in repeat.roots)) for repeat in repeats}
        changes.setdefault("sums", tuple(EarlierSum(round=told, sites=sites) for told, sites in sorted(listed)))
        context = replace(made.context, repeats=context_repeats, **changes)
        signature = self.core.signer.sign(statements.plan(context))
        shown = (*repeats, *(found for found in made.repeats if found.ctx not in {old.ctx for old in repeats}))
        return replace(made, context=context, repeats=shown, signature=signature)

    def launch(self, plan: messages.Plan) -> CoordinatorAttempt:
        """Show a plan and carry messages; the coordinator's machine of this attempt answers unless `deaf`."""
        attempt = CoordinatorAttempt(self.core, plan, self.model)
        known = [earlier for earlier in self.planned.attempts if earlier.ctx != attempt.ctx]
        attempts, before = [*known, attempt], self.planned.before
        self.planned = CoordinatorRound(self.core, self.book, self.planned.start, self.model, attempts, before)
        self._do_coordinator(attempt.start())
        self.pump()
        return attempt

    def secretly(
        self, cohort: Iterable[str] | None = None, *, plan: messages.Plan | None = None, **options: Any
    ) -> CoordinatorAttempt:
        """Run an attempt to its sum and publish nothing of it."""
        hidden = [Rule(kind, lambda message, site: None, None, None) for kind in (messages.Result, messages.SumFrame)]
        self.rules += hidden
        attempt = self.launch(plan or self.plan(cohort, **options))
        self.rules = [rule for rule in self.rules if rule not in hidden]
        return attempt

    def aborts_of(self, attempt: CoordinatorAttempt, sites: Iterable[str]) -> AbortCertificate:
        """Ask these sites to give an attempt up; colluders do it without being asked. Takes whatever comes."""
        self.deaf = True
        lines = []
        for site in sorted(sites):
            answers = self.tell(site, attempt.abort_request())
            if site in self.colluders:
                signature = self.signer(site).sign(statements.abort(attempt.ctx, 4))
                lines.append(AbortLine(site=site, code=4, signature=signature))
                continue
            for said in answers:
                if isinstance(said, messages.Abort) and said.ctx == attempt.ctx:
                    lines.append(AbortLine(site=site, code=said.code, signature=said.signature))
        self.deaf = False
        return AbortCertificate(ctx=attempt.ctx, lines=tuple(lines))

    def restored(self, name: str, wal: list[Wire], state: Any) -> None:
        """Somebody puts an old copy of a site's state directory back."""
        site = self.sites[name]
        site.wal, site.saved = list(wal), {states.state_hash(state): state}
        self.written[name] = []  # promises of the forgotten life cannot be kept; what matters is what others notice
        deaf, self.deaf = self.deaf, True
        self.restart_site(name)
        self.pump()
        self.deaf = deaf

    def machine(self, name: str = VICTIM) -> SiteMachine:
        return self.sites[name].machine

    @property
    def honest(self) -> list[str]:
        return [name for name in self.sites if name not in self.colluders]


def evil(count: int = 4, *, colluders: int = 1, wide: bool = True, **options: Any) -> EvilCoordinator:
    """A federation whose last `colluders` sites help the coordinator; site-00 is the victim."""
    layout = options.pop("layout", None) or (wide_layout(count) if wide else small_layout(count))
    model = states.canonical(np.linspace(-1, 1, layout.state_words))
    options.setdefault("clock", ManualClock())
    return EvilCoordinator(
        layout,
        names(count),
        model,
        config_hash=CONFIG,
        randomness=CountedRandomness(b"evil"),
        colluders=names(count)[count - colluders :],
        **options,
    )


# What every test ends with.


def checks_in(error: BaseException | None) -> list[str]:
    """The names of the checks an error came through."""
    found = []
    while error is not None:
        frame = error.__traceback__
        while frame is not None:
            found.append(frame.tb_frame.f_code.co_name)
            frame = frame.tb_next
        error = error.__cause__
    return found


def assert_refused(run: EvilCoordinator, site: str, kind: type[ToolkitError], check: str) -> ToolkitError:
    """The site has met an error of this kind, raised by the check of this name."""
    errors = run.sites[site].errors
    fitting = [error for error in errors if isinstance(error, kind) and check in checks_in(error)]
    assert fitting, f"{site}: no {kind.__name__} from {check} among {[(repr(e), checks_in(e)[-3:]) for e in errors]}"
    return fitting[-1]


def assert_safe(run: EvilCoordinator, site: str = VICTIM, number: int = 1) -> None:
    """Nothing recovers the site's update, and no site has broken its promises."""
    assert run.spoils.recover(number, site) is None, "the attacker isolates the update"
    assert run.spoils.leak(number, site, run.truth[number, site]) < LEAK
    run.check_promises()


def assert_recovered(run: EvilCoordinator, site: str = VICTIM, number: int = 1) -> None:
    """The attack has worked: this is what the check that was taken away stands for."""
    guess = run.spoils.recover(number, site)
    assert guess is not None, "the attack has not even isolated the update"
    assert correlation(run.policy.layout, guess, run.truth[number, site]) > WON
