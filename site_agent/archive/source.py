"""`dicomweb:URL?option=value&...`: which studies of which archive, and the local source that they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from lazaret.errors import ConfigError

KIND: Final = "dicomweb:"
# Passed on to the archive's search of studies, as they are (DICOM PS3.18 section 10.6).
FILTERS: Final[tuple[str, ...]] = (
    "StudyDate", "ModalitiesInStudy", "StudyDescription", "StudyInstanceUID", "AccessionNumber"
)  # fmt: skip
# Passed on to `dicom:`, which reads the files.
_LOCAL: Final = ("classes", "window", "frame", "channels")
_KNOWN: Final = ("labels", "modality", *_LOCAL, *FILTERS)
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSource:
    """A source, taken apart.

    :ivar labels: the table whose rows name the studies; None where `filters` choose them.
    :ivar modalities: of the series to take; all that hold images if empty.
    :ivar local: options of the files, for whoever reads them.
    """

    url: str
    labels: Path | None = None
    modalities: tuple[str, ...] = ()
    filters: Mapping[str, str] = field(default_factory=dict)
    local: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, base: Path) -> Self:
        """:param base: where a relative path starts.

        :raises ConfigError: which repeats no value: a secret or a patient's number may have been written there.
        """
        if not text.startswith(KIND):
            raise ConfigError("this is no archive", hint="dicomweb:https://HOST/PATH?labels=TABLE")
        url, _, query = text.removeprefix(KIND).partition("?")
        check_url(url)
        options: dict[str, str] = {}
        for part in filter(None, query.split("&")):
            key, _, value = part.partition("=")
            if key not in _KNOWN or key in options or not value:
                raise ConfigError(
                    f"option {key if key in _KNOWN else len(options) + 1} of the archive is unknown, repeated or empty",
                    where="dicomweb:",
                    hint=f"once each: {', '.join(_KNOWN)}",
                )
            options[key] = value
        labels = options.get("labels")
        filters = {name: options[name] for name in FILTERS if name in options}
        if labels and filters:
            raise ConfigError(
                "a table of labels says which studies are taken; a search would say it a second time",
                where="dicomweb:",
                hint=f"leave out {', '.join(filters)}",
            )
        return cls(
            url=url.rstrip("/"),
            labels=(base / labels).resolve() if labels else None,
            modalities=tuple(name.strip() for name in options.get("modality", "").split(",") if name.strip()),
            filters=filters,
            local={name: options[name] for name in _LOCAL if name in options},
        )

    def local_source(self, cache: Path) -> str:
        """What the trainer reads: the same table, over the files that were fetched."""
        if self.labels is None:
            raise ConfigError("labels= is missing", where="site.toml [data] source", hint="?labels=TABLE")
        options = {"files": str(cache), **self.local}
        return f"dicom:{self.labels}?" + "&".join(f"{name}={value}" for name, value in options.items())


def absolute(text: str, base: Path) -> str:
    """The same source with the whole path of its table."""
    found = ArchiveSource.parse(text, base)
    head, _, query = text.partition("?")
    parts = [f"labels={found.labels}" if part.startswith("labels=") else part for part in query.split("&")]
    return f"{head}?{'&'.join(parts)}"


def check_url(url: str) -> None:
    """Images and secrets travel there. Repeats nothing of it, because it may hold a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ConfigError("the archive's address cannot be read", where="dicomweb:", hint="https://HOST/PATH") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "the archive's address holds a login", where="dicomweb:", hint="write it to a file: [archive] login_file"
        )
    if not host or parts.fragment or parts.query or not url.isprintable() or " " in url:
        raise ConfigError("the archive's address cannot be read", where="dicomweb:", hint="https://HOST/PATH")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK):
        raise ConfigError(
            "the archive's address is not https: others could read images and login on the way",
            where="dicomweb:",
            hint="https://HOST/PATH; http is for this machine alone",
        )
