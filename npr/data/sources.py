"""`open_dataset`: one call from the name of a data set to one fold of it; and the survey of a data set.

A name is `kind`, `kind:path` or `kind:path?option=value&option=value`: one string that fits into a configuration file,
on a command line and beside a result.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import ConfigError, DataError
from lazaret.terminal import progress
from npr.config import LabelsOfImage
from npr.data.catalogue import Catalogue, PartitionSpec, assemble, partition
from npr.data.dataset import FederatedDataset
from npr.data.fed_isic import load_fed_isic
from npr.data.generated import GeneratedSpec, generate
from npr.data.manifest import load_csv, load_folders
from npr.data.npz import load_npz
from npr.data.sides import SideRule
from npr.data.store import Decode, Fault, FaultKind, ImageStorage

if TYPE_CHECKING:
    from npr.data.dicom_pixels import Window

DATA_VARIABLE = "LAZARET_DATA"


def load_dicom(*arguments: Any, **options: Any) -> Catalogue:
    """Its decoders take half a second to load, so that only who has such images loads them."""
    from npr.data import dicom

    return dicom.load_dicom(*arguments, **options)


_BY_PATH: dict[str, Callable[..., Catalogue]] = {
    "csv": load_csv,
    "folders": load_folders,
    "dicom": load_dicom,
    "fed-isic": load_fed_isic,
    "npz": load_npz,
}
# These learn their classes from the data; a federation fixes them, so that all hospitals mean the same by a number.
_NAMED_CLASSES = ("csv", "folders", "dicom")


def _switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise ConfigError(f"{value!r} is neither on nor off")
    return value == "on"


def _window(value: str) -> Window:
    from npr.data.dicom_pixels import Window

    level, _, width = value.partition("/")
    try:
        return Window(level=float(level), width=float(width))
    except ValueError:
        raise ConfigError(f"window {value!r} is not LEVEL/WIDTH", hint="for example 40/80") from None


def _frame(value: str) -> int | str:
    if value in ("first", "middle", "all"):
        return value
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"frame {value!r} is not first, middle, all or a number from 1 on")
    return int(value)


def _channels(value: str) -> int:
    if value not in ("1", "3"):
        raise ConfigError(f"channels {value!r} is neither 1 nor 3")
    return int(value)


def read_class_list(value: str) -> tuple[str, ...]:
    """`A,B,C`, as a source's text and a command line hold it."""
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise ConfigError("the class list holds an empty name", where="classes", hint="for example ?classes=A,B,C")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the class list names {name!r} twice", where="classes", hint="name every class once")
    return names


# A table can list several labels of an image, and generated images can have them.
_SEVERAL_LABELS = ("csv", "dicom")

# What may follow `?`, per kind, and how its value is read; `partition` may follow every kind.
_OPTIONS: dict[str, dict[str, Callable[[str], Any]]] = {
    "csv": {"classes": read_class_list},
    "folders": {"classes": read_class_list},
    "dicom": {"classes": read_class_list, "window": _window, "frame": _frame, "channels": _channels, "files": Path},
    "fed-isic": {"colour_constancy": _switch, "brightness": _switch},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceName:
    """A data set's name, taken apart."""

    kind: str
    rest: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    partition: PartitionSpec = field(default_factory=PartitionSpec)

    @classmethod
    def parse(cls, text: str) -> Self:
        name, _, query = text.partition("?")
        kind, _, rest = name.partition(":")
        if not (kind == "generated" or name == "ham10000" or (kind in _BY_PATH and rest)):
            if kind == "dicomweb":
                raise ConfigError(
                    "an archive is not read here: `site-agent archive-fetch` makes files of it",
                    hint="dicomweb: belongs into site.toml; elsewhere dicom:TABLE?files=FOLDER",
                )
            known = ", ".join(["generated", "ham10000", *(f"{name}:PATH" for name in _BY_PATH)])
            raise ConfigError(f"unknown data source {text!r}", hint=f"one of {known}")
        readers = {"partition": PartitionSpec.parse, **_OPTIONS.get(kind, {})}
        options: dict[str, Any] = {}
        for part in filter(None, query.split("&")):
            key, _, value = part.partition("=")
            if key not in readers or key in options:
                raise ConfigError(f"unexpected option {part!r}", where=name, hint=f"once each: {', '.join(readers)}")
            options[key] = readers[key](value)
        chosen = options.pop("partition", PartitionSpec())
        return cls(kind=kind, rest=rest, options=options, partition=chosen)


def data_root() -> Path:
    """The folder with real data sets; it is never guessed."""
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise ConfigError(f"{DATA_VARIABLE} is not set", hint=f"export {DATA_VARIABLE}=<folder with the data sets>")
    return Path(root)


def open_catalogue(
    source: str,
    *,
    image_size: int = 224,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    class_map: Mapping[str, str] | None = None,
    storage: ImageStorage | None = None,
    channels: int | None = None,
    labels: LabelsOfImage = "one",
) -> Catalogue:
    """Every image of `source`, cut into the sites it asks for, before a fold is chosen.

    :param class_names: the federation's classes in its order.
    :param class_map: from every name that is used here to the federation's, where they are not the same.
    :param channels: what a source gives that can give grey and colour alike and does not say itself.
    :param labels: whether an image has one class, or any number of labels.
    """
    if image_size < 8:
        raise ConfigError(f"image_size = {image_size} shows nothing", hint="use 8 or more")
    name = SourceName.parse(source)
    kept = storage or ImageStorage.from_environment()
    if kept.per_unit and name.partition != PartitionSpec():
        raise ConfigError(
            "sites cannot be dealt under differential privacy: where one patient goes would depend on all others",
            where=source,
            hint="leave out ?partition=, and name the sites in a column `site`",
        )
    if name.kind == "dicom" and channels is not None:
        name = replace(name, options={"channels": channels, **name.options})
    found = _load(name, image_size, seed, tuple(class_map) if class_map else class_names, kept, labels)
    if labels == "many" and not found.many:
        raise ConfigError(
            "this kind of source gives every image one class, and several labels are asked for",
            where=source,
            hint="list them in a table, as melanoma|ulcer (docs/data.md)",
        )
    if class_names is not None:
        found = found.with_classes(tuple(class_names), class_map)
    return partition(found, name.partition)


def _load(
    name: SourceName,
    image_size: int,
    seed: int,
    class_names: Sequence[str] | None,
    storage: ImageStorage,
    labels: LabelsOfImage,
) -> Catalogue:
    if name.kind == "generated":
        spec = GeneratedSpec.parse(name.rest, seed=seed)
        return generate(spec, image_size=image_size, storage=storage, labels=labels)
    path = data_root() / "ham10000_fed" if name.kind == "ham10000" else Path(name.rest)
    _check_readable(path)
    if name.kind == "ham10000":
        return replace(load_npz(path, image_size=image_size, storage=storage), name=name.kind)
    options = dict(name.options)
    listed = options.pop("classes", None)
    if name.kind in _NAMED_CLASSES:
        options["class_names"] = _one_list(listed, class_names)
    if name.kind in _SEVERAL_LABELS:
        options["labels"] = labels
    return _BY_PATH[name.kind](path, image_size=image_size, storage=storage, **options)


def _check_readable(path: Path) -> None:
    """Whether there is anything is for the loaders to say; they cannot look into what this user may not enter."""
    try:
        needed = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        readable = os.access(path, needed) or not path.exists()
    except OSError:  # a folder above it may not be entered, or the name is longer than a name can be
        readable = False
    if not readable:
        raise DataError("cannot be read", where=str(path), hint="this user must be able to read it")


def _one_list(listed: Sequence[str] | None, given: Sequence[str] | None) -> Sequence[str] | None:
    """A federation's classes and those of the source text must not differ: labels are numbered by their order."""
    if listed is not None and given is not None and tuple(listed) != tuple(given):
        raise ConfigError(
            "another class list than the federation's",
            where="classes",
            hint=f"leave it out, or ?classes={','.join(given)}; [data] class_map says which is which",
        )
    return listed if given is None else given


def open_dataset(
    source: str,
    *,
    fold: int | str = 0,
    folds: int = 5,
    seed: int = 0,
    image_size: int = 224,
    validation: float = 0.0,
    class_names: Sequence[str] | None = None,
    class_map: Mapping[str, str] | None = None,
    storage: ImageStorage | None = None,
    rule: SideRule | None = None,
    channels: int | None = None,
    site: str | None = None,
    labels: LabelsOfImage = "one",
) -> FederatedDataset:
    """One fold of `source`.

    :param fold: the name of a split that came with the data, or a number below `folds`.
    :param seed: of the folds made here and of generated images; not of training.
    :param validation: share of the training patients to hold out as a validation side.
    :param class_names: the federation's classes in its order, and `class_map` ours to them, as in `open_catalogue`.
    :param rule: gives the sides, by key or as they were before (npr/data/sides.py); `seed` then makes images only.
    :param site: this one alone, for data under differential privacy (`assemble`).
    """
    catalogue = open_catalogue(
        source,
        image_size=image_size,
        seed=seed,
        class_names=class_names,
        class_map=class_map,
        storage=storage,
        channels=channels,
        labels=labels,
    )
    return assemble(catalogue, fold=fold, folds=folds, seed=seed, validation=validation, rule=rule, site=site)


# Survey of a data set before training: every fault in it, not only the first, and images that occur twice. The same
# code as for training reads the tables; only images are not kept, and faults are collected. Nothing in the result names
# a patient or a file.

_AT_A_TIME = 256


@dataclass(frozen=True, eq=False, kw_only=True)
class _Undecoded(ImageStorage):
    """Takes the place of decoded images: an array of zeros that needs no memory, and a note of how to decode."""

    faults: list[Fault] = field(default_factory=list)
    decoders: list[Decode] = field(default_factory=list)

    def report(self, fault: Fault) -> None:
        self.faults.append(fault)

    def instead(self, decode: Decode, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        self.decoders.append(decode)
        return np.broadcast_to(np.zeros((), dtype=np.uint8), shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The usable rows as a catalogue without pixels, and what was wrong with the others."""

    catalogue: Catalogue
    faults: tuple[Fault, ...]
    decode: Decode

    def name(self, row: int) -> str:
        """What an error would call a row."""
        return self.catalogue.row_name(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFindings:
    """What decoding every image has shown.

    :param same: pairs of rows with the same pixels, the earlier row second.
    """

    unreadable: tuple[Fault, ...]
    same: tuple[tuple[int, int], ...]


def survey(
    source: str,
    *,
    image_size: int,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    class_map: Mapping[str, str] | None = None,
    labels: LabelsOfImage = "one",
) -> Survey:
    """Read all of a data set but its pixels.

    :raises DataError: where nothing can be listed at all, as with a table that is missing.
    """
    storage = _Undecoded()
    catalogue = open_catalogue(
        source,
        image_size=image_size,
        seed=seed,
        class_names=class_names,
        class_map=class_map,
        storage=storage,
        labels=labels,
    )
    return Survey(catalogue=catalogue, faults=tuple(storage.faults), decode=storage.decoders[0])


def inspect_images(found: Survey, rows: Sequence[int] | None = None) -> ImageFindings:
    """Decode every image once and keep its digest.

    :param rows: of the catalogue; all if not given.
    """
    chosen = range(len(found.catalogue)) if rows is None else rows
    unreadable, same, first = list[Fault](), list[tuple[int, int]](), dict[bytes, int]()
    for row, digest in zip(chosen, _digests(found, chosen), strict=True):
        if isinstance(digest, Fault):
            unreadable.append(digest)
        elif first.setdefault(digest, row) != row:
            same.append((row, first[digest]))
    return ImageFindings(unreadable=tuple(unreadable), same=tuple(same))


def _digests(found: Survey, rows: Sequence[int]) -> Iterator[bytes | Fault]:
    def digest(row: int) -> bytes | Fault:
        try:
            return hashlib.blake2b(found.decode(row).tobytes(), digest_size=16).digest()
        except DataError as error:
            return Fault(kind=FaultKind.UNREADABLE, error=error)

    with progress("checking images") as tell, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        for start in range(0, len(rows), _AT_A_TIME):
            yield from workers.map(digest, rows[start : start + _AT_A_TIME])
            tell(min(start + _AT_A_TIME, len(rows)), len(rows))
