"""Phrases that two people compare over the telephone."""

from __future__ import annotations

import hashlib

import pytest

from security.identity.pki import grouped, phrase, same_fingerprint

ONE = hashlib.sha256(b"one").hexdigest()


def test_a_word_is_sixteen_bits_in_five_letters() -> None:
    """By hand: 0x7f00 is 0111 11 1100 00 0000, so l u s a b; 0x0001 is b a b a d."""
    assert phrase("7f000001" + "ffff" * 4 + "0" * 40) == "lusab babad zuzuz zuzuz zuzuz zuzuz"


def test_every_bit_of_the_phrase_counts() -> None:
    value = int(ONE, 16)
    others = {phrase(f"{value ^ (1 << 255 - bit):064x}") for bit in range(96)}
    assert len(others) == 96 and phrase(ONE) not in others


def test_digits_and_phrase_are_taken_however_they_are_typed() -> None:
    for typed in (ONE, grouped(ONE), ONE.upper(), phrase(ONE), phrase(ONE).upper(), phrase(ONE).replace(" ", "-")):
        assert same_fingerprint(ONE, typed)


@pytest.mark.parametrize("wrong", ["", "kusab", ONE[:63], ONE[:-1] + "x", phrase(ONE)[:-1], phrase(ONE) + " babab"])
def test_a_part_or_more_of_it_is_not_enough(wrong: str) -> None:
    assert not same_fingerprint(ONE, wrong)


def test_what_is_no_fingerprint_equals_nothing() -> None:
    assert not same_fingerprint("", "") and not same_fingerprint(ONE[:24], ONE[:24])
