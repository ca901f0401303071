"""Keys, context and commitments against every choice of a symbolic attacker; the table is in the specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.symbolic import CHECKS, Attacker, attacks, dh, kdf

PAGE = Path(__file__).parents[2] / "docs" / "spec" / "secure-aggregation.md"
ONE = ((), ("x25519",), ("ml-kem",))


@pytest.mark.parametrize("broken", ONE, ids=["nothing", "x25519", "ml-kem"])
def test_all_promises_hold_while_one_agreement_holds(broken: tuple[str, ...]) -> None:
    assert attacks(broken=broken) == set()


def test_with_both_agreements_broken_nothing_is_secret() -> None:
    """Also a test of the attacker: it finds what is there to be found."""
    assert attacks(broken=("x25519", "ml-kem")) == {"mask", "shares"}


@pytest.mark.parametrize("check", CHECKS)
def test_twin_without_a_check_the_attacker_breaks_a_promise(check: str) -> None:
    assert any(attacks([check], broken) for broken in ONE)


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for check, meaning in {"": "all checks", **CHECKS}.items():
        cells = (", ".join(sorted(attacks([check] if check else [], broken))) or "-" for broken in ONE)
        name = meaning if not check else f"without: {meaning}"
        assert f"| {name} | {' | '.join(cells)} |" in text


def test_what_the_attacker_can_derive() -> None:
    knows = Attacker([("box", kdf("k"), "m"), "k", ("x-pub", "a"), ("signed", "key", "said")], ())
    assert knows.makes("m") and knows.makes("said") and knows.makes(("hash", "m"))
    assert not knows.makes("a") and not knows.makes("key") and not knows.makes(("signed", "key", "m"))
    assert not knows.makes(dh("a", ("x-pub", "b")))
    assert Attacker([("x-pub", "a"), "b"], ()).makes(dh("a", ("x-pub", "b")))
    assert Attacker([("x-pub", "a"), ("x-pub", "b")], ["x25519"]).makes(dh("a", ("x-pub", "b")))
    assert not Attacker([("kem", ("kem-pub", "s"), "m")], ["x25519"]).makes("m")
    assert Attacker([("kem", ("kem-pub", "s"), "m")], ["ml-kem"]).makes("m")
