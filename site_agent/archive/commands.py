"""`site-agent archive-fetch`, `archive-send` and `archive-erase`.

The first two go on in a process that has a network, and no key, state or ledger of the federation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from lazaret.errors import ConfigError
from lazaret.terminal import emit, progress, say, show_progress
from site_agent.archive.access import access_files, open_access
from site_agent.archive.cache import open_cache, prepare
from site_agent.archive.dicomweb import ArchiveClient
from site_agent.archive.source import KIND, ArchiveSource, check_url
from site_agent.archive.transfer import fetch, reports_in, search, send
from site_agent.command_process import isolate_from_federation
from site_agent.config import SiteConfig
from site_agent.options import json_option, with_config
from site_agent.trainer.isolation import Isolation

_MOST_LINES = 20


@click.command("archive-fetch")
@click.argument("source", required=False)
@click.option("--into", type=click.Path(path_type=Path, file_okay=False), help="Instead of that of [archive].")
@with_config
@json_option
def archive_fetch(config_path: Path, source: str | None, into: Path | None, as_json: bool) -> None:
    """Fetch images from the hospital's archive into a private folder of this machine.

    Without SOURCE, that of [data] in site.toml is used. Images that are here already are not fetched again, so an
    interrupted fetch can be continued. Fetch new cases for predictions into a folder of their own (--into).
    """
    config = SiteConfig.read(config_path)
    wanted = config.fetched if source is None else ArchiveSource.parse(source, Path.cwd())
    if wanted is None:
        raise ConfigError("no archive is named", where=f"{config_path} [data] source", hint=f"{KIND}https://...")
    if source is not None and into is None:
        raise ConfigError("these images are not the training data", where="SOURCE", hint="name a folder: --into FOLDER")
    if wanted.labels is None and not wanted.filters:
        hint = "labels=TABLE, or StudyDate= and others"
        raise ConfigError("this would fetch the whole archive", where="dicomweb:", hint=hint)
    folder = prepare(_apart(config, (into or config.cache).absolute()))
    read = [*access_files(config), *([wanted.labels] if wanted.labels else [])]
    found = isolate_from_federation(config, read=read, write=[folder])
    show_progress()
    client = ArchiveClient(open_access(config, wanted.url))
    with open_cache(folder, config.archive.most_bytes) as cache:
        with progress("searching the archive") as tell:
            images = search(client, wanted, tell=tell)
        with progress("fetching") as tell:
            summary = fetch(client, images, cache, tell=tell)
        used = cache.used
    if as_json:
        emit(summary.to_json() | {"bytes": used, "folder": str(folder), "isolation": found.to_json()})
    else:
        say(f"{summary.files} files of {summary.studies} studies, {summary.fetched} of them new: {used / 1e6:.1f} MB")
        if summary.skipped:
            say(f"{summary.skipped} files without images, or of other modalities, were left out")
    _end(summary.problems, found, "the list of training data stays as it was")


@click.command("archive-send")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--to", "address", help="The archive, dicomweb:URL; that of [data] source if left out.")
@with_config
@json_option
def archive_send(config_path: Path, folder: Path, address: str | None, as_json: bool) -> None:
    """Store the reports of FOLDER, which `predict --store` has written, in the hospital's archive.

    Each is sent once. After an error or a crash the command goes on with those that are missing.
    """
    config = SiteConfig.read(config_path)
    if address is not None:
        url = address.removeprefix(KIND).partition("?")[0].rstrip("/")
        check_url(url)
    elif config.fetched is not None:
        url = config.fetched.url
    else:
        raise ConfigError("no archive is named", where="--to", hint=f"{KIND}https://HOST/PATH")
    folder = _apart(config, folder.absolute())
    reports_in(folder)
    found = isolate_from_federation(config, read=access_files(config), write=[folder])
    show_progress()
    with progress("sending") as tell:
        summary = send(ArchiveClient(open_access(config, url)), folder, tell=tell)
    if as_json:
        emit(summary.to_json() | {"isolation": found.to_json()})
    else:
        say(f"{summary.reports} reports, {summary.sent} of them sent now")
    _end(summary.problems, found, "the archive does not have them")


@click.command("archive-erase")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Instead of that of [archive].")
@with_config
@json_option
def archive_erase(config_path: Path, folder: Path | None, as_json: bool) -> None:
    """Erase the images that were fetched from the archive. The archive itself is not touched."""
    config = SiteConfig.read(config_path)
    place = folder or config.cache
    if not place.exists():
        raise ConfigError("there is no such folder", where=str(place), hint="nothing was fetched, or it is erased")
    with open_cache(prepare(place), config.archive.most_bytes) as cache:
        erased = cache.erase()
    emit({"erased": erased}) if as_json else say(f"{erased} files erased")


def _apart(config: SiteConfig, folder: Path) -> Path:
    """The process that speaks with the archive may write there: so nothing of the federation may lie there."""
    place = folder.resolve()
    home = config.path.parent.resolve()  # may hold the folder, as it holds all others
    for closed in (config.identity, config.state, config.ledger.parent, config.ledger_anchor.parent, home):
        inside = closed != home and closed in place.parents
        if place == closed or place in closed.parents or inside:
            raise ConfigError(
                "the folder holds or lies in what belongs to the federation", where=str(folder), hint="name another"
            )
    return folder


def _end(problems: Sequence[str], found: Isolation, consequence: str) -> None:
    for line in problems[:_MOST_LINES]:
        say(line)
    if len(problems) > _MOST_LINES:
        say(f"and {len(problems) - _MOST_LINES} more")
    say(found.sentence if found.landlock and not found.keys_read else f"warning: {found.sentence}")
    if problems:
        say(consequence)
        sys.exit(1)
