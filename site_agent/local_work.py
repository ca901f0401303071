"""What the training thread does for an agent: train, evaluate, vote. It makes the update that will be masked.

Each method runs in that thread, reads the membership in force and changes nothing of the conversation. What it returns
(`Finish`) is called where the conversation is, and gives effects. Here is also decided whether a training result still
fits the layout. Knows no torch: what trains is a `Learner`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lazaret.errors import DataError, PolicyViolation, ToolkitError
from security.identity.manifest import Manifest, real
from security.identity.membership import Seat
from security.rng import Randomness
from security.secagg.effects import AskVote
from security.secagg.layout import Layout, Vector
from security.secagg.scores import on_grid
from security.secagg.site.attempt import PendingUpdate
from security.secagg.state import state_hash
from security.secrets import Secret
from site_agent import contribution
from site_agent.contribution import LocalResult
from site_agent.effects import Complain, Effects, Train
from site_agent.policy import SitePolicy
from site_agent.session import Session
from site_agent.state_dir import StateDir

log = logging.getLogger("site-agent")

Job = Callable[[], "Finish"]
Finish = Callable[[], Effects]


class Learner(Protocol):
    """What trains. The real one is a process of its own (`supervisor`); a benchmark's only makes numbers."""

    def train(self, round_number: int, state: Vector) -> LocalResult: ...

    def evaluate(self, round_number: int, state: Vector) -> dict[str, Any]: ...

    def adopted(self, manifest: Manifest) -> None:
        """A newer manifest is in force."""
        ...

    def close(self) -> None: ...


@dataclass(kw_only=True)
class LocalWork:
    """The work of one site on its own images, and what the conversation is told of it."""

    seat: Seat
    policy: SitePolicy
    session: Session
    learner: Learner
    state_dir: StateDir
    rng: Randomness
    _scores: dict[bytes, dict[str, Any]] = field(default_factory=dict)  # of models on the validation side

    def train(self, job: Train) -> Finish:
        layout = self.seat.layout
        try:
            score = self._own_score(job)
            result = self.learner.train(job.round, job.state)
            update, cut = contribution.encode(
                layout,
                result,
                round_number=job.round,
                state_hash=job.state_hash,
                config_hash=job.config_hash,
                weights=self.seat.manifest.training.weights,
                share_metrics=self.policy.share_metrics,
                score=score,
                private=self.seat.manifest.privacy is not None,
                rounding=Secret(self.rng.bytes(32)) if layout.rounds_at_random else None,
            )
        except ToolkitError as error:
            failure = error
            return lambda: self.session.failed(job.round, failure)
        if cut:
            log.warning("round %d: %d values were reduced to their clip", job.round, cut)
        return lambda: self._trained(layout, update, result)

    def _trained(self, layout: Layout, update: PendingUpdate, result: LocalResult) -> Effects:
        if layout.layout_hash != self.seat.layout.layout_hash:
            error = PolicyViolation("a newer manifest has changed the layout during training", where="manifest")
            return self.session.failed(update.round, error)
        return self.session.trained(update, result)

    def evaluate(self, round_number: int, state: Vector) -> Finish:
        try:
            figures = self.learner.evaluate(round_number, state)
        except ToolkitError as error:
            failure = error
            return lambda: (Complain(failure),)
        if self.seat.policy.vote or self.seat.manifest.scored(self.session.site):
            self._score(state, figures)
        return lambda: self._note_figures(figures)

    def vote(self, asked: AskVote) -> Finish:
        """Accept a model unless it does worse on this site's validation side than the one before, by more than the
        manifest permits. A site that cannot say does not vote.
        """
        if self.session.machine.core.head.certified:
            return lambda: ()  # the vote is over
        try:
            old, new = (self._validation(asked.round, state).get("bacc") for state in (asked.before, asked.state))
        except ToolkitError as error:
            failure = error
            return lambda: (Complain(failure),)
        if old is None or new is None:
            nothing = PolicyViolation("no validation side to vote by", where=f"round {asked.round}")
            return lambda: (Complain(nothing),)
        accept = new >= old - real(self.seat.manifest.audit.vote_drop or "0")
        words = "accepts" if accept else "does not accept"
        log.info("round %d: this site %s the model (%.3f, before it %.3f)", asked.round, words, new, old)
        return lambda: self.session.machine.vote(asked.result, accept=accept)

    def _own_score(self, job: Train) -> int | None:
        """In 64ths, of the model that the round begins with; None where this site adds none (`scores`).

        :raises ToolkitError: where it should and cannot. Then it sends no update either: zeros would leave the others'
            scores among fewer sites than the manifest promises.
        """
        manifest, site = self.seat.manifest, self.session.site
        if manifest.scores is None or not (job.scores and manifest.scored(site)):
            return None
        self.policy.check_consent(manifest, site)
        name = manifest.scores.figure
        figure = self._validation(job.round - 1, job.state).get({"auc": "bauc"}.get(name, name))
        if figure is None:
            raise DataError(
                "this hospital has no validation side to score the model on; nothing was sent",
                where=f"round {job.round}",
                hint="set [data] validation, or have the consortium take this hospital off [scores] sites in a new run",
            )
        return on_grid(figure, name)

    def _validation(self, round_number: int, state: Vector) -> dict[str, Any]:
        """Figures of the validation side, empty without one; of the newest two models they are kept."""
        key = state_hash(state)
        if key not in self._scores:
            self._score(state, self.learner.evaluate(round_number, state))
        return self._scores[key]

    def _score(self, state: Vector, figures: dict[str, Any]) -> None:
        # Without a validation side, the best model's figures are those of the test side, which decides nothing.
        own = figures.get("validation") if figures.get("validation") != figures.get("test") else None
        self._scores = dict([*self._scores.items(), (state_hash(state), own or {})][-2:])

    def _note_figures(self, figures: dict[str, Any]) -> Effects:
        if figures:
            self.state_dir.note_metrics(figures)
            bacc = (figures.get("test") or figures.get("validation") or {}).get("bacc")
            log.info("round %s: local balanced accuracy %s", figures.get("round"), bacc and round(bacc, 3))
        return ()
