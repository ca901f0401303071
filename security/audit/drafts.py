"""Documents drafted from logs: a record of processing, an impact assessment, technical documentation.

Templates have headings and blanks; every sentence in between is a `DraftStatement`, which names its entries.
What no entry carries (contacts, countries, risks, a person's judgement) stays a marked blank. Entries that witnesses do
not cover are left out, and logs with a finding are refused: a document must not say more than was verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from lazaret.errors import ConfigError, VerificationFailed
from security.audit import text
from security.audit.agreement import keys_of
from security.audit.cli import TARGET, logs, root_key
from security.audit.compare import Comparison, cross
from security.audit.findings import Severity
from security.audit.pages import environment
from security.audit.verify import Verified
from security.clock import SystemClock
from security.log.reader import LogReader, Record

DOCUMENTS: Final = {
    "record": ("Record of processing activities", "Regulation (EU) 2016/679 (GDPR), Article 30"),
    "dpia": ("Data protection impact assessment", "Regulation (EU) 2016/679 (GDPR), Article 35"),
    "technical": ("Technical documentation", "Regulation (EU) 2024/1689 (AI Act), Annex IV"),
}
_LISTED: Final = 8  # so many entries are named one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStatement:
    """One sentence, and the entries of one log that it comes from."""

    words: str
    log: str
    entries: tuple[int, ...]

    @property
    def source(self) -> str:
        """Where to look it up."""
        if len(self.entries) == 1:
            return f"{self.log}, entry {self.entries[0]}"
        if len(self.entries) <= _LISTED:
            return f"{self.log}, entries {', '.join(map(str, self.entries))}"
        return f"{self.log}, {len(self.entries)} entries from {self.entries[0]} to {self.entries[-1]}"


def render(result: Comparison, document: str, *, checked_ms: int) -> str:
    """One document as a page.

    :raises VerificationFailed: if a log has a finding.
    """
    wrong = sorted({finding.code for finding in result.findings if finding.severity is Severity.FAIL})
    if wrong:
        raise VerificationFailed(
            f"the logs fail verification ({', '.join(wrong[:3])}), so nothing is drafted from them",
            where=", ".join(log.origin for log in result.logs)[:200],
            hint="`privacy-audit cross` lists what is wrong",
        )
    title, law = DOCUMENTS[document]
    facts = {name: [one for log in result.logs for one in make(_Covered(log))] for name, make in _TOPICS.items()}
    return (
        environment()
        .get_template(f"draft_{document}.html")
        .render(
            title=title,
            law=law,
            checked=text.when(checked_ms / 1000),
            verdict=text.VERDICTS[result.exit_code],
            covered=[(log.origin, log.covered, log.size) for log in result.logs],
            parties=[history.name for history in result.histories],
            **facts,
        )
    )


class _Covered:
    """The entries of a log that witnesses cover, by type."""

    def __init__(self, log: Verified) -> None:
        self.log = log
        self.name = text.plain(log.origin.split(".", 1)[0])
        self._records: dict[str, list[Record]] = {}
        for record in LogReader(log.folder).records() if log.covered else ():
            if record.seq < log.covered:
                self._records.setdefault(record.type, []).append(record)

    def of(self, *types: str) -> list[Record]:
        return sorted((record for name in types for record in self._records.get(name, ())), key=lambda one: one.seq)

    def say(self, words: str, records: Iterable[Record]) -> DraftStatement:
        return DraftStatement(words=text.plain(words), log=self.log.origin, entries=tuple(one.seq for one in records))

    def each(self, records: Iterable[Record], key: Callable[[Record], object]) -> list[list[Record]]:
        """Entries that say the same, together: each thing is said once."""
        groups: dict[object, list[Record]] = {}
        for record in records:
            groups.setdefault(key(record), []).append(record)
        return list(groups.values())


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _parties(log: _Covered) -> Iterator[DraftStatement]:
    for record in log.of("log.genesis"):
        yield log.say(f"{log.name} takes part as {record.body['role']} and keeps this log.", [record])


def _manifests(log: _Covered) -> Iterator[DraftStatement]:
    """What the consortium had agreed, under the entry that put each version in force."""
    for record in log.of("log.genesis", "manifest.adopted"):
        digest = record.body.get("manifest") or record.body["new"]
        agreement = log.log.agreements.of(digest)
        if agreement is None or agreement.rules is None:
            continue
        rules = agreement.rules
        terms = (
            f"epsilon at most {rules.privacy.epsilon:g}, delta {rules.privacy.delta:g}, for each {rules.privacy.unit}"
            if rules.privacy
            else "no differential privacy is demanded"
        )
        yield log.say(
            f"At {log.name} manifest version {agreement.version} came into force ({digest}): run {rules.run}, method "
            f"{rules.method}, {rules.rounds} rounds, cohorts of at least {rules.least_cohort}, sums over at least "
            f"{rules.least_survivors}, at most {rules.colluders} colluders; {terms}.",
            [record],
        )


def _purposes(log: _Covered) -> Iterator[DraftStatement]:
    for group in log.each(log.of("data.opened"), lambda one: (one.body["purpose"], one.body["legal_basis"])):
        body = group[0].body
        words = f"{log.name} opened its data for the purpose \u201c{body['purpose']}\u201d on the legal basis"
        yield log.say(f"{words} \u201c{body['legal_basis']}\u201d ({_count(len(group), 'time')}).", group)


def _left(log: _Covered) -> Iterator[DraftStatement]:
    for group in log.each(log.of("egress"), lambda one: one.body["data_class"]):
        size, kind = sum(one.body["bytes"] for one in group), group[0].body["data_class"]
        yield log.say(f"{_count(len(group), 'message')} of class {kind} left {log.name}, {size} bytes in all.", group)
    for group in log.each(log.of("egress.blocked"), lambda one: one.body["rule"]):
        yield log.say(
            f"The egress filter of {log.name} stopped {_count(len(group), 'message')}: {group[0].body['rule']}.", group
        )


def _stayed(log: _Covered) -> Iterator[DraftStatement]:
    kept: dict[str, list[Record]] = {}
    for record in log.of("train.done"):
        for artefact in record.body["artefacts"]:
            kept.setdefault(artefact["kind"], []).append(record)
    for kind, records in kept.items():
        yield log.say(f"{kind} stay at {log.name} (disposition local-only).", records)


def _recipients(log: _Covered) -> Iterator[DraftStatement]:
    for group in log.each(log.of("egress"), lambda one: one.body["destination"]):
        key = group[0].body["destination"]
        yield log.say(
            f"{_count(len(group), 'message')} of {log.name} went to the coordinator with the TLS key {key}.", group
        )
    for record in log.of("access.exported"):
        words = f"A copy of the log of {log.name} went to {record.body['auditor']} for: {record.body['purpose']}."
        yield log.say(words, [record])


def _erasures(log: _Covered) -> Iterator[DraftStatement]:
    for record in log.of("annex.erased"):
        body = record.body
        words = f"{log.name} erased the annexes of entries {body['first']} to {body['last']}"
        yield log.say(f"{words}, ordered by {body['authority']}.", [record])


def _measures(log: _Covered) -> Iterator[DraftStatement]:
    vectors = [one for one in log.of("egress") if one.body["data_class"] == "masked-vector"]
    if vectors:
        least = min((one.body["uniformity"] for one in vectors if one.body["uniformity"]), key=float, default="none")
        masked = sum(one.body["masked"] for one in vectors)
        words = f"{masked} of {len(vectors)} vectors that left {log.name} were masked"
        yield log.say(f"{words}; the least p-value of their bytes was {least}.", vectors)
    for group in log.each(log.of("secagg.unmasked"), lambda one: len(one.body["self_mask"])):
        count = len(group[0].body["self_mask"])
        yield log.say(f"At {log.name}, shares were opened for {_count(len(group), 'sum')} over {count} sites.", group)
    walls = ("network_namespace", "seccomp", "landlock")
    for group in log.each(log.of("trainer.isolated"), lambda one: tuple(sorted(one.body.items()))):
        body = group[0].body
        held = ", ".join(wall.replace("_", " ") for wall in walls if body[wall]) or "nothing"
        can = ", ".join(word for word in ("connection", "keys") if body[word]) or "neither a connection nor keys"
        words = f"At {log.name} the process that saw images was held by: {held}; it could reach: {can}"
        yield log.say(f"{words} ({_count(len(group), 'start')}).", group)


def _privacy(log: _Covered) -> Iterator[DraftStatement]:
    for record in log.of("dp.committed")[-1:]:
        body = record.body
        yield log.say(
            f"{log.name} had spent epsilon {body['epsilon_total']} of at most {body['cap']} "
            f"(delta {body['delta']}, for each {body['unit']}, {body['relation']}).",
            [record],
        )


def _software(log: _Covered) -> Iterator[DraftStatement]:
    for group in log.each(
        log.of("agent.start"), lambda one: (one.body["version"], one.body["package"], one.body["proto"])
    ):
        body = group[0].body
        yield log.say(
            f"{log.name} ran lazaret {body['version']}, package {body['package']}, wire schema {body['proto']} "
            f"({_count(len(group), 'start')}).",
            group,
        )


def _training(log: _Covered) -> Iterator[DraftStatement]:
    for group in log.each(log.of("train.done"), lambda one: (one.run, one.body["method"])):
        steps = sum(one.body["steps"] for one in group)
        words = f"{log.name} trained {_count(len(group), 'round')} of run {group[0].run} with {group[0].body['method']}"
        yield log.say(f"{words}, {steps} steps in all.", group)


def _rounds(log: _Covered) -> Iterator[DraftStatement]:
    for record in log.of("aggregate.published"):
        body = record.body
        yield log.say(
            f"Round {record.round} of run {record.run}: a sum of {body['inputs']} vectors turned model "
            f"{body['previous']} into {body['model']}.",
            [record],
        )


def _changes(log: _Covered) -> Iterator[DraftStatement]:
    words = {
        "config.changed": "The configuration of {name} changed ({reason}).",
        "policy.changed": "The policy of {name} changed ({reason}).",
        "manifest.adopted": "{name} adopted manifest version {version}.",
        "run.offered": "{name} was offered run {next}, which did not begin ({reason}).",
        "plugin.loaded": "{name} trained with a method's own file, SHA-256 {plugin}.",
        "run.accepted": "{name} began the run of manifest version {version} (decided by: {by}).",
        "run.stopped": "The operator ended the run of {name} before its last round.",
        "key.rotated": "{name} rotated the key of its log ({reason}).",
        "peer.enrolled": "{name} admitted the site {site}.",
        "peer.revoked": "{name} no longer admits the site {site} ({reason}).",
    }
    for record in log.of(*words):
        yield log.say(words[record.type].format_map({"name": log.name, **record.body}), [record])


def _incidents(log: _Covered) -> Iterator[DraftStatement]:
    words = {
        "clock.adjusted": "The clock of {name} was moved by {offset_ms} ms.",
        "log.recovered": "{name} was interrupted while it wrote; {bytes} bytes were set aside.",
        "round.declined": "{name} did not take part in an attempt: {rule}.",
        "operator.action": "A person at {name} recorded: {command}.",
    }
    for kind, sentence in words.items():
        for group in log.each(log.of(kind), lambda one: tuple(sorted(map(str, one.body.items())))):
            yield log.say(sentence.format_map({"name": log.name, **group[0].body}), group)
    lost = Counter[str]()
    records = log.of("secagg.survivors")
    for record in records:
        lost.update(record.body["dropouts"])
    for name, count in sorted(lost.items()):
        absent = [record for record in records if name in record.body["dropouts"]]
        yield log.say(f"By the log of {log.name}, {name} was missing from {_count(count, 'sum')}.", absent)


_TOPICS: Final[dict[str, Callable[[Any], Iterator[DraftStatement]]]] = {
    "members": _parties,
    "agreed": _manifests,
    "purposes": _purposes,
    "left": _left,
    "stayed": _stayed,
    "recipients": _recipients,
    "erasures": _erasures,
    "measures": _measures,
    "privacy": _privacy,
    "software": _software,
    "training": _training,
    "rounds": _rounds,
    "changes": _changes,
    "incidents": _incidents,
}


# The command.


@click.command(short_help="Draft a document for authorities from logs.")
@logs
@root_key
@click.option("--document", type=click.Choice(list(DOCUMENTS)), required=True, help="Which document.")
@click.option("-o", "--output", type=TARGET, required=True, help="The draft, as a page (.html).")
def draft(logs: Sequence[Path], root_key: Path | None, document: str, output: Path) -> None:
    """Draft a document from logs: record of processing, impact assessment (dpia) or technical documentation."""
    if output.suffix != ".html":
        raise ConfigError("a draft is .html", where=str(output))
    result = cross(logs, keys_of(logs, root_key))
    page = render(result, document, checked_ms=SystemClock().now_ms())
    output.write_text(page, encoding="utf-8")
    sentences, blanks = page.count("<cite>"), page.count('class="blank"')
    click.echo(f"{output}: {DOCUMENTS[document][0]}, {sentences} sentences with their entries, {blanks} blanks")
