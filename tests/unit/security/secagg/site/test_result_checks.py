"""Every comparison in the checks of a result, asked by itself: one thing is wrong, and the check for it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from lazaret.errors import RemoteProtocolError, ToolkitError
from protos.loopback import Drop
from security.secagg import messages, statements
from security.secagg.context import SumVerdict
from security.secagg.messages import Result
from security.secagg.published import result_digests
from security.secagg.records import UploadBound
from security.secagg.site import result_checks
from security.secagg.site.journal import AttemptMemory, Journal, NewestResult
from security.secagg.site.result_checks import CheckedHeader, ChunkAudit, Download
from security.secagg.state import SumOutcome
from tests.support.evil import checks_in
from tests.support.secagg_world import RecordedFederation, federation, random_updates

ZERO = bytes(32)
OTHER = b"\x09" * 32


@cache
def published() -> tuple[RecordedFederation, NewestResult, Result]:
    """A round of five sites without its last one: its key is opened, and a secret of each pair with it."""
    run = federation(5)
    head = run.sites["site-00"].machine.core.head
    drops = {"site-04": Drop(messages.UploadFrame)}
    run.run_round(random_updates(run.policy.layout, run.sites, 1), drops=drops)
    publication = run.planned.attempts[-1].publication
    assert publication is not None and len(publication.result.keys) == 1 and len(publication.result.pairs) == 4
    return run, head, publication.result


def refused(check: Callable[[], object], by: str, match: str | None = None) -> None:
    with pytest.raises(ToolkitError, match=match) as caught:
        check()
    assert by in checks_in(caught.value)


@pytest.mark.parametrize("change", [{"prev_result": OTHER}, {"state_hash": OTHER}, {"round": 0}])
def test_a_result_follows_the_newest_one(change: dict[str, Any]) -> None:
    _, head, result = published()
    result_checks.check_result_extends(head, result.context)
    refused(lambda: result_checks.check_result_extends(head, replace(result.context, **change)), "check_result_extends")


def test_a_result_follows_one_that_was_checked() -> None:
    _, head, result = published()
    head = replace(head, certified=False)
    refused(lambda: result_checks.check_result_extends(head, result.context), "check_result_extends", "certificate")


CONTEXTS: dict[str, dict[str, Any]] = {
    "check_plan_federation": {"run": "another"},
    "check_plan_layout": {"layout_hash": OTHER},
    "check_plan_thresholds": {"t": 3},
}


@pytest.mark.parametrize("check", CONTEXTS)
def test_the_attempt_was_one_that_the_manifest_allows(check: str) -> None:
    run, _, result = published()
    result_checks.check_result_context(run.policy, result.context)
    context = replace(result.context, **CONTEXTS[check])
    refused(lambda: result_checks.check_result_context(run.policy, context), check)


def test_the_members_were_those_of_the_manifest_and_no_second_history_was_possible() -> None:
    run, _, result = published()
    members = (replace(result.context.members[0], cert=OTHER), *result.context.members[1:])
    context = replace(result.context, members=members)
    refused(lambda: result_checks.check_result_context(run.policy, context), "check_plan_members")
    sizes = run.policy.thresholds(3)
    told = {"n": sizes.n, "t": sizes.t, "a": sizes.a, "members": result.context.members[:3]}
    context = replace(result.context, **told)
    refused(lambda: result_checks.check_result_context(run.policy, context), "check_plan_single_history")


@pytest.mark.parametrize(
    "change", [{"federation": "another"}, {"run": "another"}, {"round": 0}, {"layout_hash": OTHER}, {"t": 3}]
)
def test_a_state_is_a_later_one_of_this_run_by_a_quorum(change: dict[str, Any]) -> None:
    run, head, result = published()
    result_checks.check_jump_context(run.policy, head, result.context)
    context = replace(result.context, **change)
    refused(lambda: result_checks.check_jump_context(run.policy, head, context), "check_jump_context")


def memory() -> AttemptMemory:
    _, _, result = published()
    kx, _, _ = result_digests(result)
    ctx, own = result.context.ctx(), result.uploads[0].root
    upload = UploadBound(ctx=ctx, deals=result.deals, root=own, state_hash=ZERO, update=ZERO)
    return AttemptMemory(context=result.context, advert=result.adverts[0], kx=kx, upload=upload)


def test_a_result_is_of_what_this_site_saw_of_the_attempt() -> None:
    _, _, result = published()
    known = memory()
    assert known.kx is not None and known.upload is not None
    upload = known.upload

    def check(found: AttemptMemory, site: str = "site-00") -> None:
        result_checks.check_result_memory(found, known.kx or b"", result.deals, site, result)

    check(known)
    check(replace(known, kx=None))
    left_out = replace(known, upload=None)
    check(left_out, "site-04")
    refused(lambda: check(replace(left_out, kx=OTHER), "site-04"), "check_result_memory")
    for wrong in (
        replace(known, upload=replace(upload, deals=OTHER)),
        replace(known, upload=replace(upload, root=OTHER)),
        replace(known, upload=None),
    ):
        refused(lambda wrong=wrong: check(wrong), "check_result_memory")  # type: ignore[misc]


def test_the_survivors_are_members_in_order_and_enough() -> None:
    _, _, result = published()
    sites = [line.site for line in result.uploads]
    result_checks.check_result_survivors(result.context, sites)
    for wrong, by in ((sites[::-1], "check_survivors_members"), (sites[1:], "check_survivors_count")):
        refused(lambda wrong=wrong: result_checks.check_result_survivors(result.context, wrong), by)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda result: {"seeds": result.seeds[1:]}, "too many or too few secrets$"),
        (lambda result: {"keys": ()}, "too many or too few secrets$"),
        (lambda result: {"seeds": (OTHER, *result.seeds[1:])}, "not the committed one"),
        (lambda result: {"keys": (OTHER,)}, "not the committed one"),
        (lambda result: {"pairs": result.pairs[1:]}, "secrets of pairs"),
        (lambda result: {"pairs": (OTHER, *result.pairs[1:])}, "not that of the advert"),
    ],
)
def test_every_opened_secret_is_the_committed_one(change: Callable[[Result], dict[str, Any]], match: str) -> None:
    _, _, result = published()
    result_checks.check_result_opened(result.context, result)
    wrong = replace(result, **change(result))
    refused(lambda: result_checks.check_result_opened(wrong.context, wrong), "check_result_opened", match)


def signed(run: RecordedFederation, result: Result) -> Result:
    _, _, digest = result_digests(result)
    return replace(result, signature=run.core.signer.sign(statements.result(digest)))


HEADERS: dict[str, Callable[[RecordedFederation, Result], Result]] = {
    "check_result_signature": lambda run, result: replace(result, signature=bytes(64)),
    "check_adverts_cohort": lambda run, result: signed(run, replace(result, adverts=result.adverts[1:])),
    "check_advert_signatures": lambda run, result: signed(
        run, replace(result, adverts=(replace(result.adverts[0], signature=bytes(64)), *result.adverts[1:]))
    ),
    "check_result_agreements": lambda run, result: replace(result, agreements=result.agreements[1:]),
}


@pytest.mark.parametrize("check", HEADERS)
def test_a_header_is_looked_at_whole(check: str) -> None:
    run, head, result = published()
    result_checks.check_header(run.policy, head, None, "site-00", result)
    wrong = HEADERS[check](run, result)
    refused(lambda: result_checks.check_header(run.policy, head, None, "site-00", wrong), check)


@pytest.mark.parametrize("check", ["check_result_signature", "check_result_agreements"])
def test_a_header_that_is_shown_again_has_good_signatures(check: str) -> None:
    run, _, result = published()
    result_checks.check_header_again(run.policy, result)
    wrong = HEADERS[check](run, result)
    refused(lambda: result_checks.check_header_again(run.policy, wrong), check)


@pytest.mark.parametrize("change", [{"verdict": SumVerdict.VOID}, {"state_hash": OTHER}, {"movements": b"other"}])
def test_verdict_model_and_lengths_of_steps_are_the_sites_own(change: dict[str, Any]) -> None:
    _, _, result = published()
    state = np.zeros(0, dtype="<f4")
    own = SumOutcome(SumVerdict(result.verdict), state, result.state_hash, "", result.movements)
    result_checks.check_next_state(own, result)
    refused(lambda: result_checks.check_next_state(replace(own, **change), result), "check_next_state")


def test_one_acknowledgement_for_each_round_and_none_of_a_round_that_was_left() -> None:
    head = NewestResult(round=4, result=OTHER, state_hash=ZERO)
    for good in (
        Journal(high_water=(4, 2), acked_round=3, acked=ZERO),
        Journal(high_water=(4, 2), acked_round=4, acked=OTHER),
    ):
        result_checks.check_may_ack(good, head)
    for wrong in (
        Journal(high_water=(5, 1)),
        Journal(high_water=(4, 1), acked_round=5, acked=OTHER),
        Journal(high_water=(4, 1), acked_round=4, acked=ZERO),
    ):
        refused(lambda wrong=wrong: result_checks.check_may_ack(wrong, head), "check_may_ack")  # type: ignore[misc]


def checked() -> tuple[RecordedFederation, CheckedHeader]:
    run, _, result = published()
    kx, _, digest = result_digests(result)
    return run, CheckedHeader(result, kx, digest)


def test_frames_are_of_this_sum() -> None:
    run, header = checked()
    publication = run.planned.attempts[-1].publication
    assert publication is not None
    (frame,) = publication.sum_to("site-00").frames()
    download = Download(header, run.policy)
    with pytest.raises(RemoteProtocolError, match="not the next one"):
        download.take(replace(frame, result=OTHER))
    download.take(frame)
    assert download.complete
    wrong = Download(header, run.policy)
    wrong.take(replace(frame, data=frame.data[::-1]))
    refused(wrong.finish, "check_sum_root")


def test_each_site_checks_a_piece_of_each_upload_once_and_under_its_root() -> None:
    run, header = checked()
    attempt = run.planned.attempts[-1]
    assert attempt.publication is not None
    upload = next(iter(attempt.uploads.complete))
    data = run.core.policy.layout.ring.pack(attempt.publication.total).tobytes()
    piece = messages.ChunkPiece(result=header.result_hash, chunk=0, site=upload, data=data, path=())
    audit = ChunkAudit(run.policy, "site-00", header, attempt.publication.total, todo=[0])
    refused(lambda: audit.take(piece), "check_chunk_path")
    audit.pieces[upload] = piece
    with pytest.raises(RemoteProtocolError, match="came before"):
        audit.take(piece)
