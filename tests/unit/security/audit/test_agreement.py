"""What an auditor takes from a manifest."""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lazaret.errors import ManifestRejected, ToolkitError
from security.audit.agreement import agreement_of, keys_for, open_signed
from security.identity.manifest import Manifest
from security.log.store import LogFolder
from tests.support.consortium_world import PLAN, PRIVACY, SHARED_NOISE, World

WRONG: tuple[Any, ...] = (None, 0, True, 10**15, "", "nan", "0.5", [], {})


def test_shared_noise_is_read_at_the_noise_that_the_manifest_asks_for(tmp_path: Path) -> None:
    """0.8 times this clip fits the ring, 1.0 times does not."""
    world = World.make(tmp_path)
    world.write_plan(SHARED_NOISE + PRIVACY.replace("clip = 1\n", "clip = 300\n"))
    rules = agreement_of(world.publish(), "00").rules
    assert rules is not None and rules.privacy is not None and rules.privacy.noise_floor == 0.8
    assert rules.privacy.shared is not None and rules.privacy.shared.honest == 2 and rules.privacy.steps == 1


@pytest.mark.parametrize("name", ["0" * 64, "f" * 64])
def test_a_manifest_lies_under_the_digest_of_its_file(tmp_path: Path, name: str) -> None:
    """Entries name it by that digest. A copy under another name is nobody's work, wherever it comes in the order."""
    world = World.make(tmp_path / "world")
    world.publish()
    data, folder = world.published(), LogFolder(tmp_path / "log")
    folder.manifests.mkdir(parents=True)
    folder.manifest_path(sha256(data).hexdigest()).write_bytes(data)
    root = world.authority.folder / "root.pem"
    assert keys_for(folder.path, root).agreements.problems == ()
    folder.manifest_path(name).write_bytes(data)
    agreements = keys_for(folder.path, root).agreements
    assert [one.code for one in agreements.problems] == ["ManifestRejected"] and len(agreements.versions) == 1


def test_a_manifest_of_another_federation_is_not_taken(tmp_path: Path) -> None:
    """Under the same root: two consortia may have been given one key."""
    world = World.make(tmp_path)
    other = world.publish().model_copy(update={"federation": "ct-scans"})
    with pytest.raises(ManifestRejected, match="another federation"):
        open_signed(world.signed(other), world.authority.root, "manifest.json")
    assert open_signed(world.signed(other), None, "manifest.json") == other, "nothing is pinned"


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in inner for place in ((*at, key), *_places(child, (*at, key)))]


@pytest.mark.parametrize("plan", [PLAN + PRIVACY, SHARED_NOISE + PRIVACY], ids=["site noise", "shared noise"])
def test_whatever_a_manifest_says_the_answer_is_an_error_of_ours(tmp_path: Path, plan: str) -> None:
    """It is read before its signature is checked: in a log folder by an auditor, over the wire by a site."""
    world = World.make(tmp_path)
    world.write_plan(plan)
    world.publish()
    told = json.loads(world.published())["manifest"]
    for place in _places(told):
        if place[0] == "roster" and place[1:2] != (0,):
            continue  # members are all alike
        for wrong in (*WRONG, ...):
            changed = json.loads(json.dumps(told))
            holder = changed
            for step in place[:-1]:
                holder = holder[step]
            if wrong is ...:
                del holder[place[-1]]
            else:
                holder[place[-1]] = wrong
            with suppress(ToolkitError):
                agreement_of(Manifest.from_dict(changed), "00")
