"""A small federation that is made by typing: the quickstart's commands, by whatever runs a command of a role.

`containers` runs each in a container, `installed` in the environments of a release. Whatever the parties run in, their
logs are compared with what is known of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image as Picture

from scripts.local_federation.federation import HOST, Party, WaitFailed, free_port, stop_all, wait_until
from security.audit.facts import LogHistory, read_history

SITES: Final = ("graz", "linz", "vienna")
CLASSES: Final = ("MEL", "NV", "BCC")
ROUNDS: Final = 2
CONSORTIUM: Final = ("--dir", "consortium", "--no-passphrase")
PLAN: Final = f"""
run = "containers"
[model]
initial = "initial.safetensors"
[training]
rounds = {ROUNDS}
steps = 8
[aggregation]
weight_cap = 64
[timing]
train = 90
message = 20
upload = 30
"""


def write_images(folder: Path, seed: int) -> None:
    """A folder a class, with pictures whose colour tells the class; the dirt on them is generated."""
    dirt = np.random.default_rng(seed)
    for place, label in enumerate(CLASSES):
        (folder / label).mkdir(parents=True)
        for number in range(20):
            pixels = dirt.integers(0, 120, size=(32, 32, 3), dtype=np.uint8)
            pixels[..., place] += 120
            Picture.fromarray(pixels).save(folder / label / f"{seed}-{number}.png")


def model_words(rounds: int, *, seed: int, out: str) -> tuple[object, ...]:
    """The command that makes an initial model."""
    return (
        "site", "npr-lab", "model", "--architecture", "test_efficientnet", "--image-size", 32, "--rounds", rounds,
        "--classes", ",".join(CLASSES), "--seed", seed, "-o", out,
    )  # fmt: skip


class TypedFederation:
    """The folders of one federation.

    :param folder: a new one; relative paths of commands start there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()

    def typed(self, role: str, program: str, *words: object) -> str:
        """Run a command, with what the role has installed; returns its standard output."""
        raise NotImplementedError

    def source(self, site: str) -> str:
        """The data source of a site, as its parties see it."""
        raise NotImplementedError

    def give(self, folder: Path) -> None:
        """To the user whom parties run as, if it is another one."""

    def prepare(self) -> None:
        """Model, root key, requests, manifest, kits: the quickstart's commands."""
        self.folder.mkdir()
        for number, site in enumerate(SITES):
            write_images(self.folder / "images" / site, number)
        self.give(self.folder)
        address = f"{HOST}:{self.port}"
        self.typed(*model_words(ROUNDS, seed=0, out="initial.safetensors"))
        printed = json.loads(self.typed("coordinator", "consortium", "init", "lesions", *CONSORTIUM, "--json"))
        shutil.copyfile(self.folder / "initial.safetensors", self.folder / "consortium" / "initial.safetensors")
        member = ("--federation", "lesions", "--name")
        self.typed("coordinator", "coordinator", "init", "hub", *member, "hub", "--host", HOST, "--listen", address)
        for site in SITES:
            self.typed(
                "site", "site-agent", "init", site, *member, site, "--data", self.source(site),
                "--legal-basis", "none: generated images",
            )  # fmt: skip
        for name in ("hub", *SITES):
            self.typed("coordinator", "consortium", "enroll", f"{name}/identity/request.json", "--yes", *CONSORTIUM)
        self.publish(PLAN)
        self.typed("coordinator", "consortium", "kit", "--address", address, "--dir", "consortium")
        for name in ("hub", *SITES):
            program, file = ("coordinator", "coordinator") if name == "hub" else ("site-agent", "site")
            self.typed(
                role_of(name), program, "join", f"consortium/kits/{name}.kit",
                "--root-fingerprint", printed["root_fingerprint"], "--config", f"{name}/{file}.toml",
            )  # fmt: skip
        for site in SITES:
            self.set_up(self.folder / site / "site.toml")

    def publish(self, plan: str) -> None:
        """The consortium signs a manifest."""
        (self.folder / "consortium" / "federation.toml").write_text(plan)
        self.give(self.folder / "consortium")
        self.typed("coordinator", "consortium", "publish", *CONSORTIUM)

    def set_up(self, config: Path, lines: str = "") -> None:
        """What these machines need in [site]."""
        more = f"[site]\n{lines}threads = 1\nready_slot = 20\n"
        config.write_text(config.read_text().replace("[site]\n", more, 1))

    @property
    def logs(self) -> dict[str, Path]:
        return {name: self.folder / name / "state" / "log" for name in ("hub", *SITES)}

    @property
    def root_key(self) -> Path:
        return self.folder / "consortium" / "root.pem"

    def histories(self) -> dict[str, LogHistory]:
        return {name: read_history(path, origin="", name=name, role="") for name, path in self.logs.items()}


def role_of(name: str) -> str:
    return "coordinator" if name == "hub" else "site"


def starts(history: LogHistory) -> list[Mapping[str, Any]]:
    """What a party has said of its software at every start."""
    return [record.body for record in history.of("agent.start")]


def sboms_as_logged(histories: Mapping[str, LogHistory], bills: Mapping[str, Path]) -> bool:
    """:param bills: the bill of materials of each role."""
    digests = {role: hashlib.sha256(path.read_bytes()).hexdigest() for role, path in bills.items()}
    printed = {name: {body["sbom"] for body in starts(history)} for name, history in histories.items()}
    return all(printed[name] == {digests[role_of(name)]} for name in histories)


# Rounds among the environments of a release: the coordinator in its own, three sites in theirs, the audit in a third.
#
# Nothing of this tree is imported there: each program is the one that its role has installed.


PATIENCE = 600.0


def own_environment() -> dict[str, str]:
    """Of this process, without what would lead a program to this tree."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PIP_"))}


class InstalledParty(Party):
    """A party that is a program of an environment."""

    def __init__(self, name: str, program: Path, config: Path, output: Path) -> None:
        super().__init__(name, [], output, config.parent)
        self.command, self.folder = [str(program), "--config", str(config)], config.parent

    def environment(self) -> dict[str, str]:
        return own_environment() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class InstalledFederation(TypedFederation):
    """:param environments: the folder of each role's environment."""

    def __init__(self, folder: Path, environments: Mapping[str, Path]) -> None:
        super().__init__(folder)
        self._environments = environments
        self.parties = {name: self._party(name) for name in ("hub", *SITES)}

    def _party(self, name: str) -> InstalledParty:
        role = role_of(name)
        program, file = ("coordinator", "coordinator.toml") if role == "coordinator" else ("site-agent", "site.toml")
        config, output = self.folder / name / file, self.folder / "output" / f"{name}.log"
        return InstalledParty(name, self._environments[role] / "bin" / program, config, output)

    def typed(self, role: str, program: str, *words: object) -> str:
        done = self.called(role, program, *words)
        if done.returncode:
            raise WaitFailed(f"{program} {words[0]} of {role} ended with {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout

    def called(self, role: str, program: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [str(self._environments[role] / "bin" / program), *map(str, words)]
        return subprocess.run(
            command, cwd=self.folder, env=own_environment(), capture_output=True, text=True, timeout=240, check=False
        )

    def source(self, site: str) -> str:
        return f"folders:{self.folder}/images/{site}"

    def play(self) -> None:
        """All rounds; whoever ends before that ends it."""
        try:
            for party in self.parties.values():
                party.start()
            wait_until(self._over, "the end of the run", seconds=PATIENCE, output=self.parties["hub"].output)
        finally:
            stop_all([self.parties[site] for site in SITES], self.parties["hub"])

    def _over(self) -> bool:
        time.sleep(2.0)
        for party in self.parties.values():
            if party.code is not None:
                raise WaitFailed(f"{party.name} ended with {party.code}\n{party.text()[-2000:]}")
        done = self.called("coordinator", "coordinator", "status", "--json", "--config", "hub/coordinator.toml")
        printed = json.loads(done.stdout) if done.returncode == 0 else {"completed": 0, "unchecked": None}
        return printed["completed"] >= ROUNDS and printed["unchecked"] is None


def try_release(folder: Path, environments: Mapping[str, Path], bills: Mapping[str, Path]) -> dict[str, Any]:
    """Rounds, and what their logs say.

    :param folder: a new one.
    :param environments: of `audit`, `coordinator` and `site`.
    :param bills: the bill of materials of each role.
    """
    federation = InstalledFederation(folder, environments)
    federation.prepare()
    federation.play()
    words = (*federation.logs.values(), "--root-key", federation.root_key, "--json")
    audit = federation.called("audit", "privacy-audit", "cross", *words)
    return {
        "rounds": ROUNDS,
        "audit_clean": audit.returncode == 0,
        "verdict": json.loads(audit.stdout)["verdict"] if audit.stdout else audit.stderr[-500:],
        "sbom_as_logged": sboms_as_logged(federation.histories(), bills),
    }
