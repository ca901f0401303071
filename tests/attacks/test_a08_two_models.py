"""A8: the victim is shown another model than the others, whose "dead" one makes their updates zero.

The sum would then be the victim's update (Pasquini et al., CCS 2022). A site asks for the model it computed itself; and
because the model's hash is in every mask key, masks of two models do not cancel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lazaret.errors import PolicyViolation, VerificationFailed
from security import labels
from security.crypto import key_agreement, masking
from security.crypto.key_agreement import KeyPair
from security.crypto.masking import SiteMasks
from security.crypto.prg import Words
from security.identity.membership import BareMandate
from security.log import egress
from security.rng import CountedRandomness
from security.secagg import context as hashes
from security.secagg import fixed_point, messages, statements
from security.secagg import state as states
from security.secagg.context import RoundContext
from security.secagg.site.attempt import PendingUpdate
from security.secagg.site.machine import SiteMachine
from security.secrets import Secret
from tests.support.evil import (
    LEAK,
    VICTIM,
    EvilCoordinator,
    assert_recovered,
    assert_refused,
    assert_safe,
    evil,
)
from tests.support.spoils import correlation

PAIR = Secret(bytes(32))


def dead_updates(run: EvilCoordinator) -> dict[str, Words]:
    """What everybody but the victim sends: nothing, which the attacker knows beforehand."""
    layout = run.policy.layout
    zero = fixed_point.encode(layout, np.zeros(layout.state_words, dtype=np.float32), weight=1).words
    return {name: zero for name in run.sites if name != VICTIM}


def fooled(run: EvilCoordinator) -> bytes:
    """The victim has taken the attacker's model for the first one, and trained on it."""
    trap = states.canonical(np.full(run.policy.layout.state_words, 0.5))
    site = run.sites[VICTIM]
    core = site.machine.core
    policy = replace(run.policy, initial_state_hash=states.state_hash(trap))
    site.machine = SiteMachine(replace(core, mandate=BareMandate(policy, core.signer)), trap)
    others, mine = dead_updates(run), run.updates(1)[VICTIM]
    run.begin_round(others)
    run.spoils.inputs |= {(1, name): words for name, words in others.items()}
    run.truth[1, VICTIM] = mine
    pending = PendingUpdate(round=1, state_hash=states.state_hash(trap), config_hash=run.config_hash, words=mine)
    run._do_site(VICTIM, site.machine.load_update(pending))
    return states.state_hash(trap)


def for_the_victim(run: EvilCoordinator, plan: messages.Plan, trap: bytes) -> messages.Plan:
    context = replace(plan.context, state_hash=trap)
    return replace(plan, context=context, signature=run.core.signer.sign(statements.plan(context)))


def test_a_plan_for_another_model_is_refused() -> None:
    run = evil()
    run.open_round()
    run.change(messages.Plan, lambda plan, site: for_the_victim(run, plan, bytes(32)), to=VICTIM)
    run.launch(run.plan())
    assert_refused(run, VICTIM, PolicyViolation, "check_plan_state")
    assert_safe(run)


def test_a_fooled_victim_and_the_others_do_not_share_a_context() -> None:
    run = evil()
    trap = fooled(run)
    run.deaf = True
    plan = run.plan()
    plans = {name: for_the_victim(run, plan, trap) if name == VICTIM else plan for name in run.sites}
    adverts = tuple(said for name in run.sites for said in run.tell(name, plans[name]))
    for name in run.honest:
        run.tell(name, messages.Adverts(ctx=plans[name].context.ctx(), adverts=adverts))  # type: ignore[arg-type]
        assert_refused(run, name, VerificationFailed, "check_adverts_cohort")
    assert_safe(run)


def test_two_models_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the model no part of CTX, all masks would cancel and the sum would be the victim's update."""

    def unbound(self: RoundContext) -> bytes:
        return hashes.digest(labels.CONTEXT, replace(self, state_hash=bytes(32)).to_bytes())

    monkeypatch.setattr(RoundContext, "ctx", unbound)
    run = evil()
    trap = fooled(run)
    run.change(messages.Plan, lambda plan, site: for_the_victim(run, plan, trap), to=VICTIM)
    run.launch(run.plan())
    assert_recovered(run)


def summed(run: EvilCoordinator, updates: dict[str, Words], contexts: dict[str, RoundContext]) -> Any:
    """The sum of masked vectors, self masks taken off, with the same key pairs under each site's own context."""
    randomness = CountedRandomness(b"two models")
    pairs = {name: KeyPair.generate(randomness) for name in updates}
    total = np.zeros(run.policy.layout.words, dtype=run.policy.layout.dtype)
    for name, words in updates.items():
        kx = hashes.key_transcript(contexts[name].ctx(), [pair.public for pair in pairs.values()])
        keys = {
            peer: key_agreement.mask_key(pairs[name], pairs[peer].public, PAIR, kx=kx, own_id=name, peer_id=peer)
            for peer in updates
            if peer != name
        }
        own = key_agreement.self_mask_key(Secret(randomness.bytes(32)), kx=kx, site=name)
        total += masking.masked(words, SiteMasks.of(name, own, keys))
        masking.unmask_chunk(total, masking.OpenedMasks.of([own], {}), run.policy.layout.ring, index=0)
    return total


def test_a_sum_under_two_model_hashes_is_uniform_noise() -> None:
    run = evil()
    updates = dict(run.open_round())
    context = run.plan().context
    other = replace(context, state_hash=bytes(32))
    contexts = {name: other if name == VICTIM else context for name in updates}
    total = summed(run, updates, contexts)
    assert egress.p_value(run.policy.layout.ring.pack(total).data) > 1e-3
    layout = run.policy.layout
    assert abs(correlation(layout, total.view(layout.signed_dtype), updates[VICTIM])) < LEAK


def test_a_sum_under_one_model_hash_twin() -> None:
    """The same sum under one hash is exact, and nothing like noise."""
    run = evil()
    updates = dict(run.open_round())
    total = summed(run, updates, dict.fromkeys(updates, run.plan().context))
    assert total.tolist() == np.sum(list(updates.values()), axis=0, dtype=total.dtype).tolist()
    assert egress.p_value(run.policy.layout.ring.pack(total).data) < 1e-9
