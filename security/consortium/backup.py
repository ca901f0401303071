"""`consortium backup` and `restore`: the root's folder, which must never sign two manifests of one version.

Members keep the newest manifest that they have seen. An older folder would sign that version again, with other words:
it would drop members, renewals and revocations, and everybody would have proof of misuse. So a backup is restored only
together with the newest manifest, as members hold it, and only if it is the newest one in the backup too. Which one is
the newest, nobody can prove to this machine, which has no network: so it is asked for from several members, and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from lazaret import archive
from lazaret.archive import ArchiveContents
from lazaret.errors import ConfigError, ManifestRejected
from lazaret.terminal import say
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.identity.acceptance import open_manifest
from security.identity.enrolment_files import read_file
from security.identity.manifest import Manifest


def _sources(folder: Path) -> Iterator[tuple[str, Path]]:
    """Without kits, which can be made again, and without earlier backups: each would hold all those before it."""
    for path in sorted(folder.iterdir()):
        if path.name != "kits" and not (path.is_file() and archive.is_archive(path)):
            yield path.name, path


def back_up(authority: Authority, target: Path, *, now_ms: int) -> ArchiveContents:
    """The whole folder with the root key, which has its passphrase there too."""
    about = {"federation": authority.federation}
    party = f"consortium {authority.federation}"
    return archive.write(target, _sources(authority.folder), kind="root", party=party, made_ms=now_ms, about=about)


def restore_root(
    source: Path, folder: Path, manifests: Sequence[Path], *, now_ms: int
) -> tuple[ArchiveContents, Manifest | None]:
    """:param manifests: as members have them, of which the newest counts; none only if none was ever published.

    :raises ManifestRejected: if the backup does not know the newest of them as its own newest.
    """
    with archive.unpacked(source, folder) as (staging, contents):
        authority = Authority.open(staging)
        latest = authority.latest(now_ms=now_ms)
        if not manifests:
            if latest is not None:
                raise ConfigError(
                    "a backup is restored together with the newest manifest",
                    where="--manifest",
                    hint="ask the operator and some hospitals for identity/manifest.json",
                )
            return contents, None
        held = [open_manifest(read_file(path), authority.root, now_ms=now_ms, where=str(path)) for path in manifests]
        newest = max(held, key=lambda manifest: manifest.version)
        if latest is None or latest.digest != newest.digest:
            there = "none" if latest is None else f"version {latest.version}"
            raise ManifestRejected(
                f"members have version {newest.version}, and the newest one in the backup is {there}",
                where=str(source),
                hint="restore the backup that was made after that version; without it, begin a new federation",
            )
        return contents, newest


@click.command()
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=".", help="The consortium's folder.")
def backup(target: Path, folder: Path) -> None:
    """Write the whole folder, with the root key under its passphrase, to TARGET. Do it after every `publish`."""
    contents = back_up(Authority.open(folder), target, now_ms=SystemClock().now_ms())
    say(f"{len(contents.digests)} files are in {target}, with the root key: keep it where the key is kept")


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--manifest",
    "manifests",
    type=click.Path(path_type=Path),
    multiple=True,
    help="The newest manifest, as a member has it; may be repeated, for several members.",
)
def restore(source: Path, folder: Path, manifests: tuple[Path, ...]) -> None:
    """Restore the consortium's FOLDER from the backup SOURCE, if no manifest was signed after it."""
    contents, newest = restore_root(source, folder, manifests, now_ms=SystemClock().now_ms())
    say(f"{contents.party} is in {folder}; `consortium show --dir {folder}` shows it")
    if newest is not None:
        say(f"the next manifest is version {newest.version + 1}: if any member already has one of it, publish nothing")
