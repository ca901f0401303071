"""What a site that (re)connects is asked for again; it answers word for word as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from security.secagg import messages
from security.secagg.effects import Effects, Send
from security.secagg.transitions import CoordinatorState
from security.secagg.wire import Wire

if TYPE_CHECKING:
    from security.secagg.coordinator import CoordinatorAttempt

_S = CoordinatorState


def owed(attempt: CoordinatorAttempt, site: str, open_ctx: bytes) -> Effects:
    """The coordinator's newest message to a site that has not answered it.

    :param open_ctx: the attempt that the site says it still holds open.
    """
    published = attempt.publication
    if attempt.state is _S.PUBLISHED and published is not None and site not in published.acks:
        return Send(published.result, to=site), published.sum_to(site)
    if site not in attempt.context.sites:
        return ()
    message = _message(attempt, site, open_ctx)
    return () if message is None else (Send(message, to=site),)


def _message(attempt: CoordinatorAttempt, site: str, open_ctx: bytes) -> Wire | None:
    state, dealing = attempt.state, attempt.dealing
    if state is _S.ADVERTISING:
        return attempt.plan if site not in dealing.adverts else None
    if state is _S.DEALING:
        return dealing.shown() if site not in dealing.shares else None
    if site in attempt.aborts:
        return None
    if state is _S.UPLOADING and site not in attempt.uploads.complete:
        there = attempt.uploads.next_frame(site)
        return dealing.deliver_to(site) if there is None else messages.UploadResume(kx=dealing.kx, next_frame=there)
    if state in (_S.AGREEING, _S.UNMASKING):
        return attempt.quorum if site in attempt.agreements and attempt.quorum else attempt.survivors
    if state in (_S.ABORTING, _S.DEAD) and open_ctx == attempt.ctx:
        return attempt.abort_request()
    return None
