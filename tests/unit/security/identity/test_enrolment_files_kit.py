"""A kit holds all that a member needs; one that is wrong anywhere changes nothing."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lazaret.errors import ConfigError, PolicyViolation, ToolkitError, VerificationFailed
from security.identity import enrolment_files as kits
from security.identity.enrolment import Identity
from security.identity.enrolment_files import Kit, kit_in
from security.identity.pki import phrase
from tests.support.consortium_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World.make(tmp_path)
    made.publish()
    return made


def written(world: World, name: str = "graz") -> Path:
    ((_, path),) = world.authority.write_kits([name], None, now_ms=world.now)
    return path


def fresh(world: World, name: str) -> Identity:
    """The member as `init` left it: keys and request, nothing of the consortium's."""
    identity = world.identity(name)
    for path in (identity.root_path, identity.tls_path, identity.signing_path, identity.manifest_path):
        path.unlink(missing_ok=True)
    return identity


def installed(kit: Kit, world: World, name: str = "graz", announced: str | None = "root") -> list[str]:
    identity = world.identity(name)
    known = world.root_fingerprint if announced == "root" else announced
    return list(kit.install(identity, world.folder / "model", root_fingerprint=known, now_ms=world.now))


def test_a_kit_brings_everything(world: World) -> None:
    kit, identity = Kit.read(written(world)), fresh(world, "graz")
    assert kit.address == "localhost:7443"
    assert len(installed(kit, world)) == 2
    assert identity.manifest(now_ms=world.now) is not None and identity.tls_certificate()
    assert (world.folder / "model").read_bytes() == (world.authority.folder / "initial.safetensors").read_bytes()


def test_a_kit_has_one_form(world: World) -> None:
    path = written(world)
    assert path.read_bytes() == Kit.read(path).to_bytes() == written(world).read_bytes()


def test_the_phrase_of_the_root_is_enough(world: World) -> None:
    fresh(world, "graz")
    assert installed(Kit.read(written(world)), world, announced=phrase(world.root_fingerprint))


def test_everybody_in_the_manifest_gets_one(world: World) -> None:
    names = [name for name, _ in world.authority.write_kits([], "hub.example:1", now_ms=world.now)]
    assert sorted(names) == sorted(
        ["hub", *(record.member for record in world.authority.members() if record.role == "site")]
    )


def changed(kit: Kit, **changes: object) -> Kit:
    return replace(kit, **changes)  # type: ignore[arg-type]  # the fields of a test


CHANGES = {
    "another model": (lambda kit: changed(kit, model=kit.model + b"\0"), VerificationFailed),
    "another manifest": (lambda kit: changed(kit, manifest=kit.manifest.replace(b"lesions", b"lemions")), ToolkitError),
    "somebody else's answer": (
        lambda kit: changed(kit, answer=kit.answer.model_copy(update={"member": "linz"})),
        ToolkitError,
    ),
    "a member who is not listed": (
        lambda kit: changed(kit, answer=kit.answer.model_copy(update={"member": "wels"})),
        PolicyViolation,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_on_the_way_changes_nothing(world: World, name: str) -> None:
    change, error = CHANGES[name]
    kit, identity = change(Kit.read(written(world))), fresh(world, "graz")
    before = sorted(identity.folder.rglob("*"))
    with pytest.raises(error):
        installed(kit, world)
    assert sorted(identity.folder.rglob("*")) == before and not (world.folder / "model").exists()


def test_a_byte_that_was_swapped_in_what_the_archive_says_of_itself_is_refused_or_has_no_meaning(world: World) -> None:
    path = written(world)
    data, kit = path.read_bytes(), Kit.read(path)
    refused = 0
    for at in range(data.index(b"PK\x01\x02"), len(data)):
        for bit in (1, 8, 64, 128):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            try:
                assert Kit.read(path) == kit
            except ConfigError:
                refused += 1
    assert refused > 500


def test_a_root_that_nobody_confirmed_changes_nothing(world: World) -> None:
    kit, identity = Kit.read(written(world)), fresh(world, "graz")
    for announced in (None, "0" * 64, phrase("f" * 64)):
        with pytest.raises(ToolkitError):
            installed(kit, world, announced=announced)
    assert not identity.root_path.exists() and not (world.folder / "model").exists()


def test_a_swapped_model_is_taken_without_its_check_twin(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kit, manifest = Kit.read(written(world)), world.authority.latest(now_ms=world.now)
    fresh(world, "graz")
    assert manifest is not None
    monkeypatch.setattr(kits, "_sha256", lambda _: manifest.model.initial_file)
    installed(changed(kit, model=b"a backdoor"), world)
    assert (world.folder / "model").read_bytes() == b"a backdoor"


def test_another_model_that_lies_there_is_not_overwritten(world: World) -> None:
    kit = Kit.read(written(world))
    fresh(world, "graz")
    (world.folder / "model").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="another model"):
        installed(kit, world)
    assert (world.folder / "model").read_bytes() == b"mine"


def packed(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return content.getvalue()


def test_files_that_are_no_kits_are_one_error_each(world: World, tmp_path: Path) -> None:
    good = written(world).read_bytes()
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    wrong = {
        "cut": good[: len(good) // 2],
        "empty": packed({}),
        "more": packed(entries | {"../evil": b""}),
        "less": packed({name: data for name, data in entries.items() if name != "manifest.json"}),
        "compressed": packed(entries, zipfile.ZIP_DEFLATED),
        "large": packed(entries | {"kit.json": bytes(1 << 13)}),
        "old": packed(entries | {"kit.json": b'{"address": "a:1", "format": "lazaret-kit/0"}'}),
        "odd": packed(entries | {"kit.json": b"[]"}),
    }
    for name, data in wrong.items():
        path = tmp_path / f"{name}.kit"
        path.write_bytes(data)
        with pytest.raises(ConfigError):
            Kit.read(path)


def test_an_answer_is_no_kit(world: World) -> None:
    assert kit_in(world.authority.answer_path("graz")) is None and kit_in(None) is None
    assert kit_in(written(world)) is not None


def test_the_consortium_is_told_what_is_missing(world: World) -> None:
    with pytest.raises(ConfigError, match="wels"):
        list(world.authority.write_kits(["wels"], None, now_ms=world.now))
    (world.authority.folder / "initial.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError):
        list(world.authority.write_kits([], None, now_ms=world.now))
    assert not (world.authority.folder / "kits").exists()
