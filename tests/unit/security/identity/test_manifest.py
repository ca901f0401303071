"""The manifest's bytes: one form, no floats, no unknown key; and every field counts in the digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from lazaret.errors import OTHER_VERSION, ManifestRejected
from security.identity import acceptance
from security.identity.acceptance import seal, unseal
from security.identity.manifest import Manifest, decimal_text, real
from tests.support.consortium_world import PLAN, PRIVACY, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World.make(tmp_path_factory.mktemp("world"))
    made.write_plan(PLAN + PRIVACY)
    made.publish()
    return made


@pytest.fixture(scope="module")
def told(world: World) -> dict[str, Any]:
    return json.loads(world.published())


def test_the_file_is_rfc_8785_and_comes_back_the_same(world: World, told: dict[str, Any]) -> None:
    assert rfc8785.dumps(told) + b"\n" == world.published()
    manifest, signatures = unseal(world.published())
    assert seal(manifest, *signatures) == world.published()


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    return [at, *(path for key, child in inner for path in paths(child, (*at, key)))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def test_an_unknown_key_is_refused_wherever_it_stands(told: dict[str, Any]) -> None:
    objects = [path for path in paths(told) if isinstance(at(told, path), dict) and path[-1:] != ("settings",)]
    assert len(objects) > 15
    for path in objects:
        changed = json.loads(json.dumps(told))
        at(changed, path)["surprise"] = 1
        with pytest.raises(ManifestRejected, match=r"surprise|layout"):
            unseal(rfc8785.dumps(changed))


def test_a_missing_key_is_refused_wherever_it_stood(told: dict[str, Any]) -> None:
    for path in paths(told):
        if path and isinstance(at(told, path[:-1]), dict) and path[-1] not in ("format", "learning_rate", "batch_size"):
            changed = json.loads(json.dumps(told))
            del at(changed, path[:-1])[path[-1]]
            with pytest.raises(ManifestRejected):
                unseal(rfc8785.dumps(changed))


def test_no_value_is_taken_for_another_type(told: dict[str, Any]) -> None:
    for path, wrong in [
        (("manifest", "version"), "1"),
        (("manifest", "version"), True),
        (("manifest", "training", "local_statistics"), 0),
        (("manifest", "aggregation", "layout", "ring_bits"), "32"),
        (("manifest", "privacy", "epsilon"), 8),
        (("manifest", "privacy", "epsilon"), "8.0"),
        (("manifest", "previous"), ""),
        (("manifest", "roster"), {}),
        (("manifest", "aggregation", "layout"), []),
        (("manifest", "format"), "lazaret-manifest/1"),
        (("signature",), "zz"),
    ]:
        changed = json.loads(json.dumps(told))
        at(changed, path[:-1])[path[-1]] = wrong
        with pytest.raises(ManifestRejected):
            unseal(rfc8785.dumps(changed))


def test_a_manifest_of_an_older_version_is_refused_in_one_line(told: dict[str, Any]) -> None:
    """It says so before it names a key that the older form had, or lacked."""
    old = json.loads(json.dumps(told))
    old["manifest"] |= {"format": "lazaret-manifest/1", "surprise": 1}
    del old["manifest"]["processing"]
    with pytest.raises(ManifestRejected, match=r"is not a manifest of the format lazaret-manifest/2$") as raised:
        unseal(rfc8785.dumps(old))
    assert raised.value.hint == OTHER_VERSION


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"null", b"[]", b'{"manifest":{},"signature":"00"}', b"\xff", b'{"manifest":1.5}', b"[" * 5000],
)
def test_garbage_is_refused_with_our_error(data: bytes) -> None:
    with pytest.raises(ManifestRejected):
        unseal(data)


def test_a_second_spelling_of_the_same_manifest_is_refused(world: World, told: dict[str, Any]) -> None:
    spaced = json.dumps(told).encode()
    doubled = world.published().replace(b'{"manifest":{', b'{"manifest":{"version":9,', 1)
    for data in (spaced, doubled, world.published() + b"\n"):
        with pytest.raises(ManifestRejected, match="canonical"):
            unseal(data)


@pytest.mark.parametrize("signature", ["", "0", "abc", "AB", "0 0", "ab" * 81])
def test_a_signature_that_is_no_bytes_is_refused_with_our_error(told: dict[str, Any], signature: str) -> None:
    with pytest.raises(ManifestRejected):
        unseal(rfc8785.dumps({**told, "signature": signature}))


def test_a_manifest_of_absurd_size_is_not_even_parsed() -> None:
    with pytest.raises(ManifestRejected, match="more than a manifest may have"):
        unseal(b"x" * (acceptance.MAX_BYTES + 1))


def test_every_scalar_counts_in_the_digest(told: dict[str, Any]) -> None:
    body = told["manifest"]
    seen = {Manifest.from_dict(body).digest}
    changes = 0
    for path in paths(body):
        old = at(body, path) if path else None
        if not path or isinstance(old, dict | list) or path[-1] in ("signing_certificate", "kind", "format"):
            continue
        changed = json.loads(json.dumps(body))
        at(changed, path[:-1])[path[-1]] = another(old)
        try:
            digest = Manifest.from_dict(changed).digest
        except ManifestRejected:
            continue
        assert digest not in seen, path
        seen.add(digest)
        changes += 1
    assert changes > 40


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if value is None:
        return "00" * 32
    return value[:-1] + ("1" if value[-1] != "1" else "2")


@given(st.decimals(min_value=0, max_value=10**6, places=10))
def test_decimal_text_has_one_form_per_number(value: Any) -> None:
    text = decimal_text(value)
    assert decimal_text(text) == text
    assert float(text) == float(value)
    assert "e" not in text.lower() and not (("." in text) and text.endswith("0"))


@given(st.floats(min_value=1e-10, max_value=1e9))
def test_a_float_survives_as_text(value: float) -> None:
    try:
        text = decimal_text(value)
    except ValueError:
        return  # more digits than any sensible setting has
    assert real(text) == value


def test_an_absurd_number_is_no_number() -> None:
    with pytest.raises(ManifestRejected, match="not a number"):
        real("1e999")


def test_site_lookup_names_the_missing_one(world: World) -> None:
    manifest, _ = unseal(world.published())
    assert manifest.site("graz").id == "graz"
    with pytest.raises(ManifestRejected, match="salzburg is not in the roster"):
        manifest.site("salzburg")


def test_faults_are_told_without_the_value(world: World, tmp_path: Path, told: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(told))
    changed["manifest"]["run"] = "SECRET value"
    with pytest.raises(ManifestRejected) as caught:
        unseal(rfc8785.dumps(changed), "site.json")
    assert caught.value.where == "site.json"
    assert "run" in caught.value.message and "SECRET" not in str(caught.value)


def test_class_names_and_their_order_are_in_the_digest(told: dict[str, Any]) -> None:
    def with_classes(*names: str) -> Manifest:
        return Manifest.from_dict(told["manifest"] | {"model": told["manifest"]["model"] | {"classes": list(names)}})

    digests = {with_classes(*names).digest for names in (("a", "b"), ("b", "a"), ("a", "ä"), ("a", "b", "c"))}
    assert len(digests) == 4
    for names in (("a",), ("a", "a"), ("a", "A"), ("a", "a "), ("a", ""), ("a", "b\n"), ("a  b", "c")):
        with pytest.raises(ManifestRejected, match="classes"):
            with_classes(*names)
