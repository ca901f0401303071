"""Fingerprints as two people compare them: hexadecimal digits in groups of four, or a short phrase.

The phrase is made of the first 96 bits, 16 to a word of five letters, consonants and vowels in turn: it can be spoken
over a telephone. Who wanted to have another root or request taken for this one would need about 2^96 trials.
"""

from __future__ import annotations

from typing import Final

WORDS: Final = 6
_CONSONANTS: Final = "bdfghjklmnprstvz"
_VOWELS: Final = "aiou"


def grouped(text: str) -> str:
    """Hex in groups of four, as people read it out."""
    return " ".join(text[at : at + 4] for at in range(0, len(text), 4))


def phrase(fingerprint: str) -> str:
    """Six words for a fingerprint of 64 hexadecimal digits."""
    bits = bytes.fromhex(_bare(fingerprint))
    if len(bits) < 2 * WORDS:
        raise ValueError("a fingerprint is too short for a phrase")
    return " ".join(_word(int.from_bytes(bits[2 * at : 2 * at + 2])) for at in range(WORDS))


def _word(value: int) -> str:
    """16 bits as five letters: 4, 2, 4, 2 and 4 of them."""
    consonants, vowels = (value >> 12, (value >> 6) & 15, value & 15), ((value >> 10) & 3, (value >> 4) & 3)
    first, second, third = (_CONSONANTS[at] for at in consonants)
    return first + _VOWELS[vowels[0]] + second + _VOWELS[vowels[1]] + third


def same_fingerprint(fingerprint: str, announced: str) -> bool:
    """Whether what a person has typed is this fingerprint: all its digits, or all words of its phrase."""
    known = _bare(fingerprint)
    if len(known) != 64:
        return False
    return _bare(announced) in (known, _bare(phrase(known)))


def _bare(text: str) -> str:
    return "".join(text.split()).replace(":", "").replace("-", "").lower()
