"""This hospital's images. Nothing about them leaves but a fingerprint under the site's own key, in its own log."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from lazaret import files
from lazaret.errors import ConfigError, DataError
from npr.config import LabelsOfImage
from npr.data.dataset import FederatedDataset, SiteData
from npr.data.sides import KeyedSides, SideBook, SideRule, StratifiedSides, encode_sides
from npr.data.sources import SourceName, open_dataset
from npr.data.store import Fault, ImageStorage, PerUnitStorage
from security.identity.manifest import Manifest
from site_agent.config import DataTable, SiteConfig
from site_agent.privacy import read_sides_key
from site_agent.trainer.channel import DataReady

DEFAULT_IMAGE_SIZE = 224
_SHOWN = 5

say = logging.getLogger("site-agent")


class SideShares(TypedDict):
    fold: int | str
    folds: int
    validation: float


def open_data(
    table: DataTable,
    *,
    site: str,
    image_size: int,
    classes: Sequence[str],
    channels: int | None = None,
    rule: SideRule | None = None,
    private: bool = False,
    labels: LabelsOfImage = "one",
) -> tuple[FederatedDataset, SiteData]:
    """The data set and our part of it.

    :param classes: the federation's, by the manifest; never those that occur, which would tell who is here.
    :param channels: of the federation's model.
    :param rule: who is on which side (`side_rule`).
    :param private: under differential privacy nothing that depends on several patients happens here, and nothing is
        refused because of one (docs/spec/differential-privacy.md, section 2a). Generated images are nobody's.
    :param labels: of an image, by the manifest's settings.
    """
    name = SourceName.parse(table.source)
    private = private and name.kind != "generated"
    each = PerUnitStorage(cache_dir=ImageStorage.from_environment().cache_dir)
    dataset = open_dataset(
        table.source,
        fold=table.fold,
        folds=table.folds,
        seed=table.seed,
        image_size=image_size,
        validation=float(table.validation),
        class_names=classes,
        class_map=table.class_map,
        channels=channels,
        rule=rule,
        storage=each if private else None,
        site=(table.site or site) if private else None,
        labels=labels,
    )
    if private:
        _tell_left_out(each.faults, dataset)
    return dataset, ours(dataset, table, site)


def _tell_left_out(faults: Sequence[Fault], dataset: FederatedDataset) -> None:
    """For the hospital's own eyes: neither the federation nor the privacy log is told."""
    for fault in faults[:_SHOWN]:
        say.warning("left out: %s", fault.error)
    if faults:
        say.warning("%d rows are left out in all, as `site-agent check` lists; correct them when you can", len(faults))
    if not any(len(site.train) for site in dataset.sites):
        say.warning("there is no image to train on: this site sends only noise, and its privacy budget is still used")


def side_rule(config: SiteConfig, manifest: Manifest, data_key: bytes, *, keep: bool = True) -> SideRule:
    """Who is on which side: by a key of this site under differential privacy, else evenly and for good.

    :param keep: write down the sides of new patients. Commands that only look do not.
    :raises LedgerError: if the key is lost.
    :raises DataError: if the list is lost or damaged, or was made with other settings.
    """
    table = config.data
    shares: SideShares = {"fold": table.fold, "folds": table.folds, "validation": float(table.validation)}
    if manifest.privacy is not None:
        if config.privacy.metrics_noise is None:
            shares["validation"] = 0.0  # nobody is held out for a validation that is off
        return KeyedSides(key=read_sides_key(config), **shares)
    path = config.sides / "list.json"

    def write(book: SideBook) -> None:
        if keep:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_atomically(path, book.to_bytes(), mode=0o600)

    return StratifiedSides(key=data_key, book=_side_book(path), keep=write, seed=table.seed, **shares)


def _side_book(path: Path) -> SideBook:
    if path.exists():
        return SideBook.of_bytes(files.read_private(path), where=str(path))
    if any((path.parents[1] / "memory").glob("*.safetensors")):
        raise DataError(
            "the list of which patients train is missing, and rounds were trained with it",
            where=str(path),
            hint="restore it from a backup; without it a model would be tested on patients it was trained on",
        )
    return SideBook()


def image_size_of(manifest: Manifest) -> int:
    """The side of the square that images are brought to, by the manifest's settings."""
    return int(float(manifest.training.settings.get("model.image_size", DEFAULT_IMAGE_SIZE)))


def labels_by(manifest: Manifest) -> LabelsOfImage:
    """Whether an image has one label or several, by the manifest's settings."""
    return "many" if manifest.training.settings.get("labels") == "many" else "one"


def ours(dataset: FederatedDataset, table: DataTable, site: str) -> SiteData:
    """This site's part: the one that the table names, else the one of our own name, else the only one."""
    name = table.site or site
    for found in dataset.sites:
        if found.name == name:
            return found
    if table.site is None and len(dataset.sites) == 1:
        return dataset.sites[0]
    known = ", ".join(found.name for found in dataset.sites[:8])
    raise ConfigError(f"the source has no site {name!r}", where="[data] site", hint=f"it has {known}")


def summary(dataset: FederatedDataset, data: SiteData, key: bytes, *, version: str | None = None) -> DataReady:
    """How many images of each class each side holds, for this hospital only; and what the data are called in the log.

    :param version: the hospital's name of the data, under differential privacy. Were it the content, a change of one
        patient would show: in the log, and because counts are released again.
    """
    sides = {"train": data.train, "validation": data.validation, "test": data.test}
    counts = {side: tuple(samples.class_counts().tolist()) for side, samples in sides.items() if samples is not None}
    content = fingerprint(dataset, data, key)
    return DataReady(
        fingerprint=content,
        version=content if version is None else _keyed(key, f"version\n{data.name}\n{version}"),
        subjects=len({unit for samples in sides.values() if samples is not None for unit in samples.units}),
        class_names=tuple(dataset.class_names),
        counts=counts,  # type: ignore[arg-type]
        images={side: len(samples) for side, samples in sides.items() if samples is not None}  # type: ignore[misc]
        if data.train.many
        else None,
    )


def fingerprint(dataset: FederatedDataset, data: SiteData, key: bytes) -> str:
    """Of the content: images, labels, patients and sides. Keyed, because hashes of small data sets can be guessed."""
    return _keyed(key, f"{dataset.fingerprint}\n{data.name}\n{encode_sides(dataset.sides)}")


def _keyed(key: bytes, described: str) -> str:
    return hmac.new(key, described.encode(), hashlib.sha256).hexdigest()
