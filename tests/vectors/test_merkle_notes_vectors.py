"""Trees and notes: our code against vectors of an independent reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference import merkle_notes_generate, merkle_notes_trees

from lazaret.errors import ToolkitError
from security.crypto import merkle
from security.log.note import Note, VerifierKey, checkpoint_of

HERE = Path(__file__).parent
Case = dict[str, Any]


def _cases(topic: str) -> list[Any]:
    return [pytest.param(json.loads(path.read_text()), id=path.stem) for path in sorted((HERE / topic).glob("*.json"))]


def test_vectors_are_those_of_the_reference() -> None:
    made = dict(merkle_notes_generate.files())
    present = {path for topic in merkle_notes_generate.TOPICS for path in (HERE / topic).glob("*.json")}
    assert present == set(made)
    assert all(path.read_text() == text for path, text in made.items())


def _hashes(values: list[str]) -> list[bytes]:
    return [bytes.fromhex(value) for value in values]


def _run_tree(case: Case) -> None:
    if case["kind"] == "root":
        leaves = [merkle.leaf_hash(data) for data in _hashes(case["data"])]
        assert merkle.root(leaves).hex() == case["root"]
        assert merkle.Tree(leaves).root().hex() == case["root"]
    elif case["kind"] == "inclusion":
        merkle.verify_inclusion(
            leaf=bytes.fromhex(case["leaf"]),
            index=case["index"],
            size=case["size"],
            path=_hashes(case["path"]),
            root=bytes.fromhex(case["root"]),
        )
    else:
        merkle.verify_consistency(
            old_size=case["old_size"],
            old_root=bytes.fromhex(case["old_root"]),
            new_size=case["new_size"],
            new_root=bytes.fromhex(case["new_root"]),
            path=_hashes(case["path"]),
        )


@pytest.mark.parametrize("case", _cases("merkle"))
def test_trees(case: Case) -> None:
    if case["expect"] == "ok":
        _run_tree(case)
        return
    with pytest.raises(ToolkitError) as raised:
        _run_tree(case)
    assert raised.value.code == case["expect"]


def test_our_proofs_are_the_references() -> None:
    data = [bytes([number]) * number for number in range(33)]
    tree = merkle.Tree(merkle.leaf_hash(item) for item in data)
    for size in range(1, 34):
        part = data[:size]
        assert tree.root(size) == merkle_notes_trees.mth(part)
        assert all(list(tree.inclusion_path(i, size)) == merkle_notes_trees.path(i, part) for i in range(size))
        assert all(list(tree.consistency_path(m, size)) == merkle_notes_trees.proof(m, part) for m in range(1, size))


# The tree of eight leaves that implementations of Certificate Transparency (RFC 6962) have in their tests.
KNOWN_LEAVES = ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
KNOWN_ROOTS = (
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)


def test_roots_that_the_field_knows() -> None:
    data = _hashes(list(KNOWN_LEAVES))
    for size, known in enumerate(KNOWN_ROOTS, start=1):
        assert merkle.root([merkle.leaf_hash(item) for item in data[:size]]).hex() == known
        assert merkle_notes_trees.mth(data[:size]).hex() == known


@pytest.mark.parametrize("case", _cases("notes"))
def test_notes(case: Case) -> None:
    def run() -> dict[str, int | None]:
        note = Note.parse(bytes.fromhex(case["note"]))
        assert note.encode().hex() == case["note"]
        verified = note.verify([VerifierKey.parse(key) for key in case["keys"]])
        head = checkpoint_of(note)
        assert (head.origin, head.size, head.root.hex()) == (case["origin"], case["size"], case["root"])
        return {key.name: time for key, time in verified.items()}

    if case["expect"] == "ok":
        assert run() == case["verified"]
        return
    with pytest.raises(ToolkitError) as raised:
        run()
    assert raised.value.code == case["expect"]


@pytest.mark.parametrize("key", json.loads((HERE / "notes" / "signed.json").read_text())["keys"])
def test_verifier_keys_read_back(key: str) -> None:
    assert str(VerifierKey.parse(key)) == key
    for bad in (key[:-1], key.replace("+", "-", 1), key.replace("example", "exampel")):
        with pytest.raises(ToolkitError):
            VerifierKey.parse(bad)
