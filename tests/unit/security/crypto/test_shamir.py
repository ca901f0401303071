"""Sharing: what t-1 holders see, how wrong use is refused."""

from __future__ import annotations

import itertools

import pytest

from lazaret.errors import LocalProtocolError
from security.crypto import shamir
from security.rng import CountedRandomness, SystemRandomness
from security.secagg.context import share_hash
from security.secrets import Secret


def test_any_quorum_and_nothing_less() -> None:
    secret = Secret(bytes(range(32)))
    shares = shamir.split(secret, threshold=3, holders=5, randomness=SystemRandomness())
    for chosen in itertools.combinations(range(5), 3):
        assert shamir.join({x + 1: shares[x] for x in chosen}, threshold=3) == secret
    for chosen in itertools.combinations(range(5), 2):
        assert shamir.join({x + 1: shares[x] for x in chosen}, threshold=2) != secret


def test_two_of_three_shares_fit_every_secret() -> None:
    """Given one share of two, each value of the secret's byte is met by exactly one other share."""
    known = Secret(bytes([7] * 32))
    secrets = set()
    for value in range(256):
        joined = shamir.join({1: known, 2: Secret(bytes([value] * 32))}, threshold=2)
        secrets.add(joined.reveal()[0])
    assert len(secrets) == 256


def test_shares_at_wrong_positions_do_not_join() -> None:
    shares = shamir.split(Secret(bytes(32)), threshold=2, holders=3, randomness=CountedRandomness(b"swap"))
    assert shamir.join({1: shares[1], 2: shares[0]}, threshold=2) != Secret(bytes(32))


def test_all_255_holders() -> None:
    secret = Secret(bytes(range(100, 132)))
    shares = shamir.split(secret, threshold=255, holders=255, randomness=SystemRandomness())
    assert len({share.reveal() for share in shares}) == 255
    assert shamir.join({x + 1: share for x, share in enumerate(shares)}, threshold=255) == secret


@pytest.mark.parametrize(("threshold", "holders"), [(0, 3), (4, 3), (2, 256), (-1, 1)])
def test_impossible_sharings(threshold: int, holders: int) -> None:
    with pytest.raises(LocalProtocolError):
        shamir.split(Secret(bytes(32)), threshold=threshold, holders=holders, randomness=SystemRandomness())


def test_only_32_byte_secrets() -> None:
    with pytest.raises(LocalProtocolError):
        shamir.split(Secret(bytes(31)), threshold=2, holders=3, randomness=SystemRandomness())


@pytest.mark.parametrize("positions", [(0, 1), (1, 1), (1, 256)])
def test_positions_are_distinct_field_elements(positions: tuple[int, ...]) -> None:
    with pytest.raises(LocalProtocolError):
        shamir.lagrange_weights(positions)


def test_share_hashes_bind_attempt_dealer_holder_and_kind() -> None:
    share = Secret(bytes(32))
    base = {"kx": bytes(32), "dealer": "12", "holder": "3", "kind": "b"}
    changes: list[dict[str, object]] = [{}, {"kx": b"\1" * 32}, {"dealer": "1", "holder": "23"}, {"kind": "s"}]
    hashes = {share_hash(share, **(base | change)) for change in changes}  # type: ignore[arg-type]
    assert len(hashes) == 4
