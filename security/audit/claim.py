"""One page about one party in one round, with the proof of every sentence: to hand to a patient board or a court.

Each sentence is written from one entry, and the entries travel below it with their paths to one signed checkpoint. Who
checks the page proves the entries and writes the sentences again from them: a page with another word is false, even if
all its proofs are valid. What a page cannot show is that there was nothing else; it says so itself.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from lazaret.errors import CodecError, ConfigError, VerificationFailed
from security.audit.agreement import Keys, keys_of
from security.audit.cli import TARGET, logs, root_key
from security.audit.proof import Proof, prove_all
from security.audit.text import plain, when
from security.audit.verify import Verified, origin_of, verify
from security.crypto import encoding
from security.crypto.merkle import MAX_PATH
from security.log.keys import EpochChain
from security.log.note import Note, VerifierKey, checkpoint_of
from security.log.reader import LogReader
from security.log.roster import Roster

HEADING: Final = "lazaret claim 1"
_BEGIN: Final = "-----BEGIN PROOF-----"
_END: Final = "-----END PROOF-----"
_WIDTH: Final = 100
_subject = re.compile(
    r"(site|coordinator) ([A-Za-z0-9][A-Za-z0-9._-]*), round ([0-9]{1,9})(?:, run ([A-Za-z0-9._/:-]+))?"
)

# What an entry says, in one sentence. An entry of another type has no sentence.
_SENTENCES: Final[dict[str, str]] = {
    "model.received": "It had the model {model}.",
    "train.done": "It trained {steps} steps of {method}. What this made besides the update stays there: {kept}.",
    "dp.committed": "It spent epsilon {epsilon_round} in this round, {epsilon_total} of at most {cap} in all "
    "(delta {delta}, for each {unit}).",
    "round.declined": "It did not take part: {rule}.",
    "round.invited": "It agreed to a sum over a cohort of {cohort_size} sites{apart}.",
    "egress": "It sent a message with {data_class}: {message}, {bytes} bytes (its type has {expected_bytes}), "
    "SHA-256 {sha256}.",
    "egress.blocked": "The egress filter stopped a message, {message}, {bytes} bytes: {rule}.",
    "secagg.survivors": "It agreed that the sum is over {count} sites, at least {threshold}; missing: {missing}.",
    "secagg.unmasked": "Shares were opened: of the own masks of {survived}; of the keys of {lost}.",
    "result.voted": "Of the sites, {accepts} accepted the model and {refusals} did not ({threshold} are a quorum). "
    "Model {model} stands.",
    "aggregate.published": "It published the sum of {inputs} vectors{apart}. Model {previous} became {model}.",
}
_CARRYING: Final = frozenset({"masked-vector", "mask-share"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSubject:
    """Whom a claim is about, and which round."""

    role: str
    name: str
    round: int
    run: str | None

    @classmethod
    def parse(cls, text: str) -> ClaimSubject:
        """Read `site graz, round 3` or `site graz, round 3, run run-1`."""
        match = _subject.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                "a claim is about a party and a round", where=text[:80], hint='such as "site graz, round 3, run run-1"'
            )
        return cls(role=match[1], name=match[2], round=int(match[3]), run=match[4])

    def __str__(self) -> str:
        return f"{self.role} {self.name}, round {self.round}" + (f", run {self.run}" if self.run else "")


def sentence(entry: dict[str, Any]) -> str | None:
    """What an entry says; None if a page does not mention it."""
    body, kind = entry["body"], entry["type"]
    if kind == "egress" and body["data_class"] not in _CARRYING:
        return None
    if kind not in _SENTENCES:
        return None
    words = dict(body)
    words["apart"] = ", each group's apart" if body.get("groups") else ""
    if kind == "train.done":
        words["kept"] = (
            ", ".join(f"{one['kind']} ({one['elements']} numbers)" for one in body["artefacts"]) or "nothing"
        )
    elif kind == "secagg.survivors":
        words["missing"] = ", ".join(body["dropouts"]) or "none"
    elif kind == "secagg.unmasked":
        words |= {"survived": ", ".join(body["self_mask"]) or "none", "lost": ", ".join(body["mask_key"]) or "none"}
    return plain(_SENTENCES[kind].format_map(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A subject and the proven entries that speak of it."""

    subject: ClaimSubject
    proofs: tuple[Proof, ...]

    def entries(self, root: VerifierKey, ml_dsa: VerifierKey | None = None) -> list[dict[str, Any]]:
        """The entries, each proven to be in the log that `root` speaks for, and to be about the subject.

        :raises VerificationFailed: if one is not.
        """
        found = [proof.check(root, ml_dsa) for proof in self.proofs]
        numbers = [entry["seq"] for entry in found]
        if not found or numbers != sorted(set(numbers)):
            raise VerificationFailed("the entries are not in order", where=str(self.subject))
        for entry in found:
            about = (entry["origin"].split(".", 1)[0], entry["run"], entry["round"])
            if about != (self.subject.name, self.subject.run, self.subject.round):
                raise VerificationFailed(f"entry {entry['seq']} is about something else", where=str(self.subject))
        return found

    def page(self, entries: list[dict[str, Any]]) -> str:
        """The whole file; `entries` are those of the proofs."""
        note = self.proofs[0].note
        head = checkpoint_of(note)
        seen = ", ".join(f"{line.name} {when(line.time)}" for line in note.signatures if line.time) or "nobody"
        sentences = [
            f"entry {entry['seq']:<6} {when(entry['ts'] / 1000)}  {words}"
            for entry in entries
            if (words := sentence(entry)) is not None
        ]
        return "\n".join(
            [
                HEADING,
                str(self.subject),
                "",
                *sentences,
                "",
                f"Each line is an entry of the privacy log {head.origin}, under its checkpoint of {head.size} entries.",
                f"Cosignatures on that checkpoint: {seen}.",
                "This page does not show that there was nothing else. Only the whole log does: privacy-audit verify.",
                "To check this page: privacy-audit check-proof FILE --manifest manifest.json --root-key root.pem",
                "",
                _BEGIN,
                *_wrapped(self._proof()),
                _END,
                "",
            ]
        )

    def _proof(self) -> str:
        first = self.proofs[0]
        value = {
            "endorsements": [note.encode().decode() for note in first.endorsements],
            "entries": [
                {"index": proof.index, "line": proof.line.decode(), "path": [_b64(step) for step in proof.path]}
                for proof in self.proofs
            ],
            "head": first.note.encode().decode(),
        }
        return _b64(encoding.dumps(value))

    @classmethod
    def parse(cls, data: bytes) -> Claim:
        """Read the subject and the proofs of a page; `check` compares the words."""
        try:
            text = data.decode()
            heading, subject, *_ = text.split("\n", 2)
            _, _, rest = text.partition(f"\n{_BEGIN}\n")
            value = encoding.loads(base64.b64decode(rest.partition(f"\n{_END}")[0].replace("\n", ""), validate=True))
            note = Note.parse(value["head"].encode())
            endorsements = tuple(Note.parse(one.encode()) for one in value["endorsements"])
            proofs = tuple(
                Proof(
                    line=one["line"].encode(),
                    index=int(one["index"]),
                    path=tuple(base64.b64decode(step, validate=True) for step in one["path"][: MAX_PATH + 1]),
                    note=note,
                    endorsements=endorsements,
                )
                for one in value["entries"]
            )
            if heading != HEADING or not proofs:
                raise CodecError("not a claim")
            return cls(subject=ClaimSubject.parse(subject), proofs=proofs)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise CodecError("not a claim") from error

    @classmethod
    def check(cls, data: bytes, roster: Roster) -> Claim:
        """Read a page, prove its entries, and write it again: it must be the same.

        :raises VerificationFailed: if a proof fails or a word differs.
        """
        claim = cls.parse(data)
        origin = checkpoint_of(claim.proofs[0].note).origin
        party = roster.by_origin.get(origin)
        if party is None or party.name != claim.subject.name or party.role != claim.subject.role:
            raise VerificationFailed("the manifest knows no such party with this log", where=str(claim.subject))
        if claim.page(claim.entries(party.root, party.ml_dsa)).encode() != data:
            raise VerificationFailed("the page says something else than its entries", where=str(claim.subject))
        return claim

    def unknown_signers(self, roster: Roster) -> list[str]:
        """Names on the page that the manifest does not know: anybody can write a signature line."""
        proof = self.proofs[0]
        origin = checkpoint_of(proof.note).origin
        party = roster.by_origin[origin]
        chain = EpochChain.verify(origin, party.root, proof.endorsements)
        second = () if party.ml_dsa is None else (party.ml_dsa,)
        return [line.name for line in proof.note.unknown((*chain.keys, *second, *roster.cosigners_for(origin)))]


def make_claim(path: Path, subject: ClaimSubject) -> Claim:
    """All entries of a log that have a sentence about the subject, proven under the newest witnessed checkpoint."""
    about = [record for record in LogReader(path).records() if record.round == subject.round]
    runs = sorted({record.run or "" for record in about if subject.run in (None, record.run)})
    if not runs:
        raise ConfigError("the log has no entry about this", where=str(subject))
    if len(runs) > 1:
        hint = f"add one of: {', '.join(f'run {run}' for run in runs)}"
        raise ConfigError("the log has this round in several runs", where=str(subject), hint=hint)
    chosen = ClaimSubject(role=subject.role, name=subject.name, round=subject.round, run=runs[0] or None)
    mentioned = [
        record.seq
        for record in about
        if (record.run or "") == runs[0] and sentence({"body": record.body, "type": record.type}) is not None
    ]
    if not mentioned:
        raise ConfigError("the log has no entry about this that a page mentions", where=str(subject))
    return Claim(subject=chosen, proofs=prove_all(path, mentioned))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _wrapped(text: str) -> list[str]:
    return [text[at : at + _WIDTH] for at in range(0, len(text), _WIDTH)]


# The command.


@click.command(short_help="Write one page about SUBJECT, with proofs.")
@click.argument("subject")
@logs
@root_key
@click.option("-o", "--output", type=TARGET, help="Default: standard output.")
def claim(subject: str, logs: Sequence[Path], root_key: Path | None, output: Path | None) -> None:
    """One page about SUBJECT, such as "site graz, round 3", with proofs that `check-proof` checks."""
    about = ClaimSubject.parse(subject)
    found = [path for path in logs if origin_of(path).split(".", 1)[0] == about.name]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} of the logs given are of {about.name}", where=subject[:80])
    verified = _sound(found[0], keys_of(logs, root_key)[found[0]])
    if verified.role != about.role:
        raise ConfigError(f"{about.name} is a {verified.role}", where=subject[:80])
    made = make_claim(found[0], about)
    party = verified.agreements.party(verified.origin)
    if party is None:
        raise ConfigError("no manifest lists this log", where=str(found[0]))
    page = made.page(made.entries(party.root, party.ml_dsa))
    if output is None:
        click.echo(page, nl=False)
    else:
        output.write_text(page, encoding="utf-8")
        click.echo(f"{output}: {made.subject}, {len(made.proofs)} entries with their proofs")


def _sound(path: Path, keys: Keys) -> Verified:
    """A log that has no finding; nothing is said from another one."""
    result = verify(path, keys)
    wrong = [finding.code for finding in result.findings if finding.unreliable]
    if wrong:
        raise VerificationFailed(
            f"this log fails verification ({', '.join(wrong[:3])}), so nothing is said from it",
            where=str(path),
            hint="`privacy-audit verify` lists what is wrong",
        )
    return result
