"""A federation set up in full; faults are planted in copies of one hospital's folder, which is then checked."""

from __future__ import annotations

import csv
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lazaret.checks import CheckVerdict, Line, run
from scripts.local_federation.federation import FederationFolders, Party
from scripts.local_federation.known_updates import write_numbers
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.identity import pki
from security.identity.enrolment import Identity
from security.identity.pki import Purpose
from site_agent.checks.context import SiteCheckContext
from site_agent.checks.run import CHECKS
from site_agent.config import STATED, SiteConfig

SITE = "graz"
CLASSES = ("bcc", "melanoma", "nevus")
# Both need torch and real weights; tests/cli/test_site_agent_command.py has them.
LEARNING = ("code", "trial")
PLAN = f"""
run = "run-1"
[model]
initial = "initial.safetensors"
architecture = "tiny"
code_digest = "{"ab" * 32}"
classes = ["bcc", "melanoma", "nevus"]
[training]
method = "fedavg"
rounds = 20
steps = 50
config_hashes = ["{"cd" * 32}"]
[training.settings]
learning_rate = 0.001
"model.image_size" = 16
"""
Row = dict[str, str]


def write_images(folder: Path) -> list[Row]:
    """24 patients with two pictures each: a table that names people, as real ones do."""
    rng = np.random.default_rng(5)
    folder.mkdir(parents=True)
    rows = []
    for number in range(48):
        name = f"Huber_Maria_{number:02d}.png"
        Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / name)
        rows.append({"image": name, "label": CLASSES[number // 2 % 3], "patient": f"MRN-{number // 2:05d}"})
    return rows


def write_table(folder: Path, rows: list[Row]) -> None:
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@dataclass
class Hospital:
    """A copy of the hospital's folder, to be spoilt and checked."""

    home: Path
    consortium: Path
    rows: list[Row]
    told: dict[str, Any]

    @property
    def config(self) -> Path:
        return self.home / "site.toml"

    @property
    def images(self) -> Path:
        return self.home / "images"

    @property
    def identity(self) -> Identity:
        return Identity(folder=self.home / "identity")

    @property
    def authority(self) -> Authority:
        return Authority.open(self.consortium)

    def set(self, table: str, line: str) -> None:
        """A key of site.toml, in the place of one that is there."""
        key = line.partition(" ")[0]
        text = [old for old in self.config.read_text().splitlines() if not old.startswith(f"{key} = ")]
        at = next(number for number, old in enumerate(text) if old.startswith(f"[{table}]"))
        self.config.write_text("\n".join([*text[: at + 1], line, *text[at + 1 :], ""]))

    def certify(self, root_key: Any, root: Any, *, now_ms: int, days: int) -> None:
        """Another TLS certificate for the key that is here."""
        old = self.identity.tls_certificate()
        key, subject = pki.certificate_key(old), pki.subject_of(old)
        new = pki.issue(root_key, root, subject, Purpose.TLS, key, now_ms=now_ms, days=days)
        self.identity.tls_path.write_text(pki.to_pem(new))

    def check(self, skip: tuple[str, ...] = LEARNING) -> list[Line]:
        context = SiteCheckContext(config=SiteConfig.read(self.config), **self.told)
        with closing(context):
            return list(run(CHECKS, context, skip=skip))


@dataclass
class CheckWorld:
    """The federation; its coordinator is a process of its own."""

    folders: FederationFolders
    rows: list[Row]
    coordinator: Party

    @classmethod
    def make(
        cls, folder: Path, *, sites: tuple[str, ...] = (SITE, "linz", "salzburg", "vienna"), plan: str = PLAN
    ) -> CheckWorld:
        initial = folder / "initial.safetensors"
        write_numbers(initial, 5000)
        folders = FederationFolders(
            folder=folder,
            plan=plan,
            sources=dict.fromkeys(sites, "csv:images/table.csv"),
            initial=initial,
        )
        folders.prepare()
        rows = write_images(folders.site(SITE) / "images")
        write_table(folders.site(SITE) / "images", rows)
        return cls(folders, rows, folders.parties()[0])

    def hospital(self, folder: Path, name: str = SITE) -> Hospital:
        """A fresh copy."""
        shutil.copytree(self.folders.site(name), folder / "hospital")
        shutil.copytree(self.folders.consortium, folder / "consortium")
        made = Hospital(folder / "hospital", folder / "consortium", [dict(row) for row in self.rows], {})
        made.set("data", f'source = "csv:{made.images / "table.csv"}"')
        for name in STATED:
            made.set("data", f'{name} = "as agreed"')
        return made


class Shifted(SystemClock):
    """This machine's clock, set wrong."""

    def __init__(self, days: float) -> None:
        self._by = int(days * 86_400_000)

    def now_ms(self) -> int:
        return super().now_ms() + self._by


def problems(lines: list[Line]) -> dict[str, list[Line]]:
    """The problems by check."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        if line.verdict is CheckVerdict.PROBLEM:
            found.setdefault(line.check, []).append(line)
    return found
