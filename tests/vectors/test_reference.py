"""The reference against published vectors, and the committed vectors against the reference."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import generate
import pytest
from reference import curve, field, symmetric

HERE = Path(__file__).parent
unhex = bytes.fromhex


def published(name: str) -> list[Any]:
    cases = json.loads((HERE / "published" / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=f"{name}-{number}") for number, case in enumerate(cases)]


@pytest.mark.parametrize("case", published("x25519"))
def test_x25519(case: dict[str, str]) -> None:
    assert curve.x25519(unhex(case["scalar"]), unhex(case["u"])).hex() == case["out"]


@pytest.mark.parametrize("case", published("ed25519"))
def test_ed25519(case: dict[str, str]) -> None:
    assert curve.ed25519_public(unhex(case["seed"])).hex() == case["public"]
    assert curve.ed25519_sign(unhex(case["seed"]), unhex(case["message"])).hex() == case["signature"]


@pytest.mark.parametrize("case", published("hkdf"))
def test_hkdf(case: dict[str, str]) -> None:
    out = symmetric.hkdf(unhex(case["ikm"]), unhex(case["salt"]), unhex(case["info"]), len(case["okm"]) // 2)
    assert out.hex() == case["okm"]


@pytest.mark.parametrize("case", published("aes256ctr"))
def test_aes_counter_mode(case: dict[str, str]) -> None:
    plaintext = unhex(case["plaintext"])
    stream = symmetric.ctr(unhex(case["key"]), int(case["counter"], 16), len(plaintext))
    assert bytes(a ^ b for a, b in zip(plaintext, stream, strict=True)).hex() == case["ciphertext"]


@pytest.mark.parametrize("case", published("aes256gcm"))
def test_aes_gcm(case: dict[str, str]) -> None:
    parts = [unhex(case[name]) for name in ("key", "nonce", "plaintext", "associated")]
    assert symmetric.gcm_seal(*parts).hex() == case["sealed"]


@pytest.mark.parametrize("case", published("gf256"))
def test_field(case: dict[str, int]) -> None:
    assert field.multiply(case["a"], case["b"]) == case["product"]
    assert field.multiply(case["a"], field.inverse(case["a"])) == 1


def test_the_committed_vectors_are_what_the_reference_says() -> None:
    assert generate.differences() == []


def test_the_reference_shares_no_code_with_what_it_judges() -> None:
    """Else it would be no second opinion: the standard library, and for X.509 and signatures of logs `cryptography`."""
    files = [HERE / "generate.py", *(HERE / "reference").glob("*.py")]
    assert len(files) >= 9
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            outside = {"cryptography"} if path.name.startswith("audit_") else set()
            for name in names:
                known = {*sys.stdlib_module_names, "reference", *outside}
                assert name.split(".")[0] in known, f"{path.name} imports {name}"
