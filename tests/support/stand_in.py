"""Learners that a test brings along, in the place of a trainer."""

from __future__ import annotations

from typing import Any

from scripts.local_federation.known_updates import sees_no_image
from site_agent.assembly import LearnerFactory


def standing_in(learner: Any, fingerprint: str | None = None) -> LearnerFactory:
    """A factory that gives this one, and says in the log that nothing sees an image."""

    def make(*given: Any) -> Any:
        sees_no_image(given[-1])
        return learner, fingerprint

    return make
