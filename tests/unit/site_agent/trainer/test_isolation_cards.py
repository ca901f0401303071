"""Device files of graphics cards: none for the processor, those of the kind that is named, and no other device."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from site_agent.trainer import isolation, kernel
from site_agent.trainer.isolation import card_files

FILES = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "kfd", "dri/renderD128", "dri/card0", "sda")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "nvidia-notes.txt").mkdir()  # no device
    monkeypatch.setattr(Path, "is_char_device", Path.is_file)
    return tmp_path


def found(device: str, folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in card_files(device, folder)}


def test_files_by_kind(devices: Path) -> None:
    nvidia = {"nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "kfd", "dri/renderD128"}
    assert found("cpu", devices) == found("mps", devices) == set()
    assert found("cuda", devices) == found("cuda:1", devices) == found("auto", devices) == nvidia
    assert found("xpu", devices) == {"dri/renderD128"}


def test_a_file_that_is_no_device_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert card_files("cuda", tmp_path) == []


def test_a_card_gets_ioctl_and_nothing_else_does(tmp_path: Path) -> None:
    card = tmp_path / "nvidia0"
    card.touch()
    rules = dict(isolation._rules([], [tmp_path / "state"], [], [card]))
    ioctl = kernel.DEVICE & ~kernel.WRITE & ~kernel.READ
    assert ioctl and rules[card] == kernel.DEVICE
    assert not any(rights & ioctl for path, rights in rules.items() if path != card)
    assert card not in dict(isolation._rules([], [tmp_path / "state"], [])), "closed unless it is asked for"


OPENING = """
import os, sys
from pathlib import Path
from site_agent.trainer import isolation
card = [Path(p) for p in sys.argv[2:]]
isolation.enter("best", card=card, mechanisms=[isolation.LANDLOCK])
try:
    os.close(os.open(sys.argv[1], os.O_RDWR))
    print("opened")
except OSError as error:
    print(error.errno)
"""


def _landlocked() -> bool:
    try:
        return kernel.landlock_version() > 0
    except OSError:
        return False


@pytest.mark.skipif(not _landlocked(), reason="this kernel has no Landlock")
def test_a_device_opens_only_if_it_is_asked_for() -> None:
    device = "/dev/ptmx"  # a device that everybody may open and that is not on the trainer's list
    if not (os.path.exists(device) and stat.S_ISCHR(os.stat(device).st_mode) and os.access(device, os.R_OK | os.W_OK)):
        pytest.skip("no device to try it with")

    def tried(*card: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", OPENING, device, *card], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    real = os.path.realpath(device)
    assert tried() == "13"
    assert tried(real) == "opened"
