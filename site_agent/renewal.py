"""`site-agent renew`: new keys for this site, also in mid-run. What is in force stays so until the answer is there."""

from __future__ import annotations

from pathlib import Path

import click

from security.consortium import enrolment
from security.consortium.enrolment import Identity
from security.pki import Role
from security.terminal import emit, say
from site_agent.config import SiteConfig
from site_agent.options import also_config, json_option


@click.command()
@also_config
@json_option
@click.pass_obj
def renew(config_path: Path, own_config: Path | None, as_json: bool) -> None:
    """Make new TLS and signing keys and a request for the consortium, signed with the key it replaces."""
    identity = Identity(folder=SiteConfig.read(own_config or config_path).identity)
    request = enrolment.renew(identity, Role.SITE)
    if as_json:
        emit({"request": str(identity.request_path), "fingerprint": request.fingerprint})
        return
    say(f"new keys and their request are in {identity.folder}; the old ones hold until the answer is installed")
    say(f"send {identity.request_path} to the consortium (`consortium renew {request.member} --request request.json`),")
    say(f"then install its answer: site-agent join {request.member}.json. The agent may run meanwhile")
