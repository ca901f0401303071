"""Were the rules kept? Each entry against the manifest that was in force when it was written.

A rule is one small function: an entry and the agreed rules in, breaches out. `@rule` names the entry types it looks at.
To add one, write the function here, its code in `findings`, and in tests/attacks/audit/test_audit_conformance.py a
breach and the twin without the rule. Rules that need more than one entry are in `completeness`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from security.audit.agreement import AgreedRules
from security.log.machine import SKEW_MS
from security.log.reader import Record
from security.secagg import thresholds

if TYPE_CHECKING:
    from security.dp.noise import SharedNoise

Breach = tuple[str, str]  # a code of `findings`, and what was seen
Rule = Callable[[Record, AgreedRules], Iterator[Breach]]
RULES: Final[dict[str, list[Rule]]] = {}

TOLERANCE: Final = 1e-9
NOT_STATED: Final = "not stated"


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Enter a rule for some types of entry."""

    def enter(function: Rule) -> Rule:
        for name in types:
            RULES.setdefault(name, []).append(function)
        return function

    return enter


def breaches(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """What one entry breaks."""
    for judge in RULES.get(record.type, ()):
        yield from judge(record, rules)


# What runs, and for which purpose


@rule("agent.start")
def no_insecure_option(record: Record, _rules: AgreedRules) -> Iterator[Breach]:
    """No manifest permits one."""
    if record.body["insecure"]:
        yield "InsecureOption", ", ".join(record.body["insecure"])[:200]


@rule("agent.start")
def software_is_listed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Package and wire schema, where the manifest lists any."""
    for what, listed in (("package", rules.packages), ("proto", rules.schemas)):
        if listed and record.body[what] not in listed:
            yield "SoftwareUnlisted", f"{what} {record.body[what][:16]} is none of {len(listed)} listed"


@rule("data.opened")
def purpose_is_agreed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Purpose and legal basis are stated, and are among those agreed."""
    for name, agreed in (("purpose", rules.purposes), ("legal_basis", rules.legal_bases)):
        stated = record.body[name]
        if stated.strip().lower() in ("", NOT_STATED):
            yield "PurposeNotStated", f"{name.replace('_', ' ')} is not stated"
        elif agreed and stated not in agreed:
            yield "PurposeNotAgreed", f"{name.replace('_', ' ')} {stated[:80]!r} was not agreed"


# Method, model, settings, rounds


@rule("round.invited", "train.done", "model.received", "aggregate.published", "secagg.survivors", "secagg.unmasked")
def run_is_in_force(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """A manifest is for one run."""
    if record.run != rules.run:
        yield "RunMismatch", f"run {record.run}, in force is {rules.run}"


@rule("run.accepted")
def accepted_run_is_in_force(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """A run that came by wire is the manifest's, and so is the model that it begins with."""
    if record.run != rules.run:
        yield "RunMismatch", f"run {record.run} was accepted, in force is {rules.run}"
    if record.body["model"] != rules.initial_file:
        yield "MethodMismatch", f"initial model {record.body['model'][:16]}, agreed is {rules.initial_file[:16]}"


@rule("round.invited", "train.done")
def method_is_agreed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    if record.body["method"] != rules.method:
        yield "MethodMismatch", f"method {record.body['method']}, agreed is {rules.method}"


@rule("plugin.loaded")
def plugin_is_agreed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """What ran beside the package is the file that the manifest pins. A run that pins none has no such entry."""
    if record.body["plugin"] != rules.plugin or record.run != rules.run:
        yield "PluginMismatch", f"plugin {record.body['plugin']} was run, agreed is {rules.plugin or 'none'}"


@rule("model.received")
def layout_is_agreed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    if record.body["layout"] != rules.layout:
        yield "MethodMismatch", f"layout {record.body['layout'][:16]}, agreed is {rules.layout[:16]}"


@rule("model.received")
def model_is_the_coordinators(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    if record.body["sender"] not in rules.destinations:
        yield "SenderUnlisted", f"the model came from {record.body['sender'][:16]}, which is not the coordinator"


@rule("round.invited")
def settings_are_agreed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Hyper-parameters travel as one digest, which the round's context binds."""
    if record.body["config"] not in rules.configs:
        yield "SettingsMismatch", f"configuration {record.body['config'][:16]} is none of {len(rules.configs)} listed"


def latest_round(rounds: int) -> int:
    """Rounds that were lost use numbers up, so that a run reaches numbers above its rounds; within reason."""
    return 4 * rounds + 16


@rule("round.invited", "train.done")
def round_is_within_the_run(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    if record.round is None or record.round > latest_round(rules.rounds):
        yield "RoundsExceeded", f"round {record.round} of a run of {rules.rounds} rounds"


@rule("round.invited")
def manifest_has_not_ended(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    if record.ts > rules.ends_ms + SKEW_MS:
        days = (record.ts - rules.ends_ms) // 86_400_000
        yield "ManifestEnded", f"joined {days} days after the end of the manifest in force"


# Cohorts and thresholds


@rule("round.invited")
def cohort_is_large_enough(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Colluder bound, least survivors and single history together give the smallest cohort."""
    size = record.body["cohort_size"]
    if size < rules.least_cohort:
        yield "CohortTooSmall", f"a cohort of {size}, at least {rules.least_cohort} are due"


@rule("secagg.survivors")
def survivors_are_enough(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    count, due = record.body["count"], max(rules.least_survivors, record.body["threshold"], rules.colluders + 2)
    if count < due:
        yield "SurvivorsTooFew", f"a sum over {count}, at least {due} are due"


@rule("secagg.survivors")
def threshold_follows(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """The quorum is a function of the cohort and of the manifest's numbers."""
    size = record.body["count"] + len(record.body["dropouts"])
    due = thresholds.quorum(n=size, c=rules.colluders, m=rules.least_survivors)
    if record.body["threshold"] != due:
        yield "ThresholdWrong", f"threshold {record.body['threshold']} of a cohort of {size}, due is {due}"


@rule("secagg.unmasked")
def sum_is_not_of_one(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Opening the masks of fewer than the least number of survivors would show single updates."""
    # A name counts once, and only if it is a site's: repetitions and strangers hide nobody.
    opened = len(set(record.body["self_mask"]) & rules.sites)
    if opened < max(rules.least_survivors, rules.colluders + 2):
        yield "SurvivorsTooFew", f"masks were opened for a sum over {opened}"


@rule("aggregate.published")
def sum_has_enough_inputs(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    if record.body["inputs"] < rules.least_survivors:
        yield "SurvivorsTooFew", f"a sum over {record.body['inputs']}, at least {rules.least_survivors} are due"


# Groups whose sums are opened apart


@rule("round.invited", "aggregate.published")
def groups_are_the_drawn_ones(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Whoever chooses the groups chooses among whom a site hides; they follow from the secrets in the manifest."""
    stated, drawn = record.body["groups"], rules.groups.digest if rules.groups else None
    if rules.undrawn:
        yield "GroupsMismatch", "the groups of this run are not drawn yet"
    elif stated != drawn:
        shown = [value[:16] if value else "none" for value in (stated, drawn)]
        yield "GroupsMismatch", f"groups {shown[0]}, drawn are {shown[1]}"


@rule("secagg.unmasked")
def every_group_hides_its_sites(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Each group's sum is published: one that is too small shows single updates, however many sites there are."""
    if rules.groups is None:
        return
    opened = record.body["self_mask"]
    strangers = set(opened) - {site for group in rules.groups.members for site in group}
    if strangers:
        yield "GroupsMismatch", f"{min(strangers)} is in no group"
    for number, part in enumerate(rules.groups.parts(opened), 1):
        if len(part) < rules.groups.least:
            due = f"at least {rules.groups.least} are due"
            yield "SurvivorsTooFew", f"masks were opened for a sum of group {number} over {len(part)}, {due}"


# Votes


@rule("result.voted")
def vote_counts(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """A model follows if a quorum accepts it, and falls only by a set that has a quorum of votes."""
    accepts, refusals, quorum = (record.body[name] for name in ("accepts", "refusals", "threshold"))
    least = thresholds.quorum(n=rules.least_cohort, c=rules.colluders, m=rules.least_survivors)
    if not rules.vote:
        yield "VoteWrong", "a vote, and the manifest asks for none"
    elif quorum < least or accepts + refusals < quorum or record.body["accepted"] != (accepts >= quorum):
        outcome = "accepted" if record.body["accepted"] else "not accepted"
        yield "VoteWrong", f"{outcome} with {accepts} of {accepts + refusals} votes, {quorum} are a quorum"


# Differential privacy, where the manifest demands it


@rule("dp.reserved", "dp.committed")
def privacy_terms_are_agreed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Unit and delta. Bookings of other runs on the same patients are under their own manifests."""
    if rules.privacy is None or record.run != rules.run:
        return
    if record.body["unit"] != rules.privacy.unit:
        yield "PrivacyTerms", f"unit {record.body['unit']}, demanded is {rules.privacy.unit}"
    if not float(record.body["delta"]) <= rules.privacy.delta * (1 + TOLERANCE):
        yield "PrivacyTerms", f"delta {record.body['delta']}, demanded is at most {rules.privacy.delta:g}"


@rule("dp.reserved", "dp.committed")
def noise_is_agreed(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """Of each training mechanism: noise over the clip, the clip, steps and sampling rate."""
    due = rules.privacy
    if due is None or record.run != rules.run:
        return
    if due.shared is not None:
        yield from _shared_noise_is_agreed(record, due.shared, due.noise_floor)
    for item in record.body["mechanisms"]:
        if item["kind"] != "dp-sgd":
            continue
        sigma, clip = float(item["sigma"]), float(item["sensitivity"])
        if not sigma >= due.noise_floor * clip * (1 - TOLERANCE):
            yield "NoiseBelowFloor", f"noise {sigma / clip if clip else 0:g}, the floor is {due.noise_floor:g}"
        if not clip <= due.clip * (1 + TOLERANCE):
            yield "ClipExceeded", f"clip {clip:g}, demanded is {due.clip:g}"
        if due.steps is not None and (item["steps"], item["rate"]) != (due.steps, due.rate):
            yield "ScheduleMismatch", f"{item['steps']} steps at rate {item['rate']}, agreed {due.steps} at {due.rate}"


def _shared_noise_is_agreed(record: Record, due: SharedNoise, floor: float) -> Iterator[Breach]:
    """A site's own part of the noise, the clip in ring units, and how many honest survivors it counts on."""
    for item in record.body["mechanisms"]:
        if item["kind"] != "shared-sgd":
            continue
        if not float(item["sigma"]) >= due.sigma(floor):
            yield "NoiseBelowFloor", f"{item['sigma']} ring units of noise, the floor is {due.sigma(floor)}"
        if float(item["sensitivity"]) != due.units:
            yield "ClipExceeded", f"clip of {item['sensitivity']} ring units, agreed are {due.units}"
        if item["honest"] > due.honest or (item["steps"], item["dimensions"]) != (1, due.dimensions):
            booked = f"{item['steps']} steps, {item['dimensions']} numbers, {item['honest']} honest survivors"
            yield "ScheduleMismatch", f"{booked}; agreed 1, {due.dimensions}, at most {due.honest}"


@rule("dp.reserved", "dp.committed")
def mechanism_trains(record: Record, rules: AgreedRules) -> Iterator[Breach]:
    """What books no training does not pay for a trained vector."""
    if rules.privacy is None or record.run != rules.run or record.round is None:
        return
    trains = "dp-sgd" if rules.privacy.shared is None else "shared-sgd"
    if not any(item["kind"] == trains for item in record.body["mechanisms"]):
        yield "PrivacyMissing", "a booking without training noise"
