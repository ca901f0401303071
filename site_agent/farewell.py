"""What a site does when the coordinator closes its stream."""

from __future__ import annotations

from typing import Final

from security.errors import PolicyViolation, RemoteProtocolError, RollbackDetected, ToolkitError
from security.relay import Farewell, Goodbye
from site_agent.effects import Leave

_REASONS: Final[dict[Farewell, tuple[type[ToolkitError], str, str, bool]]] = {
    Farewell.STOPPING: (RemoteProtocolError, "the coordinator is stopping", "this site tries again", True),
    Farewell.REPLACED: (
        PolicyViolation,
        "another process speaks for this site now",
        "two agents with one identity: stop one of them",
        False,
    ),
    Farewell.OTHER_PROTOCOL: (
        RemoteProtocolError,
        "the coordinator speaks another version of the protocol",
        "install the version of the package that the coordinator runs",
        False,
    ),
    Farewell.NOT_LISTED: (
        PolicyViolation,
        "the coordinator's manifest does not list this site",
        "the consortium must enrol this site and publish; revoked sites stay out",
        False,
    ),
    Farewell.OLD_MANIFEST: (
        PolicyViolation,
        "the coordinator's manifest is older than this site's",
        "the operator must install the newer one; this site tries again",
        True,
    ),
    Farewell.OUT_OF_ORDER: (
        RollbackDetected,
        "the coordinator has seen later connections of this site than this state directory remembers",
        "it was restored from an old copy: stop, keep it, and enrol anew",
        False,
    ),
}


def parting(message: Goodbye) -> Leave:
    kind, what, hint, retry = _REASONS[Farewell(message.code)]
    return Leave(kind(what, where="coordinator", hint=hint), retry=retry)
