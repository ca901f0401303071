"""What was agreed: certificates, keys, manifest, this hospital's policy, initial model, learning code, privacy."""

from __future__ import annotations

from collections.abc import Iterator

from security.preflight import papers
from security.preflight.lines import Line, ok, problem, tried, warning
from site_agent.assembly import config_hash_of
from site_agent.checks.context import Context
from site_agent.privacy import LEDGER_HINT, planned_cost
from site_agent.vault import STATE_HINT, run_of


def certificates(context: Context) -> Iterator[Line]:
    yield from papers.certificates(context.papers)


def keys(context: Context) -> Iterator[Line]:
    yield from papers.key_files(context.papers)
    yield papers.audit_root(context.papers, context.config.state / "log")


def manifest(context: Context) -> Iterator[Line]:
    yield from papers.manifest(context.papers)


def policy(context: Context) -> Iterator[Line]:
    """What would be declined at the first order is said now."""
    ours, told = context.config.policy, context.manifest
    yield tried("permits this federation", lambda: ours.check_federation(told))
    if told.privacy is not None:
        yield tried("asks nothing of the data that would void epsilon", ours.check_private)
    yield tried(f"permits a cohort of all {len(told.roster)} sites", lambda: ours.check_cohort(len(told.roster)))
    vector = told.aggregation.layout.byte_length
    yield tried(f"permits the {vector} bytes of one vector", lambda: ours.check_bytes(vector))
    if ours.most_rounds is not None and ours.most_rounds < told.training.rounds:
        yield warning(
            f"[policy] most_rounds ends this site's part after {ours.most_rounds} of {told.training.rounds} rounds",
            "if that is meant, nothing; else raise it",
        )


def model(context: Context) -> Iterator[Line]:
    """The pinned file, and that this package computes what was agreed."""
    yield tried("one training configuration", lambda: config_hash_of(context.manifest))
    context.initial  # noqa: B018  # its error is the finding
    yield ok("the initial model is the one that the manifest pins")


def code(context: Context) -> Iterator[Line]:
    from npr.initial import check_code

    told = context.manifest
    yield tried("the learning code is the manifest's", lambda: check_code(told.model.code_digest))
    yield tried("the settings are the manifest's", lambda: context.recipe)


def privacy(context: Context) -> Iterator[Line]:
    """What the run will cost, and whether that is within what this hospital and the manifest allow."""
    cost = planned_cost(context.config, context.manifest)
    if cost is None:
        yield ok("this federation trains without differential privacy")
        return
    told = (
        f"{cost.rounds} rounds will cost each {cost.unit} epsilon {cost.epsilon_rdp:.2f} at delta {cost.delta:g} "
        f"(tighter bound {cost.epsilon_pld:.2f}), of {cost.cap:g}"
    )
    if cost.spent_rdp:
        told += f"; {cost.spent_rdp:.2f} are spent"
    if cost.fits:
        yield ok(told)
    else:
        yield problem(f"{told}: {cost.affordable} of them can be afforded", _more_noise(cost.proposed_sigma))
    yield ok(f"noise of {cost.sigma:g} over the clip; {cost.validation}")
    if not cost.has_ledger:
        yield problem("there is no privacy ledger yet", LEDGER_HINT)


def _more_noise(proposed: float | None) -> str:
    if proposed is None:
        return "no noise makes it fit: agree with the consortium on fewer rounds or releases, or raise [privacy] cap"
    return (
        f"set [privacy] noise = {proposed:g}, with which the whole run fits; or raise the cap, if this hospital agrees"
    )


def state(context: Context) -> Iterator[Line]:
    """Of this run, of none, or of one that is over."""
    folder, run = context.config.state, context.manifest.run
    if folder.exists() and not folder.is_dir():
        yield problem(f"{folder}: is not a folder", STATE_HINT)
        return
    found = run_of(folder)
    if found is None:
        yield ok("the folder is new")
    elif found == run:
        yield ok(f"the folder is that of {run}")
    else:
        yield ok(f"{run} begins: at the next start the files of {found} are set aside")
