"""`site-agent check`: what was agreed, the coordinator, this machine, the data set; and the order of the checks.

Nothing that it trains is kept, and no message is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import Final

from lazaret import checks
from lazaret.checks import Line, Unchecked, ok, problem, run, tried, warning
from security.identity import credentials
from security.identity.credentials import clock_by_dates
from security.log.machine import SKEW_MS
from site_agent.checks.context import CHECKS, SiteCheckContext
from site_agent.config import STATED, SiteConfig
from site_agent.privacy import LEDGER_HINT, kept_figures, planned_cost
from site_agent.state_dir import KEPT_STATES, STATE_HINT, run_of
from site_agent.trainer.isolation import HINT, card_files
from site_agent.trainer_process import CheckingTrainer

# Checks of what was agreed, of the coordinator, and of this machine.
#
# Agreed: certificates, keys, manifest, this hospital's policy, initial model, learning code, privacy. The coordinator:
# can it be reached, is it the right one, does it accept this site, do the clocks agree. This machine: disk and
# processor.


@CHECKS.add
def certificates(context: SiteCheckContext) -> Iterator[Line]:
    yield from credentials.certificates(context.credentials)


@CHECKS.add
def keys(context: SiteCheckContext) -> Iterator[Line]:
    yield from credentials.key_files(context.credentials)
    yield credentials.audit_root(context.credentials, context.config.state / "log")


@CHECKS.add
def manifest(context: SiteCheckContext) -> Iterator[Line]:
    yield from credentials.manifest(context.credentials)


@CHECKS.add
def policy(context: SiteCheckContext) -> Iterator[Line]:
    """What the policy would refuse at the first order is reported now."""
    ours, manifest = context.config.policy, context.manifest
    yield tried("permits this federation", lambda: ours.check_federation(manifest))
    if manifest.scores is not None:
        yield tried("agrees with the manifest on scores", lambda: ours.check_consent(manifest, context.member))
    if manifest.privacy is not None:
        yield tried("has no rule that would make epsilon invalid", ours.check_private)
    sites = len(manifest.roster)
    yield tried(f"permits a cohort of all {sites} sites", lambda: ours.check_cohort(sites))
    vector = manifest.aggregation.layout.byte_length
    yield tried(f"permits the {vector} bytes of one vector", lambda: ours.check_bytes(vector))
    if ours.most_rounds is not None and ours.most_rounds < manifest.training.rounds:
        yield warning(
            f"[policy] most_rounds ends training here after {ours.most_rounds} of {manifest.training.rounds} rounds",
            "raise it, unless this is intended",
        )


@CHECKS.add
def model(context: SiteCheckContext) -> Iterator[Line]:
    """The pinned file, and that this package computes what was agreed."""
    yield tried("one training configuration", lambda: context.manifest.training.config_hash)
    context.initial  # noqa: B018  # its error is the finding
    yield ok("the initial model is the one that the manifest pins")


@CHECKS.add
def privacy(context: SiteCheckContext) -> Iterator[Line]:
    """What the run will cost, and whether that is within what this hospital and the manifest allow."""
    with kept_figures(context.config):
        cost = planned_cost(context.config, context.manifest)
    if cost is None:
        yield ok("this federation trains without differential privacy")
        return
    costs = (
        f"after {cost.rounds} rounds the ledger will have booked epsilon {cost.epsilon:.2f} of {cost.cap:g} for each "
        f"{cost.unit} at delta {cost.delta:g} (tighter bound {cost.epsilon_pld:.2f})"
    )
    if cost.alone is not None:
        costs += f"; that is inside the sum, and {cost.alone:.2f} alone, if all other sites collude"
    if cost.booked:
        costs += f"; {cost.booked:.2f} are booked already"
    if cost.fits:
        yield ok(costs)
    else:
        yield problem(f"{costs}: {cost.affordable} of them fit the budget", _more_noise(cost.proposed_sigma))
    yield ok(f"noise of {cost.sigma:g} over the clip; {cost.validation}")
    if not cost.has_ledger:
        yield problem("there is no privacy ledger yet", LEDGER_HINT)


def _more_noise(proposed: float | None) -> str:
    if proposed is None:
        return "no noise makes it fit: agree with the consortium on fewer rounds or releases, or raise [privacy] cap"
    return f"set [privacy] noise = {proposed:g}, with which all rounds fit; or raise the cap, if this hospital agrees"


@CHECKS.add
def state(context: SiteCheckContext) -> Iterator[Line]:
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
        yield ok(f"{run} begins: at the next start the files of {found} are moved to runs/")


# The coordinator.

SLIGHT_MS: Final = 120_000


@CHECKS.add
def coordinator(context: SiteCheckContext) -> Iterator[Line]:
    """First TLS without a certificate, then with this site's own."""
    yield from context.served
    context.answer  # noqa: B018  # its error is the finding
    yield ok("the coordinator accepts this site")


@CHECKS.add
def clock(context: SiteCheckContext) -> Iterator[Line]:
    """Against the dates of certificates and manifest, and against the coordinator's clock."""
    yield from clock_by_dates(context.credentials)
    theirs = context.answer.time_ms
    if theirs is None:
        raise Unchecked("the coordinator does not send its time")
    yield compared(context.credentials.now_ms, theirs)


def compared(ours_ms: int, theirs_ms: int) -> Line:
    """Beyond what two logs may differ by the agent uses nothing of the coordinator (`client.py`)."""
    apart = abs(ours_ms - theirs_ms)
    difference = f"{_span(apart)} {'ahead of' if ours_ms > theirs_ms else 'behind'} the coordinator's"
    if apart > SKEW_MS:
        return problem(f"this machine's clock is {difference}", "set the clock, and keep it correct with NTP")
    if apart >= SLIGHT_MS:
        return warning(f"this machine's clock is {difference}", "one of the two is wrong; keep both correct with NTP")
    return ok("agrees with the coordinator's")


def _span(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


# This machine: the disk for models, personal states and the log, and the processor for training.

# Weights and two moments of Adam; a new memory is written beside the old one before that goes.
MEMORY_COPIES: Final = 3
KEPT_MEMORIES: Final = 3
LOG_BYTES_PER_ROUND: Final = 200_000


@CHECKS.add
def disk(context: SiteCheckContext) -> Iterator[Line]:
    """By the sizes in the layout: models, memories and a sealed update are replaced as rounds go by, the log grows."""
    layout, folder = context.manifest.aggregation.layout, context.config.state
    whole_model = context.initial.path.stat().st_size
    kept = KEPT_STATES * 4 * layout.state_words + KEPT_MEMORIES * MEMORY_COPIES * whole_model
    kept += 2 * layout.byte_length + 2 * whole_model
    missing = max(0, kept - checks.used_bytes(folder))
    least = missing + LOG_BYTES_PER_ROUND
    whole = missing + context.manifest.training.rounds * LOG_BYTES_PER_ROUND
    yield checks.disk(folder, free=context.free(folder), least=least, whole=whole)


@CHECKS.add
def device(context: SiteCheckContext) -> Iterator[Line]:
    """What training will run on."""
    threads, there = context.config.site.threads, checks.processors()
    if threads is not None and threads > there:
        yield warning(f"[site] threads = {threads}, and {there} processors", "more threads than processors are slower")
    else:
        yield ok(f"the processor has {there} threads, training uses {threads or there}")
    site = context.config.site
    plain = site.device in ("auto", "cpu") and site.precision in ("auto", "float32")
    if plain and sys.platform == "linux" and not card_files(site.device):
        # No card has a file here, so that there is nothing to try; torch is not loaded for that.
        yield ok(f"trains on the processor, float32 ({'as asked' if site.device == 'cpu' else 'no graphics card'})")
        return
    # Asked of the trainer's process: whether a card can be used depends on what is open to it.
    yield from context.data_process.ask("device")


@CHECKS.add
def isolation(context: SiteCheckContext) -> Iterator[Line]:
    """What holds around the process that will see the images, tried from inside before it has seen one."""
    found = context.data_process.isolation
    required = "required" in (context.config.site.isolation, context.manifest.training.isolation)
    if not found.connection_possible and not found.keys_readable:
        yield ok(found.sentence)
    elif required and not found.exception:
        yield problem(found.sentence, HINT)
    else:
        yield warning(found.sentence, HINT)


# What sees images or trains on them is done by a trainer's process (`trainer.data_checks`).


@CHECKS.add
def data(context: SiteCheckContext) -> Iterator[Line]:
    yield from context.data_process.ask("data")


@CHECKS.add
def processing(context: SiteCheckContext) -> Iterator[Line]:
    """What a data protection officer asks for, and what the privacy log will say."""
    table = context.config.data
    missing = [name for name in STATED if not getattr(table, name)]
    if missing:
        yield warning(
            f"not stated: {', '.join(missing)}",
            f"set {'them' if len(missing) > 1 else 'it'} in [data]: the auditor's report has it from there",
        )
    else:
        yield ok("controller, purpose, legal basis, subjects, categories and retention are stated")


@CHECKS.add
def images(context: SiteCheckContext) -> Iterator[Line]:
    yield from context.data_process.ask("images")


@CHECKS.add
def code(context: SiteCheckContext) -> Iterator[Line]:
    yield from context.data_process.ask("code")


@CHECKS.add
def trial(context: SiteCheckContext) -> Iterator[Line]:
    context.initial  # noqa: B018  # where it cannot be used, another check says so
    yield from context.data_process.ask("trial")


@CHECKS.add
def configuration(context: SiteCheckContext) -> Iterator[Line]:
    yield ok(f"{context.config.path} is valid")


def run_checks(
    config: SiteConfig, *, skip: Collection[str] = (), progress: bool = False, process: CheckingTrainer | None = None
) -> Iterator[Line]:
    """Every check, whatever the others say.

    :param process: the one that looks at images, if it was started before.
    """
    with closing(SiteCheckContext(config=config, progress=progress, process=process)) as context:
        yield from run(CHECKS, context, skip=skip)
