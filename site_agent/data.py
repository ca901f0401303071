"""This hospital's images. Nothing about them leaves but a fingerprint under the site's own key, in its own log."""

from __future__ import annotations

import hashlib
import hmac

from npr.data.dataset import FederatedDataset, SiteData
from npr.data.sources import open_dataset
from security.errors import ConfigError, DataError
from site_agent.config import DataTable


def open_data(table: DataTable, *, site: str, image_size: int, classes: int) -> tuple[FederatedDataset, SiteData]:
    """The data set and our part of it."""
    dataset = open_dataset(
        table.source,
        fold=table.fold,
        folds=table.folds,
        seed=table.seed,
        image_size=image_size,
        validation=float(table.validation),
        class_names=table.class_names,
    )
    if dataset.num_classes != classes:
        raise DataError(
            f"{dataset.num_classes} classes where the federation has {classes}",
            where=table.source,
            hint="set [data] class_names to the federation's classes in its order",
        )
    return dataset, _ours(dataset, table.site or site, single=table.site is None)


def _ours(dataset: FederatedDataset, name: str, *, single: bool) -> SiteData:
    for found in dataset.sites:
        if found.name == name:
            return found
    if single and len(dataset.sites) == 1:
        return dataset.sites[0]
    known = ", ".join(found.name for found in dataset.sites[:8])
    raise ConfigError(f"the source has no site {name!r}", where="[data] site", hint=f"it has {known}")


def fingerprint(dataset: FederatedDataset, data: SiteData, key: bytes) -> str:
    """Names the data in the log. Keyed, because hashes of small data sets can be guessed."""
    told = f"{dataset.fingerprint}\n{data.name}\n{len(data.train)}\n{len(data.test)}"
    return hmac.new(key, told.encode(), hashlib.sha256).hexdigest()
