"""`site-agent init` and `check`: from nothing to a site that may start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
from pydantic import ValidationError

from security.consortium.enrolment import Identity
from security.errors import ConfigError
from security.keystore import write_atomically
from security.pki import Role, Subject
from security.preflight.report import report, skip_option
from security.terminal import ask, emit, say, show_progress
from site_agent.config import LAST_PORT, CoordinatorTable, SiteConfig, placed
from site_agent.options import also_config, json_option
from site_agent.template import site_toml

INITIAL: Final = "initial.safetensors"
# The checks by name; a test compares the list with the registry, which takes long to import.
CHECKS: Final = (
    "configuration", "certificates", "keys", "manifest", "policy", "coordinator", "clock", "state", "model", "disk",
    "device", "privacy", "data", "images", "code", "trial",
)  # fmt: skip


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--federation", help="Name of the federation, as the consortium calls it.")
@click.option("--name", help="Name of this hospital in the roster.")
@click.option("--address", help="The coordinator's host:port.")
@click.option("--data", "source", help="csv:FILE, folders:DIR, dicom:DIR, npz:PATH or generated.")
@click.option("--initial-model", help=f"The consortium's model file; {INITIAL} if left out.")
@json_option
def init(
    folder: Path,
    federation: str | None,
    name: str | None,
    address: str | None,
    source: str | None,
    initial_model: str | None,
    as_json: bool,
) -> None:
    """Make keys, a request for the consortium and a commented site.toml in FOLDER; asks for what is left out."""
    config = folder / "site.toml"
    if config.exists():
        raise ConfigError("a configuration is here already", where=str(config), hint="choose another folder")
    subject = Subject(
        federation=ask(federation, "--federation", "Name of the federation, as the consortium calls it"),
        role=Role.SITE,
        member=ask(name, "--name", "Name of this hospital in the roster"),
    )
    text = site_toml(
        identity="identity",
        state="state",
        address=_checked_address(ask(address, "--address", "The coordinator's host:port")),
        source=_checked_source(ask(source, "--data", "Where the images are: csv:FILE, folders:DIR, dicom:DIR")),
        initial_model=ask(initial_model, "--initial-model", "The consortium's model file", default=INITIAL),
    )
    identity = Identity(folder=folder / "identity")
    request = identity.create(subject)
    write_atomically(config, text.encode(), mode=0o600)
    SiteConfig.read(config)
    if as_json:
        emit({"config": str(config), "request": str(identity.request_path), "fingerprint": request.fingerprint})
        return
    say(f"keys and request are in {identity.folder}, the configuration is {config}")
    say(f"send {identity.request_path} to the consortium and read them this fingerprint out:")
    click.echo(request.fingerprint)


def _checked_address(address: str) -> str:
    """Before any key is made."""
    try:
        return CoordinatorTable(address=address).address
    except ValidationError:
        raise ConfigError(
            "is not of the form host:port",
            where="--address",
            hint=f"for example hub.example:7443; ports go from 1 to {LAST_PORT}",
        ) from None


def _checked_source(source: str) -> str:
    from npr.data.sources import SourceName

    SourceName.parse(source)
    return placed(source, Path.cwd())


@click.command()
@skip_option(CHECKS)
@also_config
@json_option
@click.pass_obj
def check(config_path: Path, own_config: Path | None, skipped: tuple[str, ...], as_json: bool) -> None:
    """Look at everything that a start needs, and say what to do. Only knocks at the coordinator's door."""
    from site_agent.preflight import look

    if not as_json:
        show_progress()
    sys.exit(report(look(own_config or config_path, skip=skipped), as_json=as_json))
