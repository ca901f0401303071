"""Everything that is ever signed, each with its own tag (docs/spec/secure-aggregation.md, section 5).

Signer and verifier build the statement with the same function, so that they cannot disagree about its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from security import labels
from security.crypto import encoding
from security.crypto.signing import SigningKey
from security.identity.membership import AggregationPolicy, RosterEntry
from security.secagg.certificates import Advert
from security.secagg.context import RoundContext


@dataclass(frozen=True, slots=True)
class Statement:
    """A tag and the fields under it."""

    label: bytes
    fields: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Signer:
    """A party's name with its key."""

    site: str
    key: SigningKey

    def sign(self, statement: Statement) -> bytes:
        return self.key.sign(statement.label, self.site, *statement.fields)


def verify(entry: RosterEntry, statement: Statement, signature: bytes) -> None:
    """Raise unless `signature` is this party's over the statement."""
    entry.key.verify(signature, statement.label, entry.site, *statement.fields)


def plan(context: RoundContext) -> Statement:
    return Statement(labels.SIGN_PLAN, (context.to_bytes(),))


def advert(scope: RoundContext | AggregationPolicy, signed: Advert) -> Statement:
    """Names the run besides CTX. Each run counts its adverts from 1, and a site that is shown an advert as proof that
    its signer was restored from an old copy does not know the context behind it.
    """
    return Statement(labels.SIGN_ADVERT, (scope.federation.encode(), scope.run.encode(), signed.body()))


def deal(kx: bytes, root: bytes) -> Statement:
    return Statement(labels.SIGN_DEAL, (kx, root))


def accuse(kx: bytes, dealer: str) -> Statement:
    return Statement(labels.SIGN_ACCUSE, (kx, dealer.encode()))


def disclose(kx: bytes, holder: str, b_share: bytes, s_share: bytes, pair: bytes) -> Statement:
    return Statement(labels.SIGN_DISCLOSE, (kx, holder.encode(), b_share, s_share, pair))


def upload(kx: bytes, deals: bytes, length: int, root: bytes) -> Statement:
    return Statement(labels.SIGN_UPLOAD, (kx, deals, encoding.u64(length), root))


def agree(kx: bytes, survivors: bytes) -> Statement:
    return Statement(labels.SIGN_AGREE, (kx, survivors))


def unmask(kx: bytes, survivors: bytes, shares: Sequence[bytes]) -> Statement:
    return Statement(labels.SIGN_UNMASK, (kx, survivors, encoding.array(encoding.tlv(share) for share in shares)))


def run_stop(run: str, manifest: bytes) -> Statement:
    """The coordinator's operator ends a run before its last round."""
    return Statement(labels.SIGN_RUN_STOP, (run.encode(), manifest))


def abort(ctx: bytes, code: int) -> Statement:
    """Binds CTX, not KX: it may come before KX is known and must end every KX that two adverts of one site can make."""
    return Statement(labels.SIGN_ABORT, (ctx, encoding.u64(code)))


def abort_request(ctx: bytes) -> Statement:
    return Statement(labels.SIGN_ABORT_REQUEST, (ctx,))


def result(result_hash: bytes) -> Statement:
    return Statement(labels.SIGN_RESULT, (result_hash,))


def ack(result_hash: bytes, state_hash: bytes, bitmap: bytes, vote: int = 0) -> Statement:
    """With a vote it is another kind of statement: one without cannot be read as either answer."""
    if vote:
        return Statement(labels.SIGN_VOTE, (result_hash, state_hash, bitmap, encoding.u64(vote)))
    return Statement(labels.SIGN_ACK, (result_hash, state_hash, bitmap))
