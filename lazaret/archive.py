"""Archives of a party's files: what `backup` writes and `restore` reads. It knows nothing of what the files mean.

A tar file without compression. Its last member, `BACKUP.json`, names every file before it with its SHA-256, and says
what kind of copy this is. Without it the file is no archive, so that one that was cut short is refused. A party may
sign it; who checks that is not here. An archive is readable by this user only: it may hold keys, and it holds what a
hospital has learnt from its patients.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Literal, get_args

from lazaret import files
from lazaret.errors import ConfigError, DataError

FORMAT: Final = "lazaret backup 2"
CONTENTS: Final = "BACKUP.json"
MOVED: Final = "moved.json"
Kind = Literal["backup", "move", "root"]
_PARTIAL: Final = ".partial"
_BLOCK: Final = 1 << 20
_MOST_CONTENTS: Final = 64 * 1024 * 1024
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveContents:
    """What an archive says of itself.

    :ivar kind: `backup` is a copy without a key, of a party that may go on; `move` is the party itself; `root` is the
        consortium's folder.
    :ivar party: whose it is, as `site graz`.
    :ivar about: further words of the party that wrote it.
    :ivar digests: the SHA-256 of each file.
    :ivar length: how many bytes of the archive come before this.
    :ivar signature: the party's, over `signed` (hexadecimal); empty if it does not sign.
    """

    kind: Kind
    party: str
    made_ms: int
    about: Mapping[str, Any]
    digests: Mapping[str, str]
    length: int
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """All of it but the signature."""
        return replace(self, signature="")._object()

    def encode(self) -> bytes:
        """The object, and below it its own SHA-256: a bit that the disk has turned is noticed here too."""
        encoded = self._object()
        return encoded + hashlib.sha256(encoded).hexdigest().encode() + b"\n"

    def _object(self) -> bytes:
        return json.dumps({"format": FORMAT} | asdict(self), sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> ArchiveContents:
        try:
            encoded, digest = data[:-65], data[-65:-1].decode()
            if hashlib.sha256(encoded).hexdigest() != digest:
                raise ValueError
            values = json.loads(encoded)
            if values.pop("format") != FORMAT or values["kind"] not in get_args(Kind):
                raise DataError("is of another kind or version", where=where)
            found = cls(**values)
            if [type(value) for value in asdict(found).values()] != [str, str, int, dict, dict, int, str]:
                raise ValueError
            if not all(_HASH.fullmatch(digest) for digest in found.digests.values()):
                raise ValueError
            return found
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(where) from error


def write(target: Path, sources: Iterable[tuple[str, Path]], **facts: Any) -> ArchiveContents:
    """A whole archive in one step.

    :param sources: the name of each file in the archive, and where it is now. A name may be a folder's.
    """
    contents = begin(target, sources, **facts)
    finish(target, contents)
    return contents


def begin(
    target: Path,
    sources: Iterable[tuple[str, Path]],
    *,
    kind: Kind,
    party: str,
    made_ms: int,
    about: Mapping[str, Any],
    sign: Callable[[bytes], bytes] = lambda _: b"",
) -> ArchiveContents:
    """Write all files beside the target, on disk when this returns. Nothing can be restored from it before `finish`.

    :param sign: gives the party's signature over what the archive says of itself, and so over every file.
    :raises ConfigError: if a move meets a link: what it leads to would stay here, or be erased without a copy.
    """
    if target.exists():
        raise ConfigError("refusing to overwrite an existing file", where=str(target), hint="choose another name")
    digests: dict[str, str] = {}
    beside = partial(target)
    try:
        with files.naming(beside), files.open_private(beside) as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as packed:
                for name, path in _walk(sources, links=kind != "move"):
                    digests[name] = _add(packed, name, path)
                length = packed.offset
            file.flush()
            os.fsync(file.fileno())
        files.sync_directory(target.parent)
        contents = ArchiveContents(
            kind=kind, party=party, made_ms=made_ms, about=about, digests=dict(sorted(digests.items())), length=length
        )
        return replace(contents, signature=sign(contents.signed).hex())
    except BaseException:
        files.erase(beside)  # it may hold keys, of a party that goes on
        raise


def finish(target: Path, contents: ArchiveContents) -> None:
    """Say what is in it, and give it its name. May be called again after a kill."""
    data = contents.encode()
    with files.naming(target), open(partial(target), "r+b") as file:
        file.truncate(contents.length)  # also what an earlier call had begun to say
        file.seek(contents.length)
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as packed:
            packed.addfile(_member(CONTENTS, len(data)), io.BytesIO(data))
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial(target), target)
    files.sync_directory(target.parent)


def partial(target: Path) -> Path:
    return target.with_name(f"{target.name}{_PARTIAL}")


def _walk(sources: Iterable[tuple[str, Path]], *, links: bool) -> Iterator[tuple[str, Path]]:
    """Files, in order. Links are not followed: they would lead out of the party's folders.

    :param links: whether they are left out; else they are refused.
    """
    for name, path in sources:
        if path.is_symlink():
            if not links:
                raise ConfigError("a link cannot move", where=str(path), hint="put what it leads to in its place")
        elif path.is_dir():
            yield from _walk(((f"{name}/{child.name}", child) for child in sorted(path.iterdir())), links=links)
        elif path.is_file():
            yield name, path


def _add(packed: tarfile.TarFile, name: str, path: Path) -> str:
    """As long as the file is when it is opened: a log may grow meanwhile; other files are replaced as a whole."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        hashed = _Hashing(file)
        packed.addfile(_member(name, size), hashed)  # type: ignore[arg-type]  # reads are all that it needs
    return hashed.digest.hexdigest()


class _Hashing:
    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


# Reading.


@contextmanager
def unpacked(source: Path, target: Path) -> Iterator[tuple[Path, ArchiveContents]]:
    """The files of an archive in a new folder, every one checked, for the caller to complete; it becomes `target` at
    the end of the block, at once. After an error or a kill there is no such folder.

    :raises ConfigError: if the target is there already.
    :raises DataError: if the archive is not complete, or not as it was written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("something is there already", where=str(target), hint="name a folder that does not exist")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.restoring")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700)
    try:
        yield staging, _unpack(source, staging)
        for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
            folder.chmod(0o700)
            files.sync_directory(folder)
        os.replace(staging, target)
        files.sync_directory(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpack(source: Path, folder: Path) -> ArchiveContents:
    contents = read_contents(source)
    _check_files(source, contents, lambda name, data: _extract(data, folder / name))
    return contents


def _check_files(source: Path, contents: ArchiveContents, digest_of: Callable[[str, IO[bytes]], str]) -> None:
    """:raises DataError: if the files before the contents are not those that the contents list."""
    digests: dict[str, str] = {}
    try:
        with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r:") as packed:
            for member in packed:
                if member.offset >= contents.length:
                    break
                data = packed.extractfile(member) if member.isreg() and not member.issparse() else None
                if data is None or member.name in digests or not _inside(member.name):
                    raise _damaged(str(source))
                digests[member.name] = digest_of(member.name, data)
    except tarfile.TarError as error:
        raise _damaged(str(source)) from error
    if digests != contents.digests:
        raise _damaged(str(source))


def read_contents(source: Path) -> ArchiveContents:
    """What an archive says of itself; its files are not looked at."""
    try:
        with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r:") as packed:
            last = packed.getmembers()[-1]
            data = packed.extractfile(last) if last.name == CONTENTS and last.size <= _MOST_CONTENTS else None
            if data is None:
                raise _damaged(str(source))
            contents = ArchiveContents.decode(data.read(), str(source))
            if last.offset != contents.length:
                raise _damaged(str(source))
            return contents
    except FileNotFoundError as error:
        raise ConfigError("file not found", where=str(source), hint="check the path") from error
    except (tarfile.TarError, IndexError) as error:
        raise _damaged(str(source)) from error


def is_archive(path: Path) -> bool:
    """Whether a file is one, of any version, whole or begun."""
    if path.suffix == _PARTIAL:
        return True
    try:
        with tarfile.open(path, mode="r:") as packed:
            return packed.getmembers()[-1].name == CONTENTS
    except (tarfile.TarError, IndexError):
        return False


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == name and name != CONTENTS


def _extract(data: IO[bytes], path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with files.naming(path), files.open_private(path) as file:
        while block := data.read(_BLOCK):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _damaged(where: str) -> DataError:
    return DataError(
        "is not a complete backup, or was changed", where=where, hint="use another copy; nothing was restored"
    )


# A party that has moved away: its folder says so, and cannot act any more.


def move(
    state: Path,
    target: Path,
    sources: Callable[[], Iterable[tuple[str, Path]]],
    give_up: Iterable[tuple[str, Path]],
    facts: Callable[[], Mapping[str, Any]],
) -> ArchiveContents:
    """Pack a party and end it here. Killed at any moment, there is one that can act: this folder as it was, or what the
    archive holds after this was called again.

    :param state: the state folder, which is marked.
    :param give_up: what this folder could act with, such as keys, under their names in the archive: it is erased.
        Nothing is erased that the archive has not, byte for byte.
    :param facts: what the archive says of the party. Not asked again after a kill, when it may be half gone.
    """
    mark = state / MOVED
    if mark.exists():
        if not partial(target).exists():
            raise _has_moved(mark)
        contents = ArchiveContents.decode(mark.read_bytes(), str(mark))
        _check_files(partial(target), contents, lambda _, data: hashlib.sha256(data.read()).hexdigest())
    else:
        contents = begin(target, sources(), kind="move", **facts())
        files.write_atomically(mark, contents.encode(), mode=0o600)
    leaving = [(name, path) for name, path in give_up if path.exists()]
    for name, path in leaving:
        if not _packed(path, contents.digests.get(name)):
            raise ConfigError(
                "this file is not in the archive as it is here, and nothing was erased",
                where=str(path),
                hint="who has changed it since? what was booked or made after the copy must not be lost",
            )
    for _, path in leaving:
        files.erase(path)
    finish(target, contents)
    return contents


def _packed(path: Path, digest: str | None) -> bool:
    """Whether a copy of it is in the archive, or it is what a kill has left of erasing it."""
    data = path.read_bytes()
    return digest is not None and (not data.strip(b"\0") or hashlib.sha256(data).hexdigest() == digest)


def refuse_moved(state: Path) -> None:
    """:raises ConfigError: if what this folder held is on another machine now."""
    if (state / MOVED).exists():
        raise _has_moved(state / MOVED)


def _has_moved(mark: Path) -> ConfigError:
    return ConfigError(
        "this party has moved to another machine: its keys are no longer here",
        where=str(mark),
        hint="use the folder that `restore` made there; without the archive, restore a backup under another name",
    )
