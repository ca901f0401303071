"""Rounds among the environments of a release: the coordinator in its own, three sites in theirs, the audit in a third.

Nothing of this tree is imported there: each program is the one that its role has installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.local_federation.processes import GaveUp, Party, stop_all, wait_until
from scripts.local_federation.typed import ROUNDS, SITES, TypedFederation, role_of, sboms_as_logged

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
            raise GaveUp(f"{program} {words[0]} of {role} ended with {done.returncode}\n{done.stderr[-2000:]}")
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
                raise GaveUp(f"{party.name} ended with {party.code}\n{party.text()[-2000:]}")
        done = self.called("coordinator", "coordinator", "status", "--json", "--config", "hub/coordinator.toml")
        told = json.loads(done.stdout) if done.returncode == 0 else {"completed": 0, "unchecked": None}
        return told["completed"] >= ROUNDS and told["unchecked"] is None


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
