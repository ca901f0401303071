"""Sides: which patients are trained on, and which are held out for test and validation.

Two rules give a side to every unit (patient, lesion, study or image; below "unit"):

    KeyedSides        under differential privacy: a unit's side depends on a secret key and on that unit's id alone
    StratifiedSides   otherwise: even over sites and classes, and a unit that once had a place keeps it for good

Why two. An even split is a function of the whole table: one patient more moves others into or out of the training side,
and then what is released differs by more than one patient, which no clip bounds (docs/spec/differential-privacy.md,
section 7). A keyed hash is uneven by chance, but adding or removing a patient changes nobody else's side. In both, a
split that came with the data is used where it is asked for by name.

Ids are compared by `unit_key`, so that a hospital that writes `P-17` as `p-17` next year does not get a new patient.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from lazaret.errors import DataError
from security import labels

if TYPE_CHECKING:
    from npr.data.catalogue import Catalogue

SIDES: Final = ("train", "test", "validation")

# One unit, one spelling.

# Characters that show nothing: Unicode's Default_Ignorable_Code_Point and the blank Braille pattern. White space and
# control characters are found by their category.
_INVISIBLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_BLANK: Final = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})


@lru_cache(maxsize=1 << 16)
def unit_key(unit: str) -> str:
    """What two spellings of one id have in common: no case, no white space, one Unicode form, nothing invisible."""
    apart = _INVISIBLE.sub("", unicodedata.normalize("NFKD", unit))
    shown = "".join(letter for letter in apart if unicodedata.category(letter) not in _BLANK)
    # Folding case can make letters that have a form of their own (as of the Turkish I), so the form comes last.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", shown).casefold())


def spelt_twice(units: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Every row whose unit was written in another way before, and the first row of that unit."""
    first: dict[str, int] = {}
    for row, unit in enumerate(units):
        seen = first.setdefault(unit_key(unit), row)
        if units[seen] != unit:
            yield row, seen


def check_spelling(units: Sequence[str], *, unit_kind: str, names: Sequence[str]) -> None:
    """Raise if one unit is written in two ways: it would get two clips, and could be on two sides."""
    for row, seen in spelt_twice(units):
        raise spelling_error(unit_kind, names[row], names[seen])


def spelling_error(unit_kind: str, where: str, seen: str) -> DataError:
    """Names two rows, and never the id."""
    return DataError(
        f"the {unit_kind} is the one of {seen}, spelt in another way: only case, white space, Unicode form or "
        "invisible characters differ",
        where=where,
        hint=f"write the {unit_kind} in the same way in both rows; if they are two, give them ids that differ visibly",
    )


def check_grouped(units: Sequence[str], sides: Sequence[str], *, unit_kind: str, names: Sequence[str]) -> None:
    """Raise if a unit has rows on two sides; the error names the two rows and keeps the patient's id out."""
    for _, error in on_two_sides(units, sides, unit_kind=unit_kind, names=names):
        raise error


def on_two_sides(
    units: Sequence[str], sides: Sequence[str], *, unit_kind: str, names: Sequence[str]
) -> Iterator[tuple[int, DataError]]:
    """Every row whose unit began on another side, with what to say about it."""
    first: dict[str, int] = {}
    for row, (unit, side) in enumerate(zip(units, sides, strict=True)):
        seen = first.setdefault(unit, row)
        if sides[seen] != side:
            yield (
                row,
                DataError(
                    f"one {unit_kind} is in {side!r} here and in {sides[seen]!r} in {names[seen]}",
                    where=names[row],
                    hint=f"put all images of a {unit_kind} on one side, or omit the split; it is then made for you",
                ),
            )


# Sides by key: of one unit alone.

KEY_BYTES: Final = 32


def keyed_sides(
    units: Sequence[str], *, key: bytes, fold: int | None = 0, folds: int = 5, validation: float = 0.0
) -> tuple[str, ...]:
    """The side of every row, from HMAC-SHA-256 of its unit's id: one fold in `folds` is test, and `validation` of the
    rest is validation. Nothing is refused: a side may be empty.

    :param fold: None for no test side.
    :param key: made once, independent of the data; whoever has it and an id knows the side.
    """
    _check_shares(fold or 0, folds, validation)
    side_of: dict[str, str] = {}
    for unit in units:
        if unit not in side_of:
            digest = hmac.digest(key, labels.SIDES + unit_key(unit).encode(), hashlib.sha256)
            if int.from_bytes(digest[:8], "big") * folds >> 64 == fold:
                side_of[unit] = "test"
            else:
                held = int.from_bytes(digest[8:16], "big") < int(validation * 2**64)
                side_of[unit] = "validation" if held else "train"
    return tuple(side_of[unit] for unit in units)


def key_digest(key: bytes) -> str:
    """Names a key in the privacy ledger. The key has 256 random bits, so that nobody finds it by trying."""
    return hashlib.sha256(labels.SIDES_KEY + key).hexdigest()


def _check_shares(fold: int, folds: int, validation: float) -> None:
    if folds < 2:
        raise DataError(f"{folds} folds cannot hold a train and a test side", hint="use 2 or more")
    if not 0 <= fold < folds:
        raise DataError(f"no fold {fold}", hint=f"0 to {folds - 1}")
    if not 0.0 <= validation < 1.0:
        raise DataError(f"a holdout of {validation} leaves one side empty", hint="use a fraction between 0 and 1")


# Sides by stratum: even over sites and classes. The order of the units comes from SHA-256 and not from a library's
# generator: a published fold must be the same on every machine and with every version of numpy.


def _rank(seed: int, unit: str) -> bytes:
    return hashlib.sha256(f"{seed}\x00{unit}".encode()).digest()


def grouped_folds(
    units: Sequence[str],
    strata: Sequence[Hashable],
    *,
    folds: int,
    seed: int = 0,
    kept: Mapping[str, int] | None = None,
) -> NDArray[np.int64]:
    """The fold (0 .. folds-1) of every row; all rows of a unit get the same one.

    Stratum by stratum (site x class), larger units first, each unit goes to the fold that has the fewest rows of its
    stratum so far, and among those to the fold with the fewest rows in all: small strata spread over the folds
    instead of piling up in the first.

    :param kept: folds of units that have one already; they stay, and new units fill up around them.
    """
    if folds < 2:
        raise DataError(f"{folds} folds cannot hold a train and a test side", hint="use 2 or more")
    before = kept or {}
    rows_of: dict[str, list[int]] = {}
    for row, unit in enumerate(units):
        rows_of.setdefault(unit, []).append(row)
    if len(rows_of) < folds and not before:
        raise DataError(f"{len(rows_of)} units cannot be divided into {folds} folds", hint="use fewer folds")
    members: dict[str, list[str]] = {}
    for unit, rows in rows_of.items():
        # A unit seen at two sites is counted in the stratum that most of its rows are in; ties go by name.
        names = sorted(str(strata[row]) for row in rows)
        members.setdefault(max(names, key=names.count), []).append(unit)
    fold_of = np.empty(len(units), dtype=np.int64)
    totals = np.zeros(folds, dtype=np.int64)
    for unit in before.keys() & rows_of.keys():
        totals[before[unit]] += len(rows_of[unit])
    for stratum in sorted(members):
        held = np.zeros(folds, dtype=np.int64)
        for unit in members[stratum]:
            if unit in before:
                held[before[unit]] += len(rows_of[unit])
                fold_of[rows_of[unit]] = before[unit]
        fresh = [unit for unit in members[stratum] if unit not in before]
        for unit in sorted(fresh, key=lambda u: (-len(rows_of[u]), _rank(seed, u))):
            fold = int(np.lexsort((totals, held))[0])
            rows = rows_of[unit]
            held[fold] += len(rows)
            totals[fold] += len(rows)
            fold_of[rows] = fold
    return fold_of


def _parts(fraction: float) -> int:
    if not 0.0 < fraction < 1.0:
        raise DataError(f"a holdout of {fraction} leaves one side empty", hint="use a fraction between 0 and 1")
    return max(2, round(1.0 / min(fraction, 1.0 - fraction)))


def _held(parts: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    return np.asarray((parts == 0) if fraction <= 0.5 else (parts != 0))


@dataclass(frozen=True, slots=True)
class SidePlace:
    """Where a unit is for good.

    :ivar fold: its fold among the folds of all, or the side that a column gives it.
    :ivar part: its part among the training units, of which one is the validation side; None for a test unit, or where
        nothing is held out for validation.
    """

    fold: int | str
    part: int | None = None

    def __str__(self) -> str:
        return str(self.fold) if self.part is None else f"{self.fold}.{self.part}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse: `train`, `train.1`, `3` or `3.1`."""
        fold, _, part = text.partition(".")
        return cls(fold if fold in SIDES else int(fold), int(part) if part else None)


def stratified_places(
    units: Sequence[str],
    strata: Sequence[Hashable],
    *,
    fold: int = 0,
    folds: int = 5,
    validation: float = 0.0,
    seed: int = 0,
    given: Sequence[str] | None = None,
    kept: Mapping[str, SidePlace] | None = None,
) -> tuple[tuple[str, ...], dict[str, SidePlace]]:
    """The side of every row, and the place of every unit, to be kept and handed in again when data have been added.

    :param given: sides of a column instead of folds; validation is then taken from its training rows.
    """
    _check_shares(fold, folds, validation)
    before = kept or {}
    if given is None:
        numbers = {unit: place.fold for unit, place in before.items() if isinstance(place.fold, int)}
        dealt = grouped_folds(units, strata, folds=folds, seed=seed, kept=numbers)
        sides = np.where(dealt == fold, "test", "train").astype("U10")
        places = {unit: SidePlace(int(found)) for unit, found in zip(units, dealt, strict=True)}
    else:
        sides = np.array(given, dtype="U10")
        places = {unit: SidePlace(side) for unit, side in zip(units, given, strict=True) if side}
    rows = np.flatnonzero(sides == "train").tolist()
    if validation > 0.0 and rows:
        trained = [units[row] for row in rows]
        part_of = grouped_folds(
            trained,
            [strata[row] for row in rows],
            folds=_parts(validation),
            seed=seed + 1,
            kept={unit: place.part for unit, place in before.items() if place.part is not None},
        )
        sides[np.array(rows)[_held(part_of, validation)]] = "validation"
        places |= {unit: replace(places[unit], part=int(p)) for unit, p in zip(trained, part_of, strict=True)}
    return tuple(sides.tolist()), places


# Rules: from a catalogue to the side of each row. "" is no side: the row is not used.

SideRule = Callable[["Catalogue"], Sequence[str]]


def fold_of(catalogue: Catalogue, fold: int | str, folds: int) -> int | str:
    """`fold` as the name of a split that came with the data, or as a number below `folds`."""
    if isinstance(fold, str) and fold in catalogue.splits:
        return fold
    number = int(fold) if isinstance(fold, str) and fold.isdecimal() else fold
    if not isinstance(number, int) or not 0 <= number < folds:
        known = ", ".join([*catalogue.splits, f"0 to {folds - 1}"])
        raise DataError(f"no fold {fold!r}", where=catalogue.name, hint=f"one of {known}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedSides:
    """For data under differential privacy (`keyed_sides`)."""

    key: bytes = field(repr=False)
    fold: int | str = 0
    folds: int = 5
    validation: float = 0.0

    def __call__(self, catalogue: Catalogue) -> tuple[str, ...]:
        fold = fold_of(catalogue, self.fold, self.folds)
        made = keyed_sides(
            catalogue.units,
            key=self.key,
            fold=fold if isinstance(fold, int) else None,
            folds=self.folds,
            validation=self.validation,
        )
        if isinstance(fold, int):
            return made
        # A patient on two sides is on that of the first row, whatever the source says of its split.
        named, side_of = zip(catalogue.units, catalogue.splits[fold].sides, strict=True), dict[str, str]()
        given = [side_of.setdefault(unit, side) for unit, side in named]
        return tuple(own if side == "train" else side for side, own in zip(given, made, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBook:
    """Where every unit of a site is, as a file of the site. Units are named by a keyed digest, not by their ids.

    :ivar rule: the settings that the places were made with. With others, a unit's place would mean another side.
    """

    rule: str = ""
    places: Mapping[str, SidePlace] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        listed = {name: str(place) for name, place in self.places.items()}
        return json.dumps({"format": 1, "rule": self.rule, "places": listed}, indent=0, sort_keys=True).encode() + b"\n"

    @classmethod
    def of_bytes(cls, data: bytes, *, where: str) -> Self:
        try:
            found = json.loads(data)
            if found["format"] != 1:
                raise ValueError
            places = {str(name): SidePlace.parse(text) for name, text in found["places"].items()}
            return cls(rule=str(found["rule"]), places=places)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(
                "the list of sides is damaged",
                where=where,
                hint="restore the newest copy; without it a model may be tested on patients it was trained on",
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StratifiedSides:
    """Even sides that stay (`stratified_places`).

    :param key: names units in the book.
    :param book: what is known so far.
    :param keep: makes a new book durable; called before the sides are used, and only where something was added.
    """

    key: bytes = field(repr=False)
    book: SideBook
    keep: Callable[[SideBook], None]
    fold: int | str = 0
    folds: int = 5
    validation: float = 0.0
    seed: int = 0

    def __call__(self, catalogue: Catalogue) -> tuple[str, ...]:
        fold = fold_of(catalogue, self.fold, self.folds)
        called = f"column {fold}" if isinstance(fold, str) else f"fold {fold} of {self.folds}"
        rule = f"{called}, validation {self.validation:g}"
        if self.book.rule not in ("", rule):
            raise DataError(
                f"the sides of this site's data were made by {self.book.rule!r} and are asked for by {rule!r}: a model "
                "would be tested on what it was trained on",
                where="[data] fold, folds, validation",
                hint="set them back; other sides need a state folder of their own, and a new run",
            )
        name_of = {unit: self._name(unit) for unit in dict.fromkeys(catalogue.units)}
        kept = {unit: self.book.places[name] for unit, name in name_of.items() if name in self.book.places}
        sides, made = stratified_places(
            catalogue.units,
            catalogue.strata,
            fold=fold if isinstance(fold, int) else 0,
            folds=self.folds,
            validation=self.validation,
            seed=self.seed,
            given=catalogue.splits[fold].sides if isinstance(fold, str) else None,
            kept=kept,
        )
        self._check_moved(catalogue, made, kept)
        every = {**self.book.places, **{name_of[unit]: place for unit, place in made.items()}}
        if every != self.book.places:
            self.keep(SideBook(rule=rule, places=every))
        return sides

    def _name(self, unit: str) -> str:
        return hmac.digest(self.key, labels.SIDES + unit_key(unit).encode(), hashlib.sha256).hex()[:32]

    def _check_moved(
        self, catalogue: Catalogue, made: Mapping[str, SidePlace], kept: Mapping[str, SidePlace]
    ) -> None:
        """A column is the hospital's word, and it holds for good."""
        for row, unit in enumerate(catalogue.units):
            now, before = made.get(unit), kept.get(unit)
            if now is not None and before is not None and now.fold != before.fold:
                raise DataError(
                    f"one {catalogue.unit_kind} is in {now.fold!r} now and was in {before.fold!r} before",
                    where=catalogue.row_name(row),
                    hint=f"put it back: a {catalogue.unit_kind} keeps its side, so that no model is tested on what it "
                    "was trained on",
                )


_LETTERS: Final = {"train": "r", "test": "e", "validation": "v", "": "-"}


def encode_sides(sides: Sequence[str]) -> str:
    """One letter for each row, for another process with the same data that has neither key nor book."""
    return "".join(_LETTERS[side] for side in sides)


@dataclass(frozen=True, slots=True)
class EncodedSides:
    """The rule of that other process."""

    letters: str

    def __call__(self, catalogue: Catalogue) -> tuple[str, ...]:
        if len(self.letters) != len(catalogue):
            raise DataError("these are not the rows that were divided", where=catalogue.where or catalogue.name)
        sides = {letter: side for side, letter in _LETTERS.items()}
        return tuple(sides[letter] for letter in self.letters)
