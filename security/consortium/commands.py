"""The commands of `consortium`: what the authority does with requests, members and the plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console

from lazaret import files
from lazaret.errors import ConfigError, VerificationFailed
from lazaret.terminal import can_ask, emit, say
from security.clock import SystemClock
from security.consortium import show as showing
from security.consortium.authority import Authority
from security.consortium.plan import PLAN, FederationPlan
from security.identity import keystore, pki
from security.identity.acceptance import check_root_key, key_in, open_manifest
from security.identity.enrolment_files import EnrolmentRequest, read_file
from security.identity.pki import grouped, phrase, same_fingerprint
from security.identity.token import named_token, token_option

PASSPHRASE_VARIABLE = "LAZARET_PASSPHRASE"
PLAIN_WIDTH = 160
DEMO_WARNING = (
    "warning: the root key is stored without a passphrase; whoever copies it can act as the consortium. For demos only"
)

folder_option = click.option(
    "--dir", "folder", type=click.Path(path_type=Path, file_okay=False), default=".", help="The consortium's folder."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
days_option = click.option(
    "--days",
    type=click.IntRange(1, 3650),
    help=f"Validity in days. By default up to {pki.MEMBER_DAYS}, so that no two members' certificates end on one day.",
)


def passphrase_options(command: Callable[..., Any]) -> Callable[..., Any]:
    path = click.Path(path_type=Path, dir_okay=False)
    command = click.option("--no-passphrase", is_flag=True, help="The root key has none (demos only).")(command)
    return click.option(
        "--passphrase-file",
        type=path,
        help=f"Read it from a file of mode 0600; else ${PASSPHRASE_VARIABLE}, else asked.",
    )(command)


def _passphrase(path: Path | None, none: bool, *, confirm: bool = False) -> bytes | None:
    """From the file, the environment or the keyboard, in this order."""
    if none and path:
        raise click.UsageError("--no-passphrase and --passphrase-file exclude each other")
    if none:
        return None
    if path:
        secret = files.read_private(path).strip()
    elif PASSPHRASE_VARIABLE in os.environ:
        secret = os.environ[PASSPHRASE_VARIABLE].encode()
    elif not can_ask():
        raise ConfigError(
            "no passphrase for the root key was given, and this is not a terminal",
            hint=f"give --passphrase-file or ${PASSPHRASE_VARIABLE}, or run this on a terminal; "
            "--no-passphrase is for demos only",
        )
    else:
        asked: str = click.prompt("passphrase of the root key", hide_input=True, confirmation_prompt=confirm, err=True)
        secret = asked.encode()
    if not secret:
        raise ConfigError("the passphrase is empty", hint="--no-passphrase is for demos")
    return secret


def _unlock(authority: Authority, path: Path | None, none: bool) -> ec.EllipticCurvePrivateKey:
    return authority.unlock(_root_secret(authority, path, none))


def _root_secret(authority: Authority, path: Path | None, none: bool) -> bytes | None:
    if keystore.token_of(authority.folder / "root.key") is not None:
        return None  # the token asks for its PIN
    if none:
        say(DEMO_WARNING)
    elif b"BEGIN ENCRYPTED" not in files.read_private(authority.folder / "root.key"):
        say(DEMO_WARNING)
        return None
    return _passphrase(path, none)


def _now() -> int:
    return SystemClock().now_ms()


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


@click.command()
@click.argument("federation")
@folder_option
@passphrase_options
@click.option(
    "--days", type=click.IntRange(1, 36_500), default=pki.ROOT_DAYS, show_default=True, help="Validity of the root."
)
@token_option
@json_option
def init(
    federation: str,
    folder: Path,
    passphrase_file: Path | None,
    no_passphrase: bool,
    days: int,
    place: str | None,
    as_json: bool,
) -> None:
    """Make the root key of FEDERATION and a commented federation.toml."""
    pki.check_name(federation, "federation id")
    token = named_token(place)
    if token and (passphrase_file or no_passphrase):
        raise click.UsageError("a root key in a token has a PIN and no passphrase")
    secret = None if token else _passphrase(passphrase_file, no_passphrase, confirm=True)
    authority = Authority.create(folder, federation, passphrase=secret, place=token, now_ms=_now(), days=days)
    if not authority.plan_path.exists():
        files.write_atomically(authority.plan_path, PLAN.encode())
    if secret is None and token is None:
        say(DEMO_WARNING)
    fingerprint = pki.fingerprint(authority.root)
    if as_json:
        emit({"federation": federation, "folder": str(folder.resolve()), "root_fingerprint": fingerprint})
        return
    click.echo(f"root fingerprint  {grouped(fingerprint)}")
    click.echo(f"root phrase       {phrase(fingerprint)}")
    click.echo("read one of them out to every member over the telephone; `join` checks what they receive against it")
    click.echo(f"next: edit {authority.plan_path}, then `consortium enroll REQUEST`")


@click.command()
@click.argument("request_path", metavar="REQUEST", type=click.Path(path_type=Path))
@click.option("--fingerprint", help="The request's fingerprint as the member reads it out; asked for if left out.")
@click.option("--yes", is_flag=True, help="Trust the file as it is (demos, or a request made on this machine).")
@folder_option
@passphrase_options
@days_option
@json_option
def enroll(
    request_path: Path,
    fingerprint: str | None,
    yes: bool,
    folder: Path,
    passphrase_file: Path | None,
    no_passphrase: bool,
    days: int | None,
    as_json: bool,
) -> None:
    """Issue certificates to the member who made REQUEST."""
    authority = Authority.open(folder)
    request = EnrolmentRequest.read(request_path)
    _confirm(request, fingerprint, yes)
    key = _unlock(authority, passphrase_file, no_passphrase)
    record = authority.enroll(key, request, now_ms=_now(), days=days or authority.spread_days(_now()))
    _report_issue(authority, showing.member_summary(record, _now()), as_json)


def _confirm(request: EnrolmentRequest, fingerprint: str | None, yes: bool) -> None:
    """The only moment at which somebody in the middle could swap a member's keys: hence the second channel."""
    if yes:
        return
    if fingerprint is None:
        say(f"request of {request.role} {request.member}: {phrase(request.fingerprint)}")
        say(f"or, in digits: {request.fingerprint}")
        if not can_ask():
            raise ConfigError(
                "the fingerprint cannot be confirmed: this is not a terminal",
                where=request.member,
                hint="give --fingerprint as the member reads it out, or run this on a terminal; --yes is for demos",
            )
        click.confirm("does the member read out the same?", abort=True, err=True)
    elif not same_fingerprint(request.digest.hex(), fingerprint):
        raise VerificationFailed(
            "the fingerprint is not this request's",
            where=request.member,
            hint="stop here: the request was changed on its way, or another one was read out",
        )


def _report_issue(authority: Authority, summary: dict[str, Any], as_json: bool) -> None:
    answer = authority.answer_path(summary["id"])
    if as_json:
        emit(summary | {"answer": str(answer.resolve())})
        return
    newest = summary["signing_certificates"][-1]
    click.echo(f"{summary['role']} {summary['id']}: certificates until {newest['until']}")
    click.echo(f"give {answer} to the member, then `consortium publish`")


@click.command()
@click.argument("member")
@click.option(
    "--request", "request_path", type=click.Path(path_type=Path), help="New keys; without it the old ones stay."
)
@click.option("--fingerprint", help="Fingerprint of the request; needed only if the old key did not sign it.")
@folder_option
@passphrase_options
@days_option
@json_option
def renew(
    member: str,
    request_path: Path | None,
    fingerprint: str | None,
    folder: Path,
    passphrase_file: Path | None,
    no_passphrase: bool,
    days: int | None,
    as_json: bool,
) -> None:
    """Issue new certificates to MEMBER, also during a run; the old TLS key is valid until its certificate expires."""
    authority = Authority.open(folder)
    request = EnrolmentRequest.read(request_path) if request_path else None
    if request and fingerprint:
        _confirm(request, fingerprint, yes=False)
    key = _unlock(authority, passphrase_file, no_passphrase)
    days = days or authority.spread_days(_now(), beside=member)
    record = authority.renew(key, member, request, compared=fingerprint is not None, now_ms=_now(), days=days)
    _report_issue(authority, showing.member_summary(record, _now()), as_json)


@click.command()
@click.argument("member")
@click.option("--reason", required=True, help="Printed in the manifest, where every member reads it.")
@click.option("--certificate", help="SHA-256 of one certificate; without it, all certificates of the member.")
@folder_option
@json_option
def revoke(member: str, reason: str, certificate: str | None, folder: Path, as_json: bool) -> None:
    """Revoke MEMBER's certificates. Takes effect with the next `consortium publish`."""
    authority = Authority.open(folder)
    chosen = "".join(certificate.split()).lower() if certificate else None
    record = authority.revoke(member, reason, certificate=chosen, now_ms=_now())
    if as_json:
        emit(showing.member_summary(record, _now()))
        return
    click.echo(f"{member} {'still holds other certificates' if record.active else 'is out'}")
    click.echo("run `consortium publish` now: until the new manifest is published, no member knows of it")


@click.command()
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Default: federation.toml in the folder.")
@folder_option
@passphrase_options
@json_option
def publish(
    plan_path: Path | None, folder: Path, passphrase_file: Path | None, no_passphrase: bool, as_json: bool
) -> None:
    """Sign the next version of the manifest: members, rules, initial model, clips, revocations."""
    authority = Authority.open(folder)
    plan = FederationPlan.read(plan_path or authority.plan_path)
    secret = _root_secret(authority, passphrase_file, no_passphrase)
    key, second = authority.unlock(secret), None
    if plan.audit.ml_dsa:
        if keystore.token_of(authority.folder / "root.key") is not None:
            secret = _passphrase(passphrase_file, no_passphrase)  # tokens make no ML-DSA keys: that one is a file
        second = authority.unlock_ml_dsa(secret)
    manifest = authority.publish(key, plan, ml_dsa=second, now_ms=_now())
    summary = showing.manifest_summary(manifest, _now())
    for warning in summary["warnings"]:
        say(f"note: {warning}")
    if as_json:
        emit(summary | {"path": str(authority.manifest_path.resolve())})
        return
    click.echo(f"manifest version {manifest.version} of {manifest.federation}, run {manifest.run}")
    click.echo(f"digest  {grouped(manifest.digest.hex())}")
    click.echo(f"give {authority.manifest_path} to every member; `consortium kit` packs all that a member needs")


@click.command()
@click.argument("members", metavar="[MEMBER]...", nargs=-1)
@click.option("--address", help="The coordinator's host:port; by default the first name in its certificate, port 7443.")
@folder_option
@json_option
def kit(members: tuple[str, ...], address: str | None, folder: Path, as_json: bool) -> None:
    """Write kits/NAME.kit for each MEMBER, or for all: certificates, manifest, model and address in one file."""
    written = {name: str(path) for name, path in Authority.open(folder).write_kits(members, address, now_ms=_now())}
    if as_json:
        emit({"kits": written})
        return
    for name, path in written.items():
        click.echo(f"give {path} to {name}, whose `join` installs it")


@click.command()
@click.argument("manifest_path", metavar="[MANIFEST]", required=False, type=click.Path(path_type=Path))
@click.option("--root", "root_path", type=click.Path(path_type=Path), help="The root certificate to check MANIFEST by.")
@click.option("--tensors", is_flag=True, help="List every tensor with its clip.")
@folder_option
@json_option
def show(manifest_path: Path | None, root_path: Path | None, tensors: bool, folder: Path, as_json: bool) -> None:
    """Show the consortium's folder; or MANIFEST, for a member who has only that and the root certificate."""
    now = _now()
    if manifest_path is None:
        authority = Authority.open(folder)
        summary = showing.authority_summary(authority, now)
        emit(summary) if as_json else showing.print_authority(_console(), summary)
        return
    root_path = root_path or folder / "root.pem"
    pem = read_file(root_path)
    root = pki.read_certificate(pem, str(root_path))
    manifest = open_manifest(read_file(manifest_path), root, now_ms=now, where=str(manifest_path))
    second = key_in(pem, str(root_path))
    check_root_key(manifest, second)
    summary = showing.manifest_summary(manifest, now)
    if manifest.root_ml_dsa is not None and second is None:
        note = "has no ML-DSA key, so that of the manifest itself was taken; ask for the newest root.pem"
        summary["warnings"].append(f"{root_path} {note}")
    blocks = manifest.aggregation.layout.to_dict()["blocks"] if tensors else None
    if as_json:
        emit(summary | ({"tensors": blocks} if blocks else {}))
    else:
        showing.print_manifest(_console(), summary, blocks)
