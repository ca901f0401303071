"""What can be wrong with one image or row, by kind: training stops at the first, a survey lists them all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from security.errors import DataError


class Kind(StrEnum):
    LABEL = "label outside the classes"
    SPLIT = "unknown split"
    REPEATED = "image listed twice"
    MISSING = "missing file"
    UNREADABLE = "unreadable image"
    TWO_SIDES = "patient, lesion or study on two sides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them, as the error that it is when nobody collects."""

    kind: Kind
    error: DataError
