"""The commands of `privacy-audit` that say what is in logs, and whether it is as it should be."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import click

from lazaret.errors import CodecError, ConfigError, VerificationFailed
from security.audit import text
from security.audit.agreement import keys_for, keys_of, read_root
from security.audit.checkpoints import believed
from security.audit.cli import FILE, LOG, TARGET, as_json, emit, finish, logs, lost, one_log, root_key
from security.audit.compare import Comparison
from security.audit.compare import cross as cross_logs
from security.audit.epsilon import EpsilonStatement, replay
from security.audit.facts import read_history
from security.audit.findings import Finding, Findings, Severity, exit_code
from security.audit.proof import PROOF_BYTES, check_file
from security.audit.proof import prove as prove_entry
from security.audit.report import render, report_json
from security.audit.safe_files import read_capped
from security.audit.text import plain, quantity
from security.audit.verify import Verified, origin_of
from security.audit.verify import verify as verify_log
from security.clock import SystemClock
from security.identity.pki import fingerprint
from security.log.witness import HeldCheckpoint


def _with_privacy(log: Verified) -> tuple[tuple[Finding, ...], EpsilonStatement | None]:
    """A log's findings with those of its privacy accounting; the accountant is imported only where there is one."""
    if not log.types.get("dp.reserved") and not log.types.get("dp.committed"):
        return log.findings, None
    findings = Findings(log.origin)
    party = log.agreements.party(log.origin)
    name = party.name if party else log.origin
    history = read_history(log.folder, origin=log.origin, name=name, role=log.role)
    statement = replay(history, findings, log.rules_at)
    return (*log.findings, *findings.listed()), statement


def _held_file(path: Path) -> HeldCheckpoint:
    return HeldCheckpoint.parse(path.read_bytes())


@click.command(short_help="Check each log by itself.")
@logs
@root_key
@click.option("--held", multiple=True, type=FILE, help="A checkpoint of the log that a witness holds (witness/*.json).")
@as_json
def verify(logs: Sequence[Path], root_key: Path | None, held: Sequence[Path], as_json: bool) -> None:
    """Check each log by itself: entries, tree, signatures, epochs, witnesses, lengths, masks, epsilon."""
    given = [_held_file(path) for path in held]
    everything: list[Finding] = []
    shown, results = [], []
    for path, keys in keys_of(logs, root_key).items():
        origin = origin_of(path)
        result = verify_log(path, keys, [one for one in given if believed(one, keys, origin)])
        results.append(result)
        findings, statement = _with_privacy(result)
        everything.extend(findings)
        shown.append(text.log_json(result, findings, statement))
        if not as_json:
            for line in text.log_lines(result, findings, statement):
                click.echo(line)
    code = exit_code(everything)
    if as_json:
        emit({"verdict": text.VERDICTS[code], **text.verdicts_json(everything), "logs": shown})
    else:
        for line in text.verdict_lines(everything, results):
            click.echo(line)
    finish(code, quiet=as_json)


def _crossed(
    paths: Sequence[Path], root_key: Path | None, lost: Sequence[str], *, second_opinion: bool = False
) -> Comparison:
    return cross_logs(paths, keys_of(paths, root_key), second_opinion=second_opinion, lost=lost)


@click.command(short_help="Check logs against each other.")
@logs
@root_key
@lost
@click.option("--evidence", type=click.Path(file_okay=False, path_type=Path), help="Write proofs of forks here.")
@as_json
def cross(
    logs: Sequence[Path], root_key: Path | None, lost: Sequence[str], evidence: Path | None, as_json: bool
) -> None:
    """Check logs against each other: every message at both ends, one model, one cohort, one history."""
    result = _crossed(logs, root_key, lost)
    statements = {statement.site: statement for statement in result.statements}
    by_log = {
        log.origin: (log, statements.get(history.name))
        for log, history in result.pairs
    }
    if evidence is not None and result.forks:
        evidence.mkdir(parents=True, exist_ok=True)
        for number, fork in enumerate(result.forks):
            (evidence / f"fork-{number}.json").write_bytes(fork.encode())
    if as_json:
        emit(
            {
                "verdict": text.VERDICTS[result.exit_code],
                **text.verdicts_json(result.findings),
                "matched_messages": result.matched,
                "fitting_receipts": result.receipts,
                "logs": [text.log_json(log, log.findings, found) for log, found in by_log.values()],
                "between": [finding.to_json() for finding in result.joint],
            }
        )
        finish(result.exit_code, quiet=True)
    for log, statement in by_log.values():
        own = tuple(finding for finding in result.joint if finding.log == log.origin)
        for line in text.log_lines(log, (*log.findings, *own), statement):
            click.echo(line)
    between = tuple(finding for finding in result.joint if finding.log not in by_log)
    click.echo("between the logs")
    if text.clean(between, text.MATCHING):
        click.echo(f"ok    {result.matched:,} messages match at both ends: same bytes, same length, same type")
        click.echo(f"ok    {result.receipts:,} receipts of the coordinator lead to its log as it is here")
    if text.clean(between, text.AGREEMENT):
        click.echo("ok    all saw the same models, cohorts and survivors; no mask was opened twice")
    for line in text.finding_lines(sorted(between, key=lambda item: item.severity is Severity.NOTE)):
        click.echo(line)
    for line in text.verdict_lines(result.findings, result.logs):
        click.echo(line)
    finish(result.exit_code)


# The documents say that logs are compared; `cross` stays, because scripts have it.
compare = copy(cross)
compare.name = "compare"


@click.command(short_help="Add up what left.")
@one_log
@click.option("--by", type=click.Choice(["round", "class", "message"]), default="class", show_default=True)
@as_json
def egress(log: Path, by: str, as_json: bool) -> None:
    """What left, added up by round, data class or message type."""
    history = read_history(log, origin="", name="", role="")
    totals: dict[str, list[int]] = {}
    for record in history.of("egress"):
        name = {
            "round": f"{record.run or '-'} " + ("between rounds" if record.round is None else f"round {record.round}"),
            "class": record.body["data_class"],
            "message": record.body["message"],
        }[by]
        total = totals.setdefault(name, [0, 0, 0])
        total[0] += 1
        total[1] += record.body["bytes"]
        total[2] += record.body["bytes"] - record.body["expected_bytes"]
    rows: list[dict[str, Any]] = [
        {by: name, "messages": count, "bytes": size, "surplus": surplus}
        for name, (count, size, surplus) in totals.items()
    ]
    if as_json:
        emit({"by": by, "rows": rows, "blocked": len(list(history.of("egress.blocked")))})
        return
    for row in rows:
        click.echo(
            f"{row[by]:<28} {row['messages']:>8,} messages {quantity(row['bytes']):>10}  {row['surplus']} surplus"
        )
    click.echo(f"blocked by the egress filter: {len(list(history.of('egress.blocked')))}")


@click.command(short_help="Recompute what privacy was spent.")
@one_log
@click.option("--recompute", is_flag=True, help="Also give the tighter PLD figure as a second opinion.")
@as_json
def epsilon(log: Path, recompute: bool, as_json: bool) -> None:
    """What privacy was spent, recomputed from the recorded mechanisms."""
    findings = Findings(log.name)
    statement = replay(
        read_history(log, origin=log.name, name=log.name, role="site"), findings, second_opinion=recompute
    )
    code = exit_code(findings.listed())
    if as_json:
        found = [finding.to_json() for finding in findings.listed()]
        emit({"epsilon": text.statement_json(statement), "findings": found})
        finish(code, quiet=True)
    if statement is None:
        click.echo("no differential privacy is claimed in this log")
    else:
        for item in statement.series:
            click.echo(f"{item.run} round {item.round}: written {item.written:.4f}, recomputed {item.recomputed:.4f}")
        click.echo(text.epsilon_line(statement))
        click.echo(
            f"second opinions: best order {statement.best_rdp:.3f}"
            + (f", PLD {statement.pld:.3f}" if statement.pld is not None else "")
        )
    for line in text.finding_lines(findings.listed()):
        click.echo(line)
    finish(code)


@click.command()
@one_log
@root_key
@as_json
def heads(log: Path, root_key: Path | None, as_json: bool) -> None:
    """Show who cosigned which checkpoint, and when."""
    result = verify_log(log, keys_for(log, root_key))
    rows: list[dict[str, Any]] = [
        {
            "size": one.checkpoint.size,
            "root": one.checkpoint.root.hex(),
            "epochs": list(one.epochs),
            "cosigners": {key.name: time for key, time in sorted(one.cosigners.items(), key=lambda item: item[1])},
        }
        for one in result.checkpoints.signed
    ]
    if as_json:
        emit({"origin": result.origin, "heads": rows})
        finish(result.exit_code, quiet=True)
    click.echo(text.plain(f"{result.origin}: {text.witness_names(result)}"))
    for row in rows:
        seen = ", ".join(f"{name} {text.when(time)}" for name, time in row["cosigners"].items()) or "-"
        click.echo(f"{row['size']:>10,}  {row['root'][:16]}  epoch {'+'.join(map(str, row['epochs']))}  {seen}")
    for line in text.finding_lines(result.findings):
        click.echo(line)
    finish(result.exit_code)


@click.command()
@one_log
@click.option("--seq", type=click.IntRange(min=0), required=True, help="The number of the entry.")
@click.option("-o", "--output", type=TARGET, required=True)
def prove(log: Path, seq: int, output: Path) -> None:
    """Write one entry with the proof that it is in the log."""
    proof = prove_entry(log, seq)
    output.write_bytes(proof.encode())
    click.echo(f"{output}: entry {seq}, {len(proof.path)} hashes to a signed head")


@click.command("check-proof", short_help="Check a proof without the log.")
@click.argument("proof", type=FILE)
@click.option("--manifest", type=FILE, help="A copy of the signed manifest: who holds which key.")
@root_key
@as_json
def check_proof(proof: Path, manifest: Path | None, root_key: Path | None, as_json: bool) -> None:
    """Check a proof of an entry, of a fork or of a wrong sum, without the log.

    Exit codes: 0 proven, 1 false, 2 not readable as a proof, 3 cannot decide because the keys are not known.
    """
    try:
        found = check_file(read_capped(proof, PROOF_BYTES), manifest, root_key)
    except CodecError as error:
        raise ConfigError(f"this is no proof: {error.message}", where=str(proof)) from error
    except VerificationFailed as error:
        if as_json:
            emit({"proven": False, "detail": plain(error.message)})
        else:
            click.echo(plain(f"FALSE {error.message}; this file is no evidence"))
        sys.exit(1)
    if found.proves is None:
        click.echo(plain(f"????  {found.detail}; give --manifest"), err=True)
        sys.exit(3)
    if as_json:
        verdict = {"proven": True, "proves": found.proves, "detail": found.detail, "pinned": root_key is not None}
        emit({**verdict, **found.facts})
        return
    click.echo(plain(f"ok    {found.proves}: {found.detail}; this file proves it"))
    for line in found.lines:
        click.echo(plain(f"      {line}"))
    if root_key is None:
        click.echo("note  keys taken from the manifest as given; pin them with --root-key")


@click.command(short_help="Write one page: what was checked and found.")
@logs
@root_key
@lost
@click.option("-o", "--output", type=TARGET, required=True, help=".html or .json")
def report(logs: Sequence[Path], root_key: Path | None, lost: Sequence[str], output: Path) -> None:
    """One self-contained page (or JSON) that says what was checked, what was found, and how to repeat it."""
    if output.suffix not in (".html", ".json"):
        raise ConfigError("a report is .html or .json", where=str(output))
    result = _crossed(logs, root_key, lost, second_opinion=True)
    if output.suffix == ".json":
        output.write_text(json.dumps(report_json(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        root = read_root(root_key)
        page = render(
            result,
            pinned=root is not None,
            root=fingerprint(root) if root is not None else None,
            checked_ms=SystemClock().now_ms(),
        )
        output.write_text(page, encoding="utf-8")
    click.echo(f"{output}: {text.VERDICTS[result.exit_code]}")
    sys.exit(result.exit_code)


@click.command(short_help="Measure what logging and verifying cost.")
@click.option("--entries", default=1_000_000, show_default=True, type=click.IntRange(min=1000))
@click.option("--appends", default=300, show_default=True, type=click.IntRange(min=20))
@click.option("--logs", default=0, type=click.IntRange(min=0), help="Compare so many logs (at least 4) instead.")
@click.option("--folder", type=LOG, help="Where to work; default: the system's temporary folder.")
@as_json
def bench(entries: int, appends: int, logs: int, folder: Path | None, as_json: bool) -> None:
    """Measure what logging and verifying cost on this machine."""
    from security.audit.bench import bench as run

    if 0 < logs < 4:
        raise ConfigError("three hospitals and a coordinator are the fewest", where="--logs")
    with click.progressbar(length=entries * max(logs, 1), label="writing logs", file=sys.stderr) as bar:
        figures = run(entries, appends, folder, lambda size: bar.update(size - bar.pos), logs=logs)
    if as_json:
        emit(figures)
        return
    for name, value in figures.items():
        click.echo(f"{name:<24} {value}")
