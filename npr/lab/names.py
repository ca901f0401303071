"""Names a user types, and what to say when one is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from security.errors import ConfigError


def require_known(kind: str, name: str, known: Iterable[str], *, where: str | None = None) -> None:
    """Raises one clear error with the near matches when `name` is not among `known`."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are: {', '.join(names)}"
    raise ConfigError(f"unknown {kind} {name!r}", where=where, hint=hint)
