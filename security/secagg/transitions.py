"""Where each machine may go: every transition of both, and nothing else.

The tables are the whole truth: the machines ask `step` before they do anything, the diagrams in
docs/spec/secure-aggregation.md (section 12) are drawn from them by `diagram`, and a test walks through every pair that
is not in them. What a machine does on the way is in `site` and `coordinator`.

A site's life is one line, with ABORT as the way out of each step before AGREE. From AGREED on there is no time-out
short of the secrets' time to live: the site has said which sum it stands for, and waiting costs it some kilobytes,
while erasing its shares could leave a round with no end (section 9).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from lazaret.errors import RemoteProtocolError


class SiteState(StrEnum):
    IDLE = "idle"
    ADVERTISED = "advertised"
    DEALT = "dealt"
    UPLOADED = "uploaded"
    AGREED = "agreed"
    RELEASED = "released"
    HALTED = "halted"


class SiteEvent(StrEnum):
    UPDATE = "update"  # the site's own encoded update, ready to be sent
    CERTIFICATE = "certificate"  # acknowledgements that vouch for the newest result
    PLAN = "plan"
    ADVERTS = "adverts"
    DELIVER = "deliver"
    RESUME = "resume"
    SURVIVORS = "survivors"
    QUORUM = "quorum"
    OLD_QUORUM = "old-quorum"  # of an attempt that is no longer the open one
    RESULT = "result"
    SUM_FRAME = "sum-frame"
    SUM_COMPLETE = "sum-complete"
    JUMP = "jump"  # a certified state in place of the sums that led to it
    STATE_FRAME = "state-frame"
    AUDIT_ORDER = "audit-order"
    CHUNK = "chunk"
    ABORT_REQUEST = "abort-request"
    OLD_ABORT_REQUEST = "old-abort-request"  # for any attempt but the open one
    DEADLINE = "deadline"
    FAILURE = "failure"  # a check of the open attempt failed
    ROLLBACK = "rollback"  # proof that this site's memory was set back
    BAD_SUM = "bad-sum"  # proof that a published sum is wrong


class CoordinatorState(StrEnum):
    ADVERTISING = "advertising"
    DEALING = "dealing"
    UPLOADING = "uploading"
    AGREEING = "agreeing"
    UNMASKING = "unmasking"
    PUBLISHED = "published"
    CERTIFIED = "certified"
    ABORTING = "aborting"
    DEAD = "dead"
    LOST = "lost"


class CoordinatorEvent(StrEnum):
    ADVERT = "advert"
    ALL_ADVERTS = "all-adverts"
    SHARES = "shares"
    ALL_SHARES = "all-shares"
    ACCUSATION = "accusation"
    HEADER = "header"
    FRAME = "frame"
    ENOUGH_UPLOADS = "enough-uploads"
    AGREE = "agree"
    ENOUGH_AGREE = "enough-agree"
    UNMASK = "unmask"
    SUM_DONE = "sum-done"
    FRAUD = "fraud"  # a dealer's shares are proven wrong: this attempt has no sum
    ACK = "ack"
    COVERED = "covered"
    CHUNK_REQUEST = "chunk-request"
    REFUSAL = "refusal"
    ABORT = "abort"
    ENOUGH_ABORTS = "enough-aborts"
    HELLO = "hello"
    ROLLBACK = "rollback"  # a site shows an advert that another one must not have forgotten
    DROP = "drop"  # a step's deadline passed, or too few are left for it
    GIVE_UP = "give-up"


_S, _SE = SiteState, SiteEvent
_C, _CE = CoordinatorState, CoordinatorEvent

_ANY_TIME = (_SE.OLD_QUORUM, _SE.OLD_ABORT_REQUEST, _SE.CHUNK)


def _stay(state: SiteState, *events: SiteEvent) -> dict[SiteEvent, SiteState]:
    return dict.fromkeys((*events, *_ANY_TIME), state)


_GIVE_UP = dict.fromkeys((_SE.ABORT_REQUEST, _SE.DEADLINE, _SE.FAILURE), _S.IDLE)
_RESULT = (_SE.RESULT, _SE.SUM_FRAME)
_OVER = {_SE.SUM_COMPLETE: _S.IDLE, _SE.ROLLBACK: _S.HALTED}

SITE: Mapping[SiteState, Mapping[SiteEvent, SiteState]] = {
    _S.IDLE: _stay(_S.IDLE, *_RESULT, _SE.UPDATE, _SE.CERTIFICATE, _SE.JUMP, _SE.STATE_FRAME, _SE.AUDIT_ORDER)
    | _OVER
    | {_SE.PLAN: _S.ADVERTISED, _SE.BAD_SUM: _S.HALTED},
    # A result ends whatever is open: a site that was away during its own round learns of the sum like this.
    _S.ADVERTISED: _stay(_S.ADVERTISED, *_RESULT) | _GIVE_UP | _OVER | {_SE.ADVERTS: _S.DEALT},
    _S.DEALT: _stay(_S.DEALT, *_RESULT) | _GIVE_UP | _OVER | {_SE.DELIVER: _S.UPLOADED},
    _S.UPLOADED: _stay(_S.UPLOADED, _SE.RESUME, *_RESULT) | _GIVE_UP | _OVER | {_SE.SURVIVORS: _S.AGREED},
    # After AGREE a failed check changes nothing: the message is refused and the first answer stands.
    _S.AGREED: _stay(_S.AGREED, *_RESULT, _SE.UPDATE, _SE.CERTIFICATE)
    | _OVER
    | {_SE.QUORUM: _S.RELEASED, _SE.PLAN: _S.ADVERTISED, _SE.ABORT_REQUEST: _S.IDLE, _SE.DEADLINE: _S.IDLE},
    _S.RELEASED: _stay(_S.RELEASED, *_RESULT, _SE.UPDATE, _SE.CERTIFICATE, _SE.QUORUM)
    | _OVER
    | {_SE.PLAN: _S.ADVERTISED, _SE.DEADLINE: _S.IDLE},
    _S.HALTED: {},
}


def _keep(state: CoordinatorState, *events: CoordinatorEvent) -> dict[CoordinatorEvent, CoordinatorState]:
    return dict.fromkeys((*events, _CE.HELLO, _CE.ROLLBACK), state)


# Answers may come after their step is over; they are dropped, and are no reason to fail.
_LATE = (_CE.ADVERT, _CE.REFUSAL, _CE.SHARES, _CE.HEADER, _CE.FRAME)

COORDINATOR: Mapping[CoordinatorState, Mapping[CoordinatorEvent, CoordinatorState]] = {
    # Before C2 nothing masked exists, so that an attempt simply ends where it stands.
    _C.ADVERTISING: _keep(_C.ADVERTISING, _CE.ADVERT)
    | {_CE.ALL_ADVERTS: _C.DEALING}
    | dict.fromkeys((_CE.REFUSAL, _CE.ABORT, _CE.DROP, _CE.GIVE_UP), _C.DEAD),
    _C.DEALING: _keep(_C.DEALING, *_LATE[:3])
    | {_CE.ALL_SHARES: _C.UPLOADING}
    | dict.fromkeys((_CE.ABORT, _CE.DROP, _CE.GIVE_UP), _C.DEAD),
    _C.UPLOADING: _keep(_C.UPLOADING, *_LATE, _CE.ABORT, _CE.ACCUSATION)
    | {_CE.ENOUGH_UPLOADS: _C.AGREEING, _CE.DROP: _C.ABORTING, _CE.GIVE_UP: _C.ABORTING, _CE.ENOUGH_ABORTS: _C.DEAD},
    _C.AGREEING: _keep(_C.AGREEING, *_LATE, _CE.AGREE, _CE.ABORT, _CE.ACCUSATION)
    | {_CE.ENOUGH_AGREE: _C.UNMASKING, _CE.DROP: _C.ABORTING, _CE.GIVE_UP: _C.ABORTING, _CE.ENOUGH_ABORTS: _C.DEAD},
    _C.UNMASKING: _keep(_C.UNMASKING, *_LATE, _CE.UNMASK, _CE.AGREE, _CE.ABORT)
    | {_CE.SUM_DONE: _C.PUBLISHED, _CE.FRAUD: _C.LOST, _CE.GIVE_UP: _C.ABORTING, _CE.ENOUGH_ABORTS: _C.DEAD},
    _C.PUBLISHED: _keep(_C.PUBLISHED, *_LATE, _CE.ACK, _CE.CHUNK_REQUEST, _CE.UNMASK, _CE.AGREE, _CE.ABORT)
    | {_CE.COVERED: _C.CERTIFIED},
    _C.CERTIFIED: _keep(_C.CERTIFIED, *_LATE, _CE.ACK, _CE.UNMASK, _CE.AGREE, _CE.ABORT),
    _C.ABORTING: _keep(_C.ABORTING, *_LATE, _CE.ABORT, _CE.UNMASK, _CE.AGREE, _CE.ACCUSATION)
    | {_CE.ENOUGH_ABORTS: _C.DEAD, _CE.SUM_DONE: _C.PUBLISHED, _CE.FRAUD: _C.LOST}
    | {_CE.DROP: _C.LOST, _CE.GIVE_UP: _C.LOST},
    _C.DEAD: _keep(_C.DEAD, *_LATE, _CE.ABORT, _CE.AGREE, _CE.UNMASK, _CE.ACCUSATION),
    _C.LOST: _keep(_C.LOST, *_LATE, _CE.ABORT, _CE.AGREE, _CE.UNMASK, _CE.ACCUSATION),
}

S = TypeVar("S", SiteState, CoordinatorState)
E = TypeVar("E", SiteEvent, CoordinatorEvent)


def step(table: Mapping[S, Mapping[E, S]], state: S, event: E) -> S:
    """Where `event` leads from `state`.

    :raises RemoteProtocolError: if it leads nowhere.
    """
    target = table[state].get(event)
    if target is None:
        raise RemoteProtocolError(f"{event} is not allowed in state {state}")
    return target


def diagram(table: Mapping[S, Mapping[E, S]]) -> str:
    """The table as a Mermaid state diagram; events that stay where they are would only clutter it."""
    lines = ["stateDiagram-v2"]
    for state, row in table.items():
        arrows: dict[S, list[str]] = {}
        for event, target in row.items():
            if target != state:
                arrows.setdefault(target, []).append(event.value)
        lines += [f"    {state} --> {target}: {', '.join(events)}" for target, events in arrows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram(SITE), diagram(COORDINATOR), sep="\n\n")
