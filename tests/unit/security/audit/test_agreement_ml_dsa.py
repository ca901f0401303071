"""Which manifests an ML-DSA signature reaches, over gaps and against forged ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from security.audit.agreement import unconfirmed
from security.identity.manifest import Manifest
from tests.support.consortium_world import World

KEY, OTHER = "aa" * 1952, "bb" * 1952
REJECTED, UNSURE = "ManifestRejected", "OneSignature"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Versions 1 to 5; ML-DSA from version 4 on."""
    versions = [World.make(tmp_path_factory.mktemp("world")).publish()]
    for version in range(2, 6):
        update = {"version": version, "previous": versions[-1].digest.hex()}
        versions.append(versions[-1].model_copy(update={**update, "root_ml_dsa": KEY if version >= 4 else None}))
    return versions


def judged(found: Iterable[Manifest], known: str | None, beside: Sequence[Manifest] = ()) -> dict[int, str]:
    named = {one.digest.hex(): one for one in found}
    return {named[digest].version: code for digest, code, _ in unconfirmed(named, known, beside)}


def picked(chain: Sequence[Manifest], *versions: int) -> list[Manifest]:
    return [one for one in chain if one.version in versions]


@pytest.mark.parametrize(
    ("here", "beside", "found"),
    [
        ((1, 2, 3, 4, 5), (), {}),
        ((3, 4), (), {}),
        ((1, 4), (), {1: UNSURE}),
        ((1, 2, 4), (), {1: UNSURE, 2: UNSURE}),
        ((1, 3, 4), (), {1: UNSURE}),
        ((1, 4), (3,), {1: UNSURE}),
        ((1, 4), (2,), {1: UNSURE}),
        ((1, 4), (2, 3), {}),
        ((1, 5), (1, 2, 3, 4), {}),
        ((1, 2), (), {1: UNSURE, 2: UNSURE}),
        ((1, 2), (3, 4), {}),
        ((1, 2), (4,), {1: UNSURE, 2: UNSURE}),
    ],
)
def test_a_version_counts_where_later_ones_lead_to_it(
    chain: list[Manifest], here: tuple[int, ...], beside: tuple[int, ...], found: dict[int, str]
) -> None:
    """What a missing version could tell is not decided; what the auditor's own key does not ask for is not asked."""
    assert judged(picked(chain, *here), KEY, picked(chain, *beside)) == found
    assert judged(picked(chain, *here), None, picked(chain, *beside)) == {}


@pytest.mark.parametrize(
    ("version", "key", "beside", "code"),
    [
        (3, None, (), REJECTED),  # version 4 names another one
        (2, None, (), UNSURE),
        (2, None, (3,), REJECTED),
        (4, None, (), REJECTED),  # there is no way back
        (6, None, (), REJECTED),
        (2, OTHER, (), REJECTED),  # there is one key
        (6, OTHER, (), REJECTED),
    ],
)
def test_a_forged_one_is_rejected_where_it_cannot_be_genuine(
    chain: list[Manifest], version: int, key: str | None, beside: tuple[int, ...], code: str
) -> None:
    forged = chain[0].model_copy(update={"version": version, "previous": "00" * 32, "root_ml_dsa": key})
    assert judged([*picked(chain, 4, 5), forged], KEY, picked(chain, *beside)) == {version: code}


def test_a_forged_one_in_another_folder_changes_nothing_here(chain: list[Manifest]) -> None:
    """Whatever it names: without the root's signature nothing in it counts, also where the auditor has no key."""
    forged = chain[0].model_copy(update={"version": 2, "previous": "00" * 32, "root_ml_dsa": OTHER})
    assert judged(chain, KEY, [forged]) == {} == judged(chain, None, [forged])
    assert judged(picked(chain, 1, 4), KEY, [forged]) == {1: UNSURE}


def test_without_the_auditors_key_the_folders_own_first_key_counts(chain: list[Manifest]) -> None:
    bare = chain[0].model_copy(update={"version": 6, "previous": chain[-1].digest.hex()})
    other = bare.model_copy(update={"root_ml_dsa": OTHER})
    assert judged([*chain, bare], None) == {6: REJECTED} == judged([*chain, other], None)
