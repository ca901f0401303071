"""Into the tools that auditors use: export, forward, claim, timestamp, remember, cosign, draft."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import click

from lazaret.errors import CodecError, ConfigError, ToolkitError, VerificationFailed
from security.audit.options import FILE, TARGET, as_json, emit, finish, logs, one_log, root_key

if TYPE_CHECKING:
    from security.audit.agreement import Keys
    from security.audit.checkpoints import VerifiedCheckpoint
    from security.audit.facts import LogHistory
    from security.audit.findings import Finding
    from security.audit.verify import Verified
    from security.log.note import Note, NoteSigner, VerifierKey
    from security.log.witness import HeldCheckpoint

HELD_BYTES: Final = 1 << 20
FORMATS: Final = ("csv", "jsonl", "ocsf", "tiles")


@click.command(short_help="Write what left as a table, or a whole log.")
@logs
@click.option("--format", "form", type=click.Choice(FORMATS), default="csv", show_default=True)
@click.option("--no-entries", is_flag=True, help="Of a published log (tiles) only the tree, without the entries.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: standard output. With tiles a folder.")
def export(logs: Sequence[Path], form: str, no_entries: bool, output: Path | None) -> None:
    """What left each site by run, round and class of data, for a spreadsheet or a log collector; or one whole log as
    static files that anybody can follow (C2SP tlog-tiles).
    """
    if form == "tiles":
        _publish(logs, output, entries=not no_entries)
        return
    if no_entries:
        raise ConfigError("only a published log has a choice of entries", where="--no-entries", hint="--format tiles")
    if output is not None and output.is_dir():
        raise ConfigError("this is a folder", where=str(output), hint="name a file")
    import csv
    import io

    from lazaret import software
    from security.audit.facts import CSV_COLUMNS, egress_rows, ocsf_events

    histories, out = _histories(logs), io.StringIO()
    rows = list(ocsf_events(histories, software.version())) if form == "ocsf" else egress_rows(histories)
    if form == "csv":
        writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        out.writelines(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    if output is None:
        click.echo(out.getvalue(), nl=False)
    else:
        output.write_text(out.getvalue(), encoding="utf-8")
        click.echo(f"{output}: {len(rows)} {'events' if form == 'ocsf' else 'rows'}")


def _publish(logs: Sequence[Path], output: Path | None, *, entries: bool) -> None:
    from security.audit.tiles import publish

    if output is None or len(logs) != 1:
        raise ConfigError("one log is published into one folder", where="--format tiles", hint="LOG -o FOLDER")
    if output.resolve().is_relative_to(logs[0].resolve()) or output.is_file():
        raise ConfigError("not a folder outside of the log", where=str(output))
    done = publish(logs[0], output, entries=entries)
    click.echo(f"{output}: {done.size} entries are published, {done.added} files are new")


def _histories(paths: Sequence[Path]) -> list[LogHistory]:
    from security.audit.facts import read_history
    from security.audit.text import plain
    from security.audit.verify import origin_of

    names = [(path, origin_of(path)) for path in paths]
    return [read_history(path, origin=origin, name=plain(origin.split(".", 1)[0]), role="") for path, origin in names]


# Forwarding


@click.command(short_help="Send the entries of a log to a collector.")
@one_log
@click.option("--to", metavar="HOST:PORT", help="The collector: syslog over TLS (RFC 5425), usually port 6514.")
@click.option("--ca", type=FILE, help="Root certificates that the collector's certificate must be from (PEM).")
@click.option("--name", help="The name in the collector's certificate; default: HOST.")
@click.option("--certificate", type=FILE, help="A certificate of your own, where the collector asks for one (PEM).")
@click.option("--key", type=FILE, help="Its private key (PEM).")
@click.option("--position", type=TARGET, help="Where to note how far the log was sent; never inside the log folder.")
@click.option("--once", is_flag=True, help="Send what is there and stop; default: follow the log until terminated.")
@click.option("--lenient", is_flag=True, help="Accept a closed connection as confirmation, without close_notify.")
@click.option("--compare", type=FILE, help="Send nothing; compare this file of the collector with the log.")
def forward(
    log: Path,
    to: str | None,
    ca: Path | None,
    name: str | None,
    certificate: Path | None,
    key: Path | None,
    position: Path | None,
    once: bool,
    lenient: bool,
    compare: Path | None,
) -> None:
    """Send the entries of a log to a log collector, and go on while the party writes. Reads the log only."""
    from security.audit import forward as forwarding

    if compare is not None:
        _compare_collected(log, compare, position)
    if to is None or ca is None or position is None:
        raise ConfigError("--to, --ca and --position are needed", where="privacy-audit forward")
    host, _, port = to.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError("not HOST:PORT", where=f"--to {to}", hint="such as logs.example.org:6514")
    if position.resolve().is_relative_to(log.resolve()):
        raise ConfigError("the position cannot be inside the log folder", where=str(position))
    context = forwarding.tls_context(ca, certificate, key)
    collector = forwarding.TlsCollector(host.strip("[]"), int(port), name or host.strip("[]"), context, lenient=lenient)
    with forwarding.only_one(position):
        forwarder = forwarding.Forwarder(log, position, collector.deliver)
        forwarding.follow(forwarder, _until_stopped(), lambda text: click.echo(text, err=True), once=once)
    click.echo(f"{forwarder.size} entries of {log} are at {to}")


def _until_stopped() -> Callable[[float], bool]:
    """Waits so many seconds; true when the process was asked to end. A batch under way is finished first."""
    import signal
    import threading

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    return stopped.wait


def _compare_collected(log: Path, collected: Path, position: Path | None) -> None:
    from security.audit import text
    from security.audit.findings import Findings, exit_code
    from security.audit.forward import Position, compare
    from security.audit.verify import origin_of

    findings = Findings(origin_of(log))
    noted = Position.read(position) if position is not None else None
    counts = compare(log, collected, findings, noted.size if noted else 0)
    click.echo(
        text.plain(
            f"{findings.log}: {counts['entries']:,} of {counts['log']:,} entries are at the collector, "
            f"{counts['missing']:,} are missing in between, {counts['repeated']:,} came more than once"
        )
    )
    for line in text.finding_lines(findings.listed()):
        click.echo(line)
    finish(exit_code(findings.listed()))


# Claims


@click.command(short_help="Write one page about SUBJECT, with proofs.")
@click.argument("subject")
@logs
@root_key
@click.option("-o", "--output", type=TARGET, help="Default: standard output.")
def claim(subject: str, logs: Sequence[Path], root_key: Path | None, output: Path | None) -> None:
    """One page about SUBJECT, such as "site graz, round 3", with proofs that `check-proof` checks."""
    from security.audit.agreement import keys_of
    from security.audit.claim import ClaimSubject, make_claim
    from security.audit.verify import origin_of

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
    from security.audit.verify import verify

    result = verify(path, keys)
    wrong = [finding.code for finding in result.findings if _unreliable(finding)]
    if wrong:
        raise VerificationFailed(
            f"this log fails verification ({', '.join(wrong[:3])}), so nothing is said from it",
            where=str(path),
            hint="`privacy-audit verify` lists what is wrong",
        )
    return result


def _unreliable(finding: Finding) -> bool:
    """Whether nothing is built on a log with this finding: it is wrong, or a forger may have made it."""
    from security.audit.findings import Severity

    return finding.severity is Severity.FAIL or finding.code == "OneSignature"


# What an auditor remembers


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


FOLDER: Final = click.Path(file_okay=False, path_type=Path)


@click.command(short_help="Compare logs with those of your last visit.")
@logs
@root_key
@click.option("--store", type=FOLDER, required=True, help="Your own folder of remembered heads.")
@click.option("--evidence", type=FOLDER, help="Write proofs of forks here.")
@as_json
def remember(logs: Sequence[Path], root_key: Path | None, store: Path, evidence: Path | None, as_json: bool) -> None:
    """Compare each log with the head you saw at your last visit, and keep the newest one for the next."""
    from security.audit import text
    from security.audit.agreement import keys_of
    from security.audit.findings import exit_code

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
    from lazaret import files
    from security.audit.checkpoints import verify_held
    from security.audit.compare import forks
    from security.audit.findings import Findings
    from security.audit.verify import origin_of, verify
    from security.log.store import LogFolder
    from security.log.witness import HeldCheckpoint

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
    if not any(map(_unreliable, findings)) and newest is not None and newest.checkpoint.size >= before:
        note = newest.note if signer is None else _cosigned(newest, signer)
        kept = HeldCheckpoint(note=note, endorsements=tuple(LogFolder(path).endorsements()))
        files.write_atomically(file, kept.encode(), mode=0o600)
        after = newest.checkpoint.size
    return Visit(log=result, findings=findings, before=before, after=after)


def _cosigned(newest: VerifiedCheckpoint, signer: NoteSigner) -> Note:
    """The log's own signatures, which were checked, and this witness's."""
    from security.clock import SystemClock
    from security.log.note import Note

    own = tuple(line for line in newest.note.signatures if line.name == newest.checkpoint.origin)
    return Note(
        text=newest.note.text, signatures=(*own, signer.cosign(newest.note.text, SystemClock().now_ms() // 1000))
    )


def _remembered(file: Path) -> HeldCheckpoint | None:
    from security.audit.safe_files import read_capped
    from security.log.witness import HeldCheckpoint

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
    from security.identity import keystore
    from security.log.note import KeyType, NoteSigner
    from security.rng import SystemRandomness

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
    from security.audit import text
    from security.audit.agreement import keys_of
    from security.audit.findings import exit_code
    from security.audit.verify import origin_of

    everything: list[Finding] = []
    for path, keys in keys_of(logs, root_key).items():
        signer = _witness_of(key_file, keys.agreements.cosigners_for(origin_of(path)))
        visit = _visit(path, keys, store, None, signer)
        everything += visit.findings
        refused = any(map(_unreliable, visit.findings))
        outcome = "not cosigned" if refused else f"head {visit.after:,} cosigned as {signer.key.name}"
        click.echo(text.plain(f"{visit.log.origin}   {visit.log.size:,} entries: {outcome}"))
        for line in text.finding_lines(visit.findings):
            click.echo(line)
    finish(exit_code(everything))


def _witness_of(key_file: Path, known: Sequence[VerifierKey]) -> NoteSigner:
    """The key under the name that the manifest has for it."""
    from security.identity import keystore
    from security.log.note import KeyType, NoteSigner

    seed = keystore.load_secret(key_file)
    for key in known:
        signer = NoteSigner.from_seed(key.name, seed, KeyType.COSIGNER)
        if signer.key == key:
            return signer
    hint = "ask the consortium to add the line that `witness-key` printed to [audit] witnesses, and for a newer copy"
    raise ConfigError("no manifest in this log lists this key as a witness", where=str(key_file), hint=hint)


# Documents


@click.command(short_help="Draft a document for authorities from logs.")
@logs
@root_key
@click.option("--document", type=click.Choice(["record", "dpia", "technical"]), required=True, help="Which document.")
@click.option("-o", "--output", type=TARGET, required=True, help="The draft, as a page (.html).")
def draft(logs: Sequence[Path], root_key: Path | None, document: str, output: Path) -> None:
    """Draft a document from logs: record of processing, impact assessment (dpia) or technical documentation."""
    from security.audit import drafts
    from security.audit.agreement import keys_of
    from security.audit.compare import cross
    from security.clock import SystemClock

    if output.suffix != ".html":
        raise ConfigError("a draft is .html", where=str(output))
    result = cross(logs, keys_of(logs, root_key))
    page = drafts.draft(result, document, checked_ms=SystemClock().now_ms())
    output.write_text(page, encoding="utf-8")
    sentences, blanks = page.count("<cite>"), page.count('class="blank"')
    click.echo(f"{output}: {drafts.DOCUMENTS[document][0]}, {sentences} sentences with their entries, {blanks} blanks")


# Time stamps


@click.command(short_help="Ask for and check time stamps (RFC 3161).")
@one_log
@click.option("--request", "asked", type=TARGET, help="Write what the authority is asked about the newest checkpoint.")
@click.option("--response", type=FILE, help="The authority's answer, to be checked.")
@click.option("--ca", type=FILE, help="Root certificates of the authority (PEM).")
def timestamp(log: Path, asked: Path | None, response: Path | None, ca: Path | None) -> None:
    """Time stamps of checkpoints (RFC 3161). Nothing is sent: the files go to the authority and come back your way."""
    from lazaret import files
    from security.audit import timestamps
    from security.audit.safe_files import read_capped, refuse_hostile
    from security.audit.text import plain
    from security.log.note import checkpoint_of
    from security.log.store import LogFolder

    refuse_hostile(log)
    folder = LogFolder(log)
    notes = [folder.checkpoint_note(size) for size in reversed(folder.checkpoint_sizes())]
    if not notes:
        raise ConfigError("there is no checkpoint", where=str(log))
    if asked is not None and response is None and ca is None:
        files.write_atomically(asked, timestamps.request(notes[0].text.encode()))
        click.echo(f"{asked}: asks for a time stamp of the checkpoint of {checkpoint_of(notes[0]).size} entries")
        return
    if asked is not None or response is None or ca is None:
        raise ConfigError("give --request, or --response and --ca", where="privacy-audit timestamp")
    answer = read_capped(response, timestamps.RESPONSE_BYTES)
    note = timestamps.stamped(answer, notes)
    stamp = timestamps.check(answer, note.text.encode(), timestamps.read_roots(ca))
    size = checkpoint_of(note).size
    click.echo(f"the checkpoint of {size} entries existed at {stamp.time.isoformat()}, says {plain(stamp.authority)}")


COMMANDS: Final = (export, forward, claim, timestamp, remember, witness_key, cosign, draft)
