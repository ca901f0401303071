"""Logs against those of an auditor's last visit, and witnesses without a log: a regulator, an ethics board.

The auditor keeps the newest head of each log in a folder of its own; a witness signs it too. What was remembered only
goes forward, and only while nothing is wrong with the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click

from lazaret import files
from lazaret.errors import CodecError, ConfigError, ToolkitError
from security.audit import text
from security.audit.agreement import Keys, keys_of
from security.audit.checkpoints import VerifiedCheckpoint, verify_held
from security.audit.cli import FILE, TARGET, as_json, emit, finish, logs, root_key
from security.audit.compare import forks
from security.audit.findings import Finding, Findings, exit_code
from security.audit.safe_files import read_capped
from security.audit.verify import Verified, origin_of, verify
from security.clock import SystemClock
from security.identity import keystore
from security.log.note import KeyType, Note, NoteSigner, VerifierKey
from security.log.store import LogFolder
from security.log.witness import HeldCheckpoint
from security.rng import SystemRandomness


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one visit found: the log, and the sizes of the heads remembered before and after it."""

    log: Verified
    findings: tuple[Finding, ...]
    before: int
    after: int

    def to_json(self) -> dict[str, Any]:
        found = [finding.to_json() for finding in self.findings]
        return {"origin": self.log.origin, "before": self.before, "remembered": self.after, "findings": found}


HELD_BYTES: Final = 1 << 20
FOLDER: Final = click.Path(file_okay=False, path_type=Path)


@click.command(short_help="Compare logs with those of your last visit.")
@logs
@root_key
@click.option("--store", type=FOLDER, required=True, help="Your own folder of remembered heads.")
@click.option("--evidence", type=FOLDER, help="Write proofs of forks here.")
@as_json
def remember(logs: Sequence[Path], root_key: Path | None, store: Path, evidence: Path | None, as_json: bool) -> None:
    """Compare each log with the head you saw at your last visit, and keep the newest one for the next."""
    visits = [_visit(path, keys, store, evidence) for path, keys in keys_of(logs, root_key).items()]
    everything = [finding for visit in visits for finding in visit.findings]
    code = exit_code(everything)
    if as_json:
        shown = [visit.to_json() for visit in visits]
        emit({"verdict": text.VERDICTS[code], **text.verdicts_json(everything), "logs": shown})
        finish(code, quiet=True)
    for visit in visits:
        last = f"last time it had {visit.before:,}" if visit.before else "seen for the first time"
        words = f"{visit.log.origin}   {visit.log.size:,} entries, {last}; remembered: {visit.after:,}"
        click.echo(text.plain(words))
        for line in text.finding_lines(visit.findings):
            click.echo(line)
    for line in text.verdict_lines(everything, [visit.log for visit in visits]):
        click.echo(line)
    finish(code)


def _visit(
    path: Path, keys: Keys, store: Path, evidence: Path | None, signer: NoteSigner | None = None
) -> Visit:
    """Verify one log against the remembered head. The store changes only if nothing is wrong, and only forward.

    :param signer: of a witness, which signs what it remembers.
    """
    origin = origin_of(path)
    file = store / f"{quote(origin, safe='')}.json"
    remembered, extra = _remembered(file), Findings(origin)
    held = [remembered] if remembered else []
    before = remembered.checkpoint.size if remembered else 0
    try:
        for one in held:
            verify_held(one, keys.agreements, origin)
    except ToolkitError:
        extra.add("KeysReplaced", f"the remembered head of {before} entries is not under a key that is listed now")
        held = []
    result = verify(path, keys, held)
    findings, newest = (*extra.listed(), *result.findings), result.checkpoints.newest
    if evidence is not None:
        for number, fork in enumerate(forks(result, held)):
            files.write_atomically(evidence / f"fork-{quote(origin, safe='')}-{number}.json", fork.encode())
    after = before
    if not any(finding.unreliable for finding in findings) and newest is not None and newest.checkpoint.size >= before:
        note = newest.note if signer is None else _cosigned(newest, signer)
        kept = HeldCheckpoint(note=note, endorsements=tuple(LogFolder(path).endorsements()))
        files.write_atomically(file, kept.encode(), mode=0o600)
        after = newest.checkpoint.size
    return Visit(log=result, findings=findings, before=before, after=after)


def _cosigned(newest: VerifiedCheckpoint, signer: NoteSigner) -> Note:
    """The log's own signatures, which were checked, and this witness's."""
    own = tuple(line for line in newest.note.signatures if line.name == newest.checkpoint.origin)
    return Note(
        text=newest.note.text, signatures=(*own, signer.cosign(newest.note.text, SystemClock().now_ms() // 1000))
    )


def _remembered(file: Path) -> HeldCheckpoint | None:
    try:
        return HeldCheckpoint.parse(read_capped(file, HELD_BYTES))
    except FileNotFoundError:
        return None
    except CodecError as error:
        hint = "restore it from your own backup: without it, this visit would compare nothing"
        raise ConfigError("a remembered head cannot be read", where=str(file), hint=hint) from error


# Witnesses without a log: a regulator, an ethics board


@click.command("witness-key", short_help="Make the key of a witness NAME.")
@click.argument("name")
@click.option("--federation", required=True, help="The federation's name, as its logs have it.")
@click.option("-o", "--output", type=TARGET, required=True, help="The private key; never overwritten.")
def witness_key(name: str, federation: str, output: Path) -> None:
    """Make the key of a witness NAME, and print the line for the consortium's plan."""
    seed = SystemRandomness().bytes(32)
    try:
        signer = NoteSigner.from_seed(f"{name}.{federation}/witness", seed, KeyType.COSIGNER)
    except CodecError as error:
        raise ConfigError("not a name for a key", where=name[:80], hint="letters, digits, dots, hyphens") from error
    keystore.save_secret(output, seed)
    click.echo(f"{output}: keep it secret. For the consortium's federation.toml, [audit]:", err=True)
    click.echo(f'witnesses = ["{signer.key}"]')


@click.command(short_help="Sign that you saw the newest head of each log.")
@logs
@root_key
@click.option("--key", "key_file", type=FILE, required=True, help="Your private key, as `witness-key` wrote it.")
@click.option("--store", type=FOLDER, required=True, help="Your own folder of cosigned heads.")
def cosign(logs: Sequence[Path], root_key: Path | None, key_file: Path, store: Path) -> None:
    """Sign that you saw the newest head of each log, and that it extends the one you saw before."""
    everything: list[Finding] = []
    for path, keys in keys_of(logs, root_key).items():
        signer = _witness_of(key_file, keys.agreements.cosigners_for(origin_of(path)))
        visit = _visit(path, keys, store, None, signer)
        everything += visit.findings
        refused = any(finding.unreliable for finding in visit.findings)
        outcome = "not cosigned" if refused else f"head {visit.after:,} cosigned as {signer.key.name}"
        click.echo(text.plain(f"{visit.log.origin}   {visit.log.size:,} entries: {outcome}"))
        for line in text.finding_lines(visit.findings):
            click.echo(line)
    finish(exit_code(everything))


def _witness_of(key_file: Path, known: Sequence[VerifierKey]) -> NoteSigner:
    """The key under the name that the manifest has for it."""
    seed = keystore.load_secret(key_file)
    for key in known:
        signer = NoteSigner.from_seed(key.name, seed, KeyType.COSIGNER)
        if signer.key == key:
            return signer
    hint = "ask the consortium to add the line that `witness-key` printed to [audit] witnesses, and for a newer copy"
    raise ConfigError("no manifest in this log lists this key as a witness", where=str(key_file), hint=hint)
