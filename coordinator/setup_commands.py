"""`coordinator init` and `check`: from nothing to a coordinator that may start."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Final

import click

from coordinator.config import HIGHEST_PORT, TEMPLATE
from coordinator.options import config_option
from security.consortium.enrolment import Identity
from security.errors import ConfigError
from security.pki import Role, Subject
from security.preflight.report import report, skip_option
from security.terminal import ask, say

LISTEN: Final = "0.0.0.0:7443"
# The checks by name; a test compares the list with the registry, which takes long to import.
CHECKS: Final = (
    "configuration", "certificates", "keys", "manifest", "rounds", "clock", "model", "names", "port", "disk", "memory",
)  # fmt: skip


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("."))
@click.option("--federation", help="Name of the federation, as the consortium calls it.")
@click.option("--name", help="Name of this coordinator in the roster.")
@click.option("--host", "hosts", multiple=True, help="Name or address that sites dial; may be repeated.")
@click.option("--listen", help=f"Address and port to listen on; {LISTEN} if left out.")
def init(folder: Path, federation: str | None, name: str | None, hosts: tuple[str, ...], listen: str | None) -> None:
    """Make keys, a request for the consortium and a commented coordinator.toml in FOLDER; asks for what is left out."""
    config = folder / "coordinator.toml"
    if config.exists():
        raise ConfigError("configuration is here already", where=str(config), hint="choose another folder")
    subject = Subject(
        federation=ask(federation, "--federation", "Name of the federation, as the consortium calls it"),
        role=Role.COORDINATOR,
        member=ask(name, "--name", "Name of this coordinator in the roster"),
    )
    dialled = hosts or _listed(ask(None, "--host", f"Names and addresses that sites dial, such as {socket.getfqdn()}"))
    address = ask(listen, "--listen", "Address and port to listen on", default=LISTEN)
    if not re.fullmatch(r"\S+:[0-9]{1,5}", address) or int(address.rpartition(":")[2]) > HIGHEST_PORT:
        raise ConfigError("is not of the form host:port", where="--listen", hint=f"for example {LISTEN}")
    folder.mkdir(parents=True, exist_ok=True)
    identity = Identity(folder=folder / "identity")
    request = identity.create(subject, hosts=dialled)
    text = TEMPLATE.format(identity="identity", state="state", listen=address, initial="initial.safetensors")
    config.write_text(text, "utf-8")
    say(f"keys and request are in {identity.folder}; configuration in {config}")
    say(f"give {identity.request_path} to the consortium and read them this fingerprint: {request.fingerprint}")


def _listed(answer: str) -> tuple[str, ...]:
    return tuple(filter(None, re.split(r"[\s,]+", answer)))


@click.command()
@skip_option(CHECKS)
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def check(skipped: tuple[str, ...], config_path: Path, as_json: bool) -> None:
    """Look at everything that a start needs, and say what to do. Starts nothing."""
    from coordinator.preflight import look

    sys.exit(report(look(config_path, skip=skipped), as_json=as_json))
