"""What a site asks of a result before it lets its model move (docs/spec/secure-aggregation.md, section 10).

One function for each rule, called by name, so that a test can take away exactly one and show the attack it stops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from security import merkle
from security.errors import PolicyViolation, VerificationFailed
from security.prg import Words
from security.secagg import burst_checks, certificate_checks, plan_checks, statements
from security.secagg import context as hashes
from security.secagg.certificates import Opened
from security.secagg.context import RoundContext
from security.secagg.journal import AttemptMemory, Head, Journal
from security.secagg.messages import ChunkPiece, Result
from security.secagg.policy import AggregationPolicy
from security.secagg.state import Outcome
from security.secrets import Secret


def check_result_signature(policy: AggregationPolicy, result_hash: bytes, signature: bytes) -> None:
    """The coordinator stands for this result: with a site's signed root against it, that is transferable evidence."""
    statements.verify(policy.coordinator, statements.result(result_hash), signature)


def check_result_context(policy: AggregationPolicy, context: RoundContext) -> None:
    """The attempt was one that the manifest allows, whether or not this site was in it."""
    plan_checks.check_plan_federation(policy, context)
    plan_checks.check_plan_layout(policy, context)
    plan_checks.check_plan_members(policy, context)
    plan_checks.check_plan_thresholds(policy, context)
    plan_checks.check_plan_single_history(policy, context)


def check_result_extends(head: Head, context: RoundContext) -> None:
    """A result follows the one this site has, and that one was covered by acknowledgements."""
    if context.prev_result != head.result or context.state_hash != head.state_hash or context.round <= head.round:
        raise PolicyViolation("result does not follow the one this site has", where="result")
    if not head.vouched:
        raise PolicyViolation("the result before this one has not been vouched for", where="result")


def check_jump_context(policy: AggregationPolicy, head: Head, context: RoundContext) -> None:
    """A later state of this run, made under any of its manifests, and by no smaller quorum than this one asks for.

    Nobody else looks at this context: a quorum of none would be covered by no acknowledgement at all.
    """
    if (context.federation, context.run) != (policy.federation, policy.run):
        raise PolicyViolation("state is of another federation or run", where="jump")
    if context.round <= head.round or context.layout_hash != policy.layout.layout_hash:
        raise PolicyViolation("state is not newer than this site's, or of another layout", where="jump")
    if context.t < policy.thresholds(context.n).t:
        raise PolicyViolation("state was made by too small a quorum", where="jump")


def check_result_memory(memory: AttemptMemory | None, kx: bytes, deals: bytes, site: str, result: Result) -> None:
    """What this site saw of the attempt is what everybody is now shown of it."""
    if memory is None or memory.kx is None:
        return
    if memory.kx != kx or (memory.upload is not None and memory.upload.deals != deals):
        raise VerificationFailed("result is of other keys or deals than this site saw", where="result")
    root = next((line.root for line in result.uploads if line.site == site), None)
    if root is not None and (memory.upload is None or memory.upload.root != root):
        raise VerificationFailed("result counts an upload that this site did not make", where="result")


def check_result_survivors(context: RoundContext, sites: Sequence[str]) -> None:
    burst_checks.check_survivors_members(context, sites)
    burst_checks.check_survivors_count(context, sites)


def check_result_opened(context: RoundContext, result: Result) -> None:
    """Every opened secret is the one behind its commitment or public key."""
    survivors = {line.site for line in result.uploads}
    dropped = [advert for advert in result.adverts if advert.site not in survivors]
    alive = [advert for advert in result.adverts if advert.site in survivors]
    if len(alive) != len(result.seeds) or len(dropped) != len(result.keys):
        raise VerificationFailed("result opens too many or too few secrets", where="result")
    ctx = context.ctx()
    for adverts, secrets, kind in ((alive, result.seeds, Opened.SEED), (dropped, result.keys, Opened.MASK_KEY)):
        for advert, secret in zip(adverts, secrets, strict=True):
            if not certificate_checks.opens(
                ctx, advert.site, kind, Secret(secret), commitment=advert.commitment, mask_key=advert.mask_key
            ):
                raise VerificationFailed("opened secret is not the committed one", where=f"site {advert.site}")


def check_result_agreements(policy: AggregationPolicy, kx: bytes, survivors: bytes, result: Result) -> None:
    context = result.context
    certificate_checks.check_agreements(
        policy, context.sites, context.t, kx=kx, survivors=survivors, agreements=result.agreements
    )


def check_sum_root(leaves: Sequence[bytes], root: bytes) -> None:
    if merkle.root(leaves) != root:
        raise VerificationFailed("sum does not have the announced root", where="result")


def check_next_state(outcome: Outcome, result: Result) -> None:
    """The site computes verdict and model itself; the coordinator only says what it should find."""
    if outcome.verdict != result.verdict or outcome.state_hash != result.state_hash:
        raise VerificationFailed("the announced model does not follow from the sum", where="result")


def check_chunk_path(piece: ChunkPiece, *, root: bytes, chunks: int) -> None:
    """A chunk of an upload as its site signed it."""
    merkle.verify_inclusion(
        leaf=merkle.leaf_hash(piece.data), index=piece.chunk, size=chunks, path=piece.path, root=root
    )


class WrongSum(VerificationFailed):
    """A published sum is not the sum of the signed uploads: the coordinator's own signature convicts it."""


def check_chunk_sum(recomputed: Words, published: Words) -> None:
    if not np.array_equal(recomputed, published):
        raise WrongSum(
            "a chunk of the published sum is not the sum of the uploads",
            where="result",
            hint="tell the consortium by a way that does not pass the coordinator",
        )


def check_may_ack(journal: Journal, head: Head) -> None:
    """One result for each round, and none for a round that this site has given up by joining a later one."""
    if head.round < journal.high_water[0] or head.round < journal.acked_round:
        raise PolicyViolation("this site has gone on to a later round", where="acknowledgement")
    if head.round == journal.acked_round and journal.acked not in (b"", head.result):
        raise PolicyViolation("this site has acknowledged another result of the round", where="acknowledgement")


def result_digests(result: Result) -> tuple[bytes, bytes, bytes]:
    """KX, U and R as they follow from the header."""
    kx = hashes.key_transcript(result.context.ctx(), [advert.body() for advert in result.adverts])
    survivors = hashes.survivors_digest(kx, result.deals, [(line.site, line.root) for line in result.uploads])
    result_hash = hashes.result_digest(
        kx=kx,
        survivors=survivors,
        verdict=hashes.Verdict(result.verdict),
        sum_root=result.sum_root,
        seeds=result.seeds,
        keys=result.keys,
        state_hash=result.state_hash,
    )
    return kx, survivors, result_hash
