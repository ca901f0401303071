"""`coordinator renew`: new keys for the coordinator. What is in force stays so until the consortium answers."""

from __future__ import annotations

from pathlib import Path

import click

from coordinator.config import CoordinatorConfig
from coordinator.options import config_option
from security.consortium import enrolment
from security.consortium.enrolment import Identity
from security.pki import Role
from security.terminal import emit, say


@click.command()
@config_option
@click.option("--host", "hosts", multiple=True, help="Name or address that sites dial; if not given, they stay.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def renew(config_path: Path, hosts: tuple[str, ...], as_json: bool) -> None:
    """Make new TLS and signing keys and a request for the consortium, signed with the key it replaces."""
    config, base = CoordinatorConfig.read(config_path)
    identity = Identity(folder=base / config.identity)
    request = enrolment.renew(identity, Role.COORDINATOR, hosts=hosts)
    if as_json:
        emit({"request": str(identity.request_path), "fingerprint": request.fingerprint})
        return
    say(f"new keys and their request are in {identity.folder}; the old ones hold until the answer is installed")
    say(f"send {identity.request_path} to the consortium (`consortium renew {request.member} --request request.json`),")
    say(f"then `coordinator join {request.member}.json --manifest manifest.json` and restart")
