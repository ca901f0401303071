"""`privacy-audit`: what an auditor types. Works offline, on copies, with nothing but the consortium's root.

Exit codes: 0 clean, 1 a finding, 2 bad usage, 3 cannot decide. A finding outranks what cannot be decided.
Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lazaret.errors import CannotDecide, ConfigError, ToolkitError

if TYPE_CHECKING:
    from security.audit.compare import Crossed
    from security.audit.epsilon import EpsilonStatement
    from security.audit.findings import Finding
    from security.audit.verify import Verified

LOG = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

root_key = click.option("--root-key", type=FILE, help="The consortium's root certificate (PEM); pins every key.")
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
logs = click.argument("logs", nargs=-1, required=True, type=LOG)
one_log = click.argument("log", type=LOG)


class _Group(click.Group):
    """Turns our errors into a line, a hint and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ToolkitError as error:
            click.echo(f"privacy-audit: error: {error}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            # A copy with unreadable parts: neither good nor bad can be said.
            click.echo(f"privacy-audit: error: {error.filename}: {error.strerror}", err=True)
            ctx.exit(CannotDecide.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Check privacy logs: what left each site, that it was masked, its epsilon, and that it was not changed."""


def _emit(data: dict[str, Any]) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def _finish(code: int, *, quiet: bool = False) -> None:
    from security.audit.text import VERDICTS

    if not quiet:
        click.echo(f"verdict: {VERDICTS[code]}")
    sys.exit(code)


def _with_privacy(log: Verified) -> tuple[tuple[Finding, ...], EpsilonStatement | None]:
    """A log's findings with those of its privacy accounting; the accountant is imported only where there is one."""
    from security.audit.facts import read_history
    from security.audit.findings import Findings

    if not log.types.get("dp.reserved") and not log.types.get("dp.committed"):
        return log.findings, None
    from security.audit.epsilon import replay

    findings = Findings(log.origin)
    party = log.roster.by_origin.get(log.origin) if log.roster else None
    name = party.name if party else log.origin
    statement = replay(read_history(log.folder, origin=log.origin, name=name, role=log.role), findings)
    return (*log.findings, *findings.listed()), statement


def _held_file(path: Path) -> Any:
    from security.log.witness import HeldCheckpoint

    return HeldCheckpoint.parse(path.read_bytes())


@main.command()
@logs
@root_key
@click.option("--held", multiple=True, type=FILE, help="A checkpoint of the log that a witness holds (witness/*.json).")
@as_json
def verify(logs: Sequence[Path], root_key: Path | None, held: Sequence[Path], as_json: bool) -> None:
    """Check each log by itself: entries, tree, signatures, epochs, witnesses, lengths, masks, epsilon."""
    from security.audit import text
    from security.audit.findings import exit_code
    from security.audit.verify import keys_for
    from security.audit.verify import verify as verify_log

    given = [_held_file(path) for path in held]
    everything: list[Finding] = []
    shown = []
    for path in logs:
        result = verify_log(path, keys_for(path, root_key))
        mine = [one for one in given if one.checkpoint.origin == result.origin]
        if mine:
            result = verify_log(path, keys_for(path, root_key), mine)
        findings, statement = _with_privacy(result)
        everything.extend(findings)
        shown.append(text.log_json(result, findings, statement))
        if not as_json:
            for line in text.log_lines(result, findings, statement):
                click.echo(line)
    code = exit_code(everything)
    if as_json:
        _emit({"verdict": text.VERDICTS[code], "logs": shown})
    _finish(code, quiet=as_json)


def _crossed(paths: Sequence[Path], root_key: Path | None, *, second_opinion: bool = False) -> Crossed:
    from security.audit.compare import cross as cross_logs
    from security.audit.verify import keys_for

    return cross_logs(paths, {path: keys_for(path, root_key) for path in paths}, second_opinion=second_opinion)


@main.command()
@logs
@root_key
@click.option("--evidence", type=click.Path(file_okay=False, path_type=Path), help="Write proofs of forks here.")
@as_json
def cross(logs: Sequence[Path], root_key: Path | None, evidence: Path | None, as_json: bool) -> None:
    """Check logs against each other: every message at both ends, one model, one cohort, one history."""
    from security.audit import text
    from security.audit.findings import Severity

    result = _crossed(logs, root_key)
    statements = {statement.site: statement for statement in result.statements}
    by_log = {
        log.origin: (log, statements.get(history.name))
        for log, history in zip(result.logs, result.histories, strict=True)
    }
    if evidence is not None and result.forks:
        evidence.mkdir(parents=True, exist_ok=True)
        for number, fork in enumerate(result.forks):
            (evidence / f"fork-{number}.json").write_bytes(fork.encode())
    if as_json:
        _emit(
            {
                "verdict": text.VERDICTS[result.exit_code],
                "matched_messages": result.matched,
                "fitting_receipts": result.receipts,
                "logs": [text.log_json(log, log.findings, found) for log, found in by_log.values()],
                "between": [finding.to_json() for finding in result.joint],
            }
        )
        _finish(result.exit_code, quiet=True)
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
    _finish(result.exit_code)


# The documents say that logs are compared; `cross` stays, because scripts have it.
main.add_command(cross, "compare")


@main.command()
@one_log
@click.option("--by", type=click.Choice(["round", "class", "message"]), default="class", show_default=True)
@as_json
def egress(log: Path, by: str, as_json: bool) -> None:
    """What left, added up by round, data class or message type."""
    from security.audit.facts import read_history
    from security.audit.text import quantity

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
        _emit({"by": by, "rows": rows, "blocked": len(list(history.of("egress.blocked")))})
        return
    for row in rows:
        click.echo(
            f"{row[by]:<28} {row['messages']:>8,} messages {quantity(row['bytes']):>10}  {row['surplus']} surplus"
        )
    click.echo(f"blocked by the egress filter: {len(list(history.of('egress.blocked')))}")


@main.command()
@one_log
@click.option("--recompute", is_flag=True, help="Also give the tighter PLD figure as a second opinion.")
@as_json
def epsilon(log: Path, recompute: bool, as_json: bool) -> None:
    """What privacy was spent, recomputed from the recorded mechanisms."""
    from security.audit import text
    from security.audit.epsilon import replay
    from security.audit.facts import read_history
    from security.audit.findings import Findings, exit_code

    findings = Findings(log.name)
    statement = replay(
        read_history(log, origin=log.name, name=log.name, role="site"), findings, second_opinion=recompute
    )
    code = exit_code(findings.listed())
    if as_json:
        found = [finding.to_json() for finding in findings.listed()]
        _emit({"epsilon": text.statement_json(statement), "findings": found})
        _finish(code, quiet=True)
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
    _finish(code)


@main.command()
@one_log
@root_key
@as_json
def heads(log: Path, root_key: Path | None, as_json: bool) -> None:
    """Show who cosigned which checkpoint, and when."""
    from security.audit import text
    from security.audit.verify import keys_for
    from security.audit.verify import verify as verify_log

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
        _emit({"origin": result.origin, "heads": rows})
        _finish(result.exit_code, quiet=True)
    click.echo(text.plain(f"{result.origin}: {text.witness_names(result)}"))
    for row in rows:
        seen = ", ".join(f"{name} {text.when(time)}" for name, time in row["cosigners"].items()) or "-"
        click.echo(f"{row['size']:>10,}  {row['root'][:16]}  epoch {'+'.join(map(str, row['epochs']))}  {seen}")
    for line in text.finding_lines(result.findings):
        click.echo(line)
    _finish(result.exit_code)


@main.command()
@one_log
@click.option("--seq", type=click.IntRange(min=0), required=True, help="The number of the entry.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
def prove(log: Path, seq: int, output: Path) -> None:
    """Write one entry with the proof that it is in the log."""
    from security.audit.proof import prove as prove_entry

    proof = prove_entry(log, seq)
    output.write_bytes(proof.encode())
    click.echo(f"{output}: entry {seq}, {len(proof.path)} hashes to a signed head")


@main.command("check-proof")
@click.argument("proof", type=FILE)
@click.option("--manifest", type=FILE, help="A copy of the signed manifest: who holds which key.")
@root_key
@as_json
def check_proof(proof: Path, manifest: Path | None, root_key: Path | None, as_json: bool) -> None:
    """Check a proof of an entry, of a fork or of a wrong sum, without the log."""
    from security.audit import text
    from security.audit.proof import Proof
    from security.audit.verify import roster_from
    from security.log.note import checkpoint_of
    from security.secagg.site.results import HEADING

    content = proof.read_bytes()
    if content.startswith(b"{"):
        _check_fork(content, manifest, root_key, as_json)
    if content.startswith(HEADING):
        _check_sum(content, manifest, root_key, as_json)
    parsed = Proof.parse(content)
    origin = checkpoint_of(parsed.note).origin
    if manifest is None:
        click.echo(text.plain(f"????  {origin}: whose key signed this is not known; give --manifest"), err=True)
        sys.exit(3)
    roster = roster_from(manifest, root_key)
    if origin not in roster.by_origin:
        raise ConfigError("the manifest knows no log of this name", where=text.plain(origin))
    entry = parsed.check(roster.by_origin[origin].root)
    witnesses = parsed.witnesses(roster)
    if as_json:
        _emit({"origin": origin, "entry": entry, "witnesses": witnesses, "pinned": root_key is not None})
        return
    click.echo(
        text.plain(f"ok    entry {entry['seq']} of {origin}: {entry['type']} at {text.when(entry['ts'] / 1000)}")
    )
    seen = ", ".join(f"{name} {text.when(time)}" for name, time in sorted(witnesses.items()))
    click.echo(text.plain(f"      head {checkpoint_of(parsed.note).size}, cosigned by {seen or 'nobody'}"))
    if root_key is None:
        click.echo("note  keys taken from the manifest as given; pin them with --root-key")


def _check_fork(content: bytes, manifest: Path | None, root_key: Path | None, as_json: bool) -> NoReturn:
    from security.audit.text import plain
    from security.audit.verify import roster_from
    from security.log.witness import Fork

    fork = Fork.parse(content)
    if manifest is None:
        click.echo(plain(f"????  {fork.origin}: whose keys signed this is not known; give --manifest"), err=True)
        sys.exit(3)
    fork.verify(roster_from(manifest, root_key).by_origin[fork.origin].root)
    _convict("Fork", f"{fork.origin} signed two histories", as_json)


def _check_sum(content: bytes, manifest: Path | None, root_key: Path | None, as_json: bool) -> NoReturn:
    from security.audit.verify import manifest_from
    from security.identity.membership import aggregation_policy
    from security.secagg.site.results import WrongSumEvidence

    evidence = WrongSumEvidence.parse(content)
    if manifest is None:
        click.echo("????  whose keys signed this result is not known; give --manifest", err=True)
        sys.exit(3)
    agreed = manifest_from(manifest, root_key)
    # As of the day it was issued: signatures do not lapse with the certificates that were valid when they were made.
    evidence.verify(aggregation_policy(agreed, now_ms=agreed.issued_at_ms))
    where = f"chunk {evidence.chunk} of round {evidence.result.context.round}"
    _convict("WrongSum", f"{agreed.coordinator.id} signed a sum that is not that of the uploads: {where}", as_json)


def _convict(code: str, what: str, as_json: bool) -> NoReturn:
    from security.audit.text import plain

    if as_json:
        _emit({"proves": code, "detail": what})
    else:
        click.echo(plain(f"FAIL  {code}  {what}; this file proves it"))
    sys.exit(1)


@main.command()
@logs
@root_key
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help=".html or .json")
def report(logs: Sequence[Path], root_key: Path | None, output: Path) -> None:
    """One self-contained page (or JSON) that says what was checked, what was found, and how to repeat it."""
    from security.audit import text
    from security.audit.report import render, report_json

    if output.suffix not in (".html", ".json"):
        raise ConfigError("a report is .html or .json", where=str(output))
    result = _crossed(logs, root_key, second_opinion=True)
    if output.suffix == ".json":
        output.write_text(json.dumps(report_json(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        output.write_text(render(result, pinned=root_key is not None), encoding="utf-8")
    click.echo(f"{output}: {text.VERDICTS[result.exit_code]}")
    sys.exit(result.exit_code)


@main.command()
@click.option("--entries", default=1_000_000, show_default=True, type=click.IntRange(min=1000))
@click.option("--appends", default=300, show_default=True, type=click.IntRange(min=20))
@click.option("--folder", type=LOG, help="Where to work; default: the system's temporary folder.")
@as_json
def bench(entries: int, appends: int, folder: Path | None, as_json: bool) -> None:
    """What logging and verifying cost on this machine."""
    from security.audit.bench import bench as run

    with click.progressbar(length=entries, label="writing a log", file=sys.stderr) as bar:
        figures = run(entries, appends, folder, lambda size: bar.update(size - bar.pos))
    if as_json:
        _emit(figures)
        return
    for name, value in figures.items():
        click.echo(f"{name:<24} {value}")
