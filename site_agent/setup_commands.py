"""`site-agent init`, `join`, `renew`, `draw` and `status`; and the template of `site.toml`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import click
from pydantic import ValidationError

from lazaret.control import running_option, say_running
from lazaret.errors import ConfigError
from lazaret.files import write_atomically
from lazaret.terminal import ask, emit, say
from security.clock import SystemClock
from security.identity import enrolment
from security.identity.enrolment import Identity, ml_dsa_option
from security.identity.enrolment_files import compared_root, kit_in, read_file
from security.identity.manifest import TlsIssuer, describe
from security.identity.peers import read_issuer
from security.identity.pki import Role, Subject, phrase, subject_of
from security.identity.token import named_token, token_option
from site_agent.archive.source import KIND, absolute
from site_agent.config import LAST_PORT, NO_ADDRESS, CoordinatorTable, SiteConfig, placed
from site_agent.options import issuer_options, json_option, with_config
from site_agent.privacy import status_line

# `renew`: new keys, also during a run. The old ones stay in force until the answer of the consortium is installed.


@click.command()
@token_option
@issuer_options
@with_config
@ml_dsa_option
@json_option
def renew(
    config_path: Path, place: str | None, issuer: Path | None, own_name: str | None, ml_dsa: bool, as_json: bool
) -> None:
    """Make new TLS and signing keys and a request for the consortium, signed with the key it replaces."""
    identity = Identity(folder=SiteConfig.read(config_path).identity)
    authority = _own_authority(issuer, own_name)
    request = enrolment.renew(identity, Role.SITE, place=named_token(place), issuer=authority, ml_dsa=ml_dsa)
    if as_json:
        emit({"request": str(identity.request_path), "fingerprint": request.fingerprint})
        return
    say(f"new keys and their request are in {identity.folder}; the old ones stay valid until the answer is installed")
    say(f"send {identity.request_path} to the consortium (`consortium renew {request.member} --request request.json`),")
    say(f"then install its answer: site-agent join {request.member}.json. The agent may keep running")


# `draw`: this site's part in the draw of groups, after the manifest has shown what every site has committed to.


@click.command()
@with_config
@json_option
def draw(config_path: Path, as_json: bool) -> None:
    """Print this site's secret for the draw of groups, for the consortium to publish."""
    identity = Identity(folder=SiteConfig.read(config_path).identity)
    manifest = enrolment.installed_manifest(identity, now_ms=SystemClock().now_ms(), program="site-agent")
    table = manifest.aggregation.groups
    if table is None or table.secrets:
        raise ConfigError(
            f"manifest version {manifest.version} asks for no secret: it has no groups, or they are drawn",
            where=str(identity.manifest_path),
            hint="before all commitments are public, another site could choose its own secret to fit this one",
        )
    name, secret = subject_of(identity.tls_certificate(), "TLS certificate").member, identity.draw_secret().hex()
    emit({"site": name, "secret": secret}) if as_json else click.echo(f'{name} = "{secret}"')


# The commented `site.toml` that `site-agent init` writes.

_TEMPLATE = """\
# Configuration of this hospital's agent. What all sites share is in the consortium's signed manifest; this file holds
# what is particular to this machine, and what this hospital permits. Keys behind a `#` show their defaults. Relative
# paths start at the folder of this file.

[site]
identity = {identity}                 # keys, certificates and manifest; no other user may read it
state = {state}                       # what must survive a restart, and the privacy log
initial_model = {initial_model}       # (required) the safetensors file of the consortium; checked by its SHA-256
# plugins = "plugins"                 # folder of methods that no release has; the policy below approves them
# threads = 4                         # processor threads for training; default: all
# ready_slot = 600                    # seconds; an update is announced only at multiples of this after the order, so
                                      # that the time reveals little about the amount of data. Default: 1, 2, 4, ...
                                      # seconds after it, which reveals the training time to a factor of two
# device = "auto"                     # or "cpu", "cuda", "cuda:1", "mps", "xpu"; "auto" takes a graphics card
                                      # that passes a test, else the processor; "cpu" opens no card to the trainer
# precision = "auto"                  # or "float32", "bfloat16", "float16"; float32 on the processor and under
                                      # differential privacy
# deterministic = false               # the same bits each time on the same card; slower
# micro_batch = 16                    # most images at once where memory is short; default: the whole batch
# checkpointing = false               # computes activations twice instead of keeping them: less memory, slower
# compiled = false                    # compiles the network first; slow to start, and faster only on some cards
# worker_wait = 120                   # seconds; how long training in several processes waits for one of them
# isolation = "best"                  # what sees images runs without network and keys, as far as the kernel can;
                                      # "required" does not begin where a connection or a key could be opened
# trainer_socket = "trainer.sock"     # the trainer is a service of its own; left out, the agent starts it

[coordinator]
address = {address}                   # (required) host:port; this agent only opens connections, it accepts none
# proxy = "http://proxy.example:3128" # an HTTP CONNECT proxy, if the hospital's network has one
# least_wait = 1                      # seconds before the first new try after a lost connection; doubles each time
# most_wait = 60

[logging]
# json = false                        # one JSON object a line on stderr; `--log-format` overrides it

[data]
source = {source}                     # (required) csv:FILE, folders:DIR, dicom:DIR, fed-isic:DIR, npz:PATH or generated
# site = "graz"                       # which site of the source this is, if there are several; default: our own id
# fold = 0                            # test images: a fold's number, or the name of a split that came with the data
# folds = 5
# validation = 0.1                    # part of the training patients held out to choose the best personal model
# seed = 0                            # of the folds, not of training
# version = "1"                       # under differential privacy, your name for the data; a new one: new class counts
# class_map = {{ naevus = "nevus", mm = "melanoma" }} # every class name here, and the federation's name of it;
                                      # left out, names and their order must be the manifest's
# purpose = "model training"          # these go to the privacy log; an audit is not clean without the first two
legal_basis = {legal_basis}
# controller = "Hospital Graz"        # who decides about the data: an organisation; never a person's name in these
# subjects = "patients of the skin clinic, 2015 to 2024"
# categories = "dermoscopic images, diagnoses"
# retention = "10 years, then erased"

[privacy]                             # if the manifest demands differential privacy
# population = "patients"             # whose budget is spent; one ledger for all data with the same patients
# ledger = "ledger"                   # folder of the ledger; it is used by all runs, so back it up
# anchor = "ledger-anchor"            # folder of its anchor, on another disk if possible
# cap = 8.0                           # the most that all runs may cost; default: the manifest's epsilon
# cap_alone = 20.0                    # the same if all other sites collude, where they share noise
# noise = 1.2                         # over the clip; default: the manifest's floor. `site-agent check` proposes one
# metrics_noise = 10.0                # book a local validation in every round; default: no validation
# micro_batch = 64                    # images at once under differential privacy

[archive]                             # the hospital's image archive (PACS), for a source dicomweb:URL?labels=TABLE
# cache = "archive"                   # folder of the files that `site-agent archive-fetch` brings; mode 0700
# most_bytes = 100_000_000_000        # the most that it may hold
# ca = "pacs-ca.pem"                  # who issued the archive's certificate; default: the system's list
# token_file = "pacs.token"           # a bearer token, or
# login_file = "pacs.login"           # user:password; mode 0600, as all secrets
# certificate = "pacs-client.pem"     # a client certificate, and its
# key = "pacs-client.key"
# hosts = ["pacs.example:443"]        # where they may be shown, besides the archive of [data] source
# timeout = 60                        # seconds without a byte before a connection is given up

[metrics]
# listen = "127.0.0.1:7481"           # figures for a Prometheus on this machine; no other address is permitted

[alerts]                              # who hears of a lost connection, certificates, the disk, the budget
# command = ["/usr/local/bin/page-me"] # gets one JSON object on its standard input for each alert
# webhook = "https://chat.example/hook" # gets the same object as a POST; nothing of patients or results is in it
# after = 60                          # minutes without a connection before it is told

[policy]                              # what this hospital permits; the coordinator cannot override it
# methods = ["fednpr-per"]            # default: whatever the manifest names
# architectures = ["efficientnet_b0"]
# least_cohort = 3                    # refuse a sum of fewer sites than this
# most_rounds = 80
# most_bytes_per_round = 100_000_000
# hours = "20:00-06:00"               # local time of day at which training may begin
# require_privacy = false             # refuse federations without differential privacy
# most_epsilon = 8.0
# most_epsilon_alone = 20.0           # of a run, if all other sites collude, where they share noise
# most_delta = 1e-5                   # refuse federations with a larger delta
# require_covered_audit = false       # refuse federations whose sums are only sampled
# required_classes = ["melanoma"]     # refuse to train while one of these has no training image here
# share_scores = false                # true: consent to scores of models inside the masked sum; see docs/consortium.md
# share_metrics = true                # add training loss and hit counts to the masked sum; false sends zeros
# plugins = []                        # SHA-256 of methods that this hospital has read and lets run; default: none
# accept_runs = "ask"                 # a new run waits for `site-agent accept`; or "within_policy"

# [policy.settings]                   # bounds on what the manifest may set
# learning_rate = {{ most = 0.01 }}
# local_epochs = {{ most = 5 }}
"""


def site_toml(
    *, identity: str, state: str, initial_model: str, address: str, source: str, legal_basis: str = ""
) -> str:
    """The file, with this site's values in it."""
    values = {
        "identity": identity,
        "state": state,
        "initial_model": initial_model,
        "address": address,
        "source": source,
        "legal_basis": legal_basis,
    }
    return _TEMPLATE.format(**{name: json.dumps(value, ensure_ascii=False) for name, value in values.items()})


INITIAL: Final = "initial.safetensors"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("."))
@click.option("--federation", help="Name of the federation, as the consortium calls it.")
@click.option("--name", help="Name of this hospital in the roster.")
@click.option("--address", help="The coordinator's host:port; if not given, a kit brings it.")
@click.option("--data", "source", help="csv:FILE, folders:DIR, dicom:DIR, npz:PATH or generated.")
@click.option("--legal-basis", help="The legal basis for the use of the images; the audit asks for it.")
@click.option("--initial-model", help=f"The consortium's model file; {INITIAL} if left out.")
@token_option
@issuer_options
@ml_dsa_option
@json_option
def init(
    folder: Path,
    federation: str | None,
    name: str | None,
    address: str | None,
    source: str | None,
    legal_basis: str | None,
    initial_model: str | None,
    place: str | None,
    issuer: Path | None,
    own_name: str | None,
    ml_dsa: bool,
    as_json: bool,
) -> None:
    """Make keys, a request for the consortium and a commented site.toml in FOLDER; asks for what is missing."""
    config = folder / "site.toml"
    if config.exists():
        raise ConfigError("there is already a configuration", where=str(config), hint="choose another folder")
    authority = _own_authority(issuer, own_name)
    subject = Subject(
        federation=ask(federation, "--federation", "Name of the federation, as the consortium calls it"),
        role=Role.SITE,
        member=ask(name, "--name", "Name of this hospital in the roster"),
    )
    text = site_toml(
        identity="identity",
        state="state",
        address=_checked_address(
            ask(address, "--address", "The coordinator's host:port (Enter: a kit brings it)", default=NO_ADDRESS)
        ),
        source=_checked_source(ask(source, "--data", "Where the images are: csv:FILE, folders:DIR, dicom:DIR")),
        legal_basis=ask(legal_basis, "--legal-basis", "On which legal ground the images are used", default=""),
        initial_model=ask(initial_model, "--initial-model", "The consortium's model file", default=INITIAL),
    )
    identity = Identity(folder=folder / "identity")
    request = identity.create(subject, place=named_token(place), issuer=authority, ml_dsa=ml_dsa)
    write_atomically(config, text.encode(), mode=0o600)
    SiteConfig.read(config)
    if as_json:
        emit({"config": str(config), "request": str(identity.request_path), "fingerprint": request.fingerprint})
        return
    say(f"keys and request are in {identity.folder}, the configuration is {config}")
    if authority is not None:
        say(f"have {identity.own_request_path} signed by your authority, as {identity.own_tls_path}")
    say(f"send {identity.request_path} to the consortium, and read these words (or digits) out to them")
    say(phrase(request.fingerprint))
    click.echo(request.fingerprint)


def _own_authority(path: Path | None, name: str | None) -> TlsIssuer | None:
    """`--tls-issuer` and `--tls-name`."""
    if path is None and name is None:
        return None
    if path is None or name is None:
        raise click.UsageError("--tls-issuer and --tls-name belong together")
    try:
        issuer = TlsIssuer(certificate=read_file(path).decode("ascii", "replace"), name=name)
    except ValidationError as error:
        hint = "a name is of small letters, digits, dots and hyphens"
        raise ConfigError(describe(error), where="--tls-issuer, --tls-name", hint=hint) from None
    read_issuer(issuer, str(path))
    return issuer


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

    if source.startswith(KIND):
        return absolute(source, Path.cwd())
    SourceName.parse(source)
    return placed(source, Path.cwd())


# `join` and `status`.


@click.command()
@click.argument("answer", metavar="[KIT|ANSWER]", type=click.Path(path_type=Path), required=False)
@click.option("--root-fingerprint", help="Fingerprint of the consortium's root, received over another channel.")
@click.option("--manifest", type=click.Path(path_type=Path), help="Also (or only) install this signed manifest.")
@with_config
def join(
    config_path: Path,
    answer: Path | None,
    root_fingerprint: str | None,
    manifest: Path | None,
) -> None:
    """Install what the consortium has sent: a kit, or its ANSWER and its manifest."""
    config = SiteConfig.read(config_path)
    identity, now = Identity(folder=config.identity), SystemClock().now_ms()
    if kit := kit_in(answer):
        known = compared_root(kit, identity, root_fingerprint)
        for line in kit.install(identity, config.initial_model, root_fingerprint=known, now_ms=now):
            say(line)
        _take_address(config_path, config.coordinator.address, kit.address)
        return
    lines = enrolment.join(identity, answer=answer, root_fingerprint=root_fingerprint, manifest=manifest, now_ms=now)
    for line in lines:
        say(line)


def _take_address(config_path: Path, here: str, there: str) -> None:
    """The kit's address replaces the one that `init` left open, and no other."""
    if here == NO_ADDRESS:
        line = f"address = {json.dumps(_checked_address(there))}"
        text = config_path.read_text(encoding="utf-8").replace(f'address = "{NO_ADDRESS}"', line, 1)
        write_atomically(config_path, text.encode(), mode=0o600)
        say(f"the coordinator is {there}")
    elif here != there:
        say(f"note: the kit names {there} as the coordinator's address; {config_path} keeps {here}")


@click.command()
@click.option("--web", is_flag=True, help="Show it as a page to a browser on this machine, until Ctrl-C.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Where the page is; port 0 takes a free one.")
@running_option
@with_config
@json_option
def status(config_path: Path, as_json: bool, web: bool, listen: str, running: bool) -> None:
    """Show what this site has done so far, from its state folder; the agent may be running."""
    if running:
        say_running(SiteConfig.read(config_path).state, now_ms=SystemClock().now_ms())
    from site_agent.status import lines, overview

    if web:
        from site_agent.page.content import show_page

        show_page(SiteConfig.read(config_path), listen)
        return
    found = overview(SiteConfig.read(config_path))
    if as_json:
        emit(found)
        return
    for line in lines(found, SystemClock().now_ms()):
        click.echo(line)
    if found["privacy"]:
        click.echo(status_line(found["privacy"]))
    for row in found["metrics"]:
        figures = row.get("test") or row.get("validation") or {}
        shown = "not known" if figures.get("bacc") is None else f"{figures['bacc']:.3f}"
        click.echo(f"  round {row['round']:>4}  balanced accuracy {shown}")
