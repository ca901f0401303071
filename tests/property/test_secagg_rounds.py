"""Random federations: the sum is the reference's, bit for bit, or the round is lost and nothing was revealed."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lazaret.errors import PolicyViolation
from protos.loopback import Drop, RoundOutcome, sent_message
from security.crypto.ring import BITS
from security.identity.membership import AuditMode
from security.log import egress
from security.log.egress import LEAST_UNIFORMITY
from security.secagg import fixed_point, messages, thresholds
from security.secagg.certificates import Ack, Advert
from security.secagg.context import SumVerdict
from security.secrets import Secret
from tests.support.secagg_world import RecordedFederation, federation, reference_sum, small_layout

STEPS = (
    Advert,
    messages.Shares,
    messages.UploadHeader,
    messages.UploadFrame,
    messages.Agree,
    messages.Unmask,
    Ack,
)
SLOW = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> tuple[RecordedFederation, int]:
    n = draw(st.integers(3, 7))
    legal = [c for c in range(n) if thresholds.quorum(n=n, c=c, m=3) <= n]
    bits = draw(st.sampled_from(BITS))
    layout = small_layout(
        n,
        words=draw(st.integers(1, 60)),
        ring_bits=bits,
        weight_cap=draw(st.sampled_from([1, 64] if bits == 16 else [1, 64, 4096])),
    )
    run = federation(
        n,
        layout=layout,
        seed=draw(st.binary(min_size=4, max_size=4)),
        c=draw(st.sampled_from(legal)),
        single_history=draw(st.booleans()),
        audit=draw(st.sampled_from(list(AuditMode))),
    )
    return run, n


def draw_updates(run: RecordedFederation, draw: st.DrawFn, number: int = 1) -> dict[str, np.ndarray]:
    """Updates of the `number`-th round: other ones in every round, because a site never sends the same one again."""
    layout = run.policy.layout
    generator = np.random.default_rng((number, draw(st.integers(0, 2**32))))
    extreme = draw(st.booleans())
    updates = {}
    for site in run.sites:
        values = generator.uniform(-1, 1, layout.state_words).astype(np.float32)
        if extreme:
            values = np.sign(values).astype(np.float32)
        weight = layout.weight_cap if extreme else int(generator.integers(1, layout.weight_cap + 1))
        rounding = Secret(generator.bytes(32)) if layout.rounds_at_random else None
        updates[site] = fixed_point.encode(layout, values, weight=weight, rounding=rounding).words
    return updates


def check_outcome(run: RecordedFederation, updates: dict[str, np.ndarray], outcome: RoundOutcome) -> None:
    run.check_promises()
    opened = [who for who in run.releases().values() if len(who) >= 3]
    if outcome.total is None:
        t = min(attempt.context.t for attempt in run.planned.attempts) if run.planned.attempts else 0
        assert all(len(who) < t for who in opened), "a quorum released in a lost round"
        return
    assert outcome.verdict is SumVerdict.GOOD
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)
    assert len(outcome.survivors) >= run.planned.attempts[-1].context.t
    heads = {site.machine.core.head.result for site in run.sites.values()}
    assert heads == {run.prev_result}, "every site has the same history"
    assert {site.machine.intake.model.tobytes() for site in run.sites.values()} == {run.model.tobytes()}


@SLOW
@given(data=st.data())
def test_the_sum_is_exact_or_nothing_is_revealed(data: st.DataObject) -> None:
    run, n = data.draw(settings_of_a_run())
    for number in (1, 2):
        updates = draw_updates(run, data.draw, number)
        dropped = data.draw(st.lists(st.sampled_from(sorted(run.sites)), unique=True, max_size=n))
        drops = {site: Drop(data.draw(st.sampled_from(STEPS))) for site in dropped}
        run.transcript, before = [], run.model.tobytes()
        outcome = run.run_round(updates, drops=drops)
        check_outcome(run, updates, outcome)
        # After a sum of zeros a site may not send the update again that a draw of few values can repeat.
        if outcome.total is None or run.check is None or run.model.tobytes() == before:
            return


@SLOW
@given(data=st.data())
def test_up_to_n_minus_t_late_drops_cost_nothing(data: st.DataObject) -> None:
    """Whoever falls silent at S3 or later, as long as a quorum stays, the first attempt gives the sum."""
    run, n = data.draw(settings_of_a_run())
    try:
        spare = n - run.policy.thresholds(n).t
    except PolicyViolation:
        return
    updates = draw_updates(run, data.draw)
    dropped = data.draw(st.lists(st.sampled_from(sorted(run.sites)), unique=True, max_size=spare))
    drops = {site: Drop(data.draw(st.sampled_from(STEPS[2:]))) for site in dropped}
    outcome = run.run_round(updates, drops=drops)
    assert outcome.attempts == 1 and outcome.total is not None
    assert outcome.total.tolist() == reference_sum(run.policy.layout, updates, outcome.survivors)


def test_a_masked_upload_looks_like_noise_and_an_unmasked_one_does_not() -> None:
    layout = small_layout(4, words=5000)
    run = federation(4, layout=layout)
    run.transcript = []
    updates = {site: np.arange(layout.words, dtype=layout.dtype) for site in run.sites}
    run.run_round(updates)
    frames = [sent_message(sender, data) for sender, _, data in run.transcript]
    uploads = [frame.data for frame in frames if isinstance(frame, messages.UploadFrame)]
    assert len(uploads) >= 4
    for upload in uploads:
        assert egress.p_value(upload) > 1e-6
    assert egress.p_value(updates["site-00"].tobytes()) < LEAST_UNIFORMITY
