"""Which manifest may follow another: history goes forward only, and what a run has promised stays.

`accept_newer` is the one way to a newer manifest for whoever holds one. Each rule returns or raises, as in rules.py.
"""

from __future__ import annotations

from dataclasses import replace

from lazaret.errors import ManifestRejected
from security.dp.noise import SharedNoise
from security.dp.planner import PREFIX
from security.identity.manifest import Manifest
from security.identity.rules import OTHER_FEDERATION, labels_of, least_noise
from security.identity.second_signature import check_ml_dsa_kept
from security.identity.second_signature import where_of as _where


def accept_newer(current: Manifest | None, offered: Manifest) -> Manifest:
    """The manifest in force after `offered` was seen; a party keeps it on disk before it acts on it."""
    if current is not None:
        check_same_federation(current, offered)
        if offered.digest == current.digest:
            return current
        check_not_older(current, offered)
        check_chain(current, offered)
        check_run(current, offered)
        check_ml_dsa_kept(current, offered)
    check_draw(current, offered)
    return offered


def check_draw(current: Manifest | None, offered: Manifest) -> None:
    """Commitments are public before the first secret is opened, and groups that were drawn stay for the whole run.

    Otherwise the consortium, or the site that opens its secret last, could choose who is in one group.
    """
    drawn = offered.aggregation.groups
    if current is None or current.run != offered.run:
        if drawn is not None and drawn.secrets and (current is not None or offered.version == 1):
            raise ManifestRejected(
                "has the secrets of the draw of groups, but is the first manifest of the run",
                where=_where(offered),
                hint="publish the commitments first: without secrets under [aggregation.secrets]",
            )
        return
    before = current.aggregation.groups
    known = {member.id: member.draw for member in current.roster}
    if before is not None and before.secrets:
        same = drawn == before
    elif drawn is not None and drawn.secrets:
        same = before is not None and all(known.get(m.id) == m.draw for m in offered.roster)
        same = same and set(drawn.secrets) == set(offered.sites)
        # Over a gap the manifest that was shown may be one that this party has not seen.
        same = same and (offered.version > current.version + 1 or drawn.shown == current.digest.hex())
    else:
        same = drawn is None or before is not None
    if not same:
        raise ManifestRejected(
            f"changes the groups of run {current.run!r}, or opens secrets that were not committed to before",
            where=_where(offered),
            hint="other groups need a new run id",
        )


def check_same_federation(current: Manifest, offered: Manifest) -> None:
    if offered.federation != current.federation:
        raise ManifestRejected(
            f"belongs to another federation, {offered.federation!r}", where=_where(offered), hint=OTHER_FEDERATION
        )


def check_not_older(current: Manifest, offered: Manifest) -> None:
    """An older version may have had weaker thresholds, or a member who has since been revoked."""
    if offered.version < current.version:
        raise ManifestRejected(
            f"is older than version {current.version}, which was seen before",
            where=_where(offered),
            hint="fetch the newest manifest from the consortium",
        )
    if offered.version == current.version:
        raise ManifestRejected(
            f"two different manifests are both called version {current.version}",
            where=_where(offered),
            hint="stop, keep both files and call the consortium: its root key may have been used without its knowledge",
        )


def check_chain(current: Manifest, offered: Manifest) -> None:
    """The next version names the last one; over a gap only the root's signature is checked."""
    if offered.version == current.version + 1 and offered.previous != current.digest.hex():
        raise ManifestRejected(
            f"does not continue the version {current.version} that was seen before",
            where=_where(offered),
            hint="stop, keep both files and call the consortium",
        )


def check_run(current: Manifest, offered: Manifest) -> None:
    """Within a run the model and its vector stay what they are; a new model is a new run."""
    if offered.run == current.run and (
        offered.model != current.model
        or _tensors(offered) != _tensors(current)
        or offered.training.method != current.training.method
        or labels_of(offered) != labels_of(current)
        or offered.training.plugin != current.training.plugin
        # The lengths of the newest steps are part of a run's state, as many as the window has.
        or offered.aggregation.movement_window != current.aggregation.movement_window
        or (offered.audit.vote_drop is None) != (current.audit.vote_drop is None)
        or offered.scores != current.scores
        or _promise(offered) != _promise(current)
        or not _keeps_noise(_shared_noise(current), _shared_noise(offered))
    ):
        raise ManifestRejected(
            f"changes the model, the method, the labels, the tensors, the movement window, the vote, the scores or the "
            f"privacy of run {current.run!r}",
            where=_where(offered),
            hint="the consortium must give a changed model a new run id",
        )


def _tensors(manifest: Manifest) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((block.name, block.shape, block.kind) for block in manifest.aggregation.layout.blocks)


def _promise(manifest: Manifest) -> tuple[object, dict[str, object]]:
    """The guarantee for patients and its schedule: a run that was booked under one cannot continue under another."""
    settings = manifest.training.settings
    return manifest.privacy, {name: value for name, value in settings.items() if name.startswith(PREFIX)}


def _shared_noise(manifest: Manifest) -> SharedNoise | None:
    schedule = least_noise(manifest)
    return None if schedule is None else schedule.shared


def _keeps_noise(current: SharedNoise | None, offered: SharedNoise | None) -> bool:
    """Rounds are booked with the honest survivors and the ring units with which the run began."""
    if current is None or offered is None:
        return current is offered
    return offered.honest >= current.honest and replace(offered, honest=current.honest) == current
