"""Which files of a party are in which kind of copy, as a table that `backup`, `restore` and `state` all follow.

A *backup* is a copy without private keys and protocol records, made while the party goes on. A *move* is the party
itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from lazaret import files
from lazaret.archive import ArchiveContents
from lazaret.errors import ConfigError
from lazaret.terminal import emit, say

BACKUP: Final = "backup and move"
MOVE: Final = "move only"
NEITHER: Final = "neither"
EVERYTHING: Final = (BACKUP, MOVE)
CopyTable = Mapping[str, tuple[str, str]]
_UNKNOWN: Final = (MOVE, "")
_LAST: Final = "segments"


def sources(places: Mapping[str, tuple[Path, CopyTable]], kinds: Collection[str]) -> Iterator[tuple[str, Path]]:
    """What is copied, under names that do not depend on where the configuration has put the folders.

    A folder `log` comes last, and in it the entries: they are there then for every checkpoint that was copied before.
    """
    for place, (folder, table) in places.items():
        for path in _children(folder):
            if path.name != "log" and table.get(path.name, _UNKNOWN)[0] in kinds:
                yield f"{place}/{path.name}", path
    for place, (folder, _) in places.items():
        parts = sorted(_children(folder / "log"), key=lambda path: path.name == _LAST)
        yield from ((f"{place}/log/{path.name}", path) for path in parts if path.name != ".lock")


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def rows(places: Mapping[str, tuple[Path, CopyTable]]) -> Iterator[dict[str, Any]]:
    """Every file and folder with its size, and the copies that it is in."""
    for place, (folder, table) in places.items():
        for path in _children(folder):
            copied, meaning = table.get(path.name, _UNKNOWN)
            found = path.rglob("*") if path.is_dir() else (path,)
            size = sum(file.stat().st_size for file in found if file.is_file())
            yield {"file": f"{place}/{path.name}", "bytes": size, "copied": copied, "meaning": meaning}


def place_here(path: Path) -> None:
    """Let a configuration that was restored say that its folders and files are beside it, wherever they were."""
    text = path.read_text(encoding="utf-8")
    places = {"identity": "identity", "state": "state", "initial_model": "initial.safetensors", "plugins": "plugins"}
    for key, value in places.items():
        old = rf"""^[ \t]*{key}[ \t]*=[ \t]*(?:"[^"\n]*"|'[^'\n]*')"""
        text = re.sub(old, f'{key} = "{value}"', text, count=1, flags=re.MULTILINE)
    files.write_atomically(path, text.encode(), mode=0o600)


def check_places(found: Mapping[str, Path], folder: Path) -> None:
    """:raises ConfigError: if a configuration, after `place_here`, still names another folder: the party would begin
    anew there, with its keys and without what it has signed.
    """
    for name, path in found.items():
        if path.resolve() != (folder / name).resolve():
            raise ConfigError(
                f"the copy's configuration does not say where `{name}` is in a way that can be changed",
                where=str(path),
                hint=f"write `{name} = \"...\"` on a line of its own before the copy is made",
            )


def keys_in(identity: Path) -> list[tuple[str, Path]]:
    """The private keys of a party, under their names in a copy."""
    found = sorted(path for path in (identity / "keys").rglob("*") if path.is_file())
    return [(f"identity/{path.relative_to(identity).as_posix()}", path) for path in found]


def say_copied(contents: ArchiveContents, target: Path, *, program: str, as_json: bool) -> None:
    """What `backup` has written, and what can be done with it."""
    if as_json:
        emit({"file": str(target), "kind": contents.kind, "files": len(contents.digests), "bytes": contents.length})
        return
    say(f"{contents.party}: {len(contents.digests)} files, {contents.length / 1e6:.1f} MB, are in {target}")
    if contents.kind == "move":
        say("this folder can do nothing any more: its keys are erased")
        say(f"on the other machine: {program} restore {target.name} FOLDER; then delete every copy of the file")
    else:
        say(f"it has no key: what `{program} restore` makes of it is a new member under another name")


def state_command(
    rows_of: Callable[[Path], Iterator[dict[str, Any]]], with_config: Callable[[Any], Any], whose: str
) -> click.Command:
    """`state` of a party."""

    @click.command(help=f"List the files of {whose}, how large they are, and in which kind of copy each of them is.")
    @with_config
    @click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
    def state(config_path: Path, as_json: bool) -> None:
        found = list(rows_of(config_path))
        if as_json:
            emit({"files": found})
            return
        for row in found:
            click.echo(f"{row['file']:<28} {row['bytes'] / 1e6:9.1f} MB  {row['copied']:<16} {row['meaning']}")

    return state

