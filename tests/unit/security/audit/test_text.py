"""Quantities, times and names for people."""

from __future__ import annotations

from security.audit.text import plain, quantity, when


def test_words_for_people() -> None:
    assert [quantity(number) for number in (0, 999, 1500, 5_100_000_000, 10**15)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "5.1 GB",
        "1000.0 TB",
    ]
    assert plain("a\x1b[31m\u202eb") == "a?[31m?b"
    assert when(253_402_300_799) == "9999-12-31 23:59Z" and when(2**63 - 1) == "after the year 9999"
