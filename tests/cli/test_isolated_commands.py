"""`predict`, `evaluate` and `export` as processes: what they say about their isolation, and that it is so."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from PIL import Image

from npr.data.sources import open_catalogue
from site_agent.trainer.isolation import MECHANISMS
from tests.support.consortium_world import DAY, NOW
from tests.support.isolated import ROOT, tried
from tests.support.trained_site import Trained, train

# The console script's entry, on the federation's own day.
SCRIPT = f"""
from security.clock import SystemClock
SystemClock.now_ms = lambda self: {NOW + DAY}
from site_agent.cli import main
main()
"""
# The same with a decoder that tells what it could do, from inside, when the first image is opened.
SPYING = """
import json, os, socket, sys
from PIL import Image
opened = Image.open

def opened_all(paths):
    # Counts as done if a single one opens.
    failed = None
    for path in paths:
        try:
            return open(path, "rb").close()
        except OSError as error:
            failed = error
    raise failed

def spy(source, *rest):
    told = {}
    for name, attempt in {
        "tcp": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5).close(),
        "keys": lambda: opened_all(KEYS),
        "wal": lambda: open(WAL, "rb").close(),
        "log": lambda: open(LOG, "ab").close(),
        "beside": lambda: open(BESIDE, "xb").close(),
    }.items():
        try:
            attempt()
            told[name] = "done"
        except OSError as error:
            told[name] = os.strerror(error.errno).lower()
    sys.stderr.write(f"SPY {json.dumps(told)}" + chr(10))  # in one piece: several threads decode
    return opened(source, *rest)
"""


@pytest.fixture(scope="module")
def trained(on_disk: Path) -> Iterator[Trained]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield train(on_disk / "federation", rounds=1)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images, one of them a link into another folder."""
    folder, archive = tmp_path_factory.mktemp("cases"), tmp_path_factory.mktemp("archive")
    drawn = open_catalogue("generated:balanced=4,sites=1", image_size=48).images
    for number in range(2):
        Image.fromarray(drawn[number]).save(folder / f"{number}.png")
    Image.fromarray(drawn[2]).save(archive / "2.png")
    (folder / "2.png").symlink_to(archive / "2.png")
    return folder


@pytest.fixture(scope="module")
def walls() -> None:
    missing = tried([], {}, list(MECHANISMS), child=False)["isolation"]["missing"]
    if missing:
        pytest.skip(f"this kernel does not give everything here: {missing}")


def keys_of(trained: Trained) -> Path:
    (line,) = [line for line in trained.config.read_text().splitlines() if line.startswith("identity = ")]
    return (trained.config.parent / json.loads(line.removeprefix("identity = ").split("  #")[0].strip())) / "keys"


def run(*words: str | Path, code: str = SCRIPT, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False, **more)


def spying(trained: Trained, port: int, beside: Path) -> str:
    """A decoder like this one is loaded by what reads images, after the process is isolated."""
    keys = keys_of(trained)
    closed = sorted(keys.glob("*.key"))
    assert len(closed) >= 6 and {"sealing.key", "data.key"} <= {path.name for path in closed}
    log = next((trained.state / "log").rglob("*.jsonl"), trained.state / "wal")
    named = {"PORT": port, "KEYS": [*map(str, closed)], "WAL": str(trained.state / "wal")}
    named |= {"LOG": str(log), "BESIDE": str(beside)}
    values = "".join(f"{name} = {value!r}\n" for name, value in named.items())
    return f"{values}{SPYING}\nImage.open = spy\n{SCRIPT}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def spied(stderr: str) -> dict[str, str]:
    lines = [line for line in stderr.splitlines() if line.startswith("SPY ")]
    assert lines, stderr
    found: dict[str, str] = json.loads(lines[0].removeprefix("SPY "))
    return found


def test_a_decoder_in_predict_reaches_nobody_and_reads_no_key(
    trained: Trained, cases: Path, tmp_path: Path, listener: socket.socket, walls: None
) -> None:
    """Predicting into the folder of `site.toml`, as people do, gives no right to what lies there."""
    code = spying(trained, listener.getsockname()[1], trained.config.parent / "left")
    target = trained.config.parent / "out.csv"
    done = run("predict", cases, "-o", target, "--config", trained.config, "--json", code=code)
    assert done.returncode == 0, done.stderr
    refused = {"tcp": "operation not permitted", **dict.fromkeys(("keys", "wal", "log", "beside"), "permission denied")}
    assert spied(done.stderr) == refused
    with pytest.raises(BlockingIOError):
        listener.accept()
    told = json.loads(done.stdout)["isolation"]
    assert (told["network_namespace"], told["seccomp"], told["landlock"]) == (True, True, True)
    assert not told["connection_possible"] and not told["keys_readable"]
    assert told["attempts"]["private keys"] == "permission denied", "it was tried"
    with target.open(newline="") as file:
        assert [row["problem"] for row in csv.DictReader(file)] == ["", "", ""]  # the linked image too
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in trained.config.parent.iterdir()) == ["out.csv", "site.toml", "state"]
    target.unlink()


def test_the_twin_without_isolation_can_do_all_of_it(
    trained: Trained, cases: Path, tmp_path: Path, listener: socket.socket
) -> None:
    """The same command called as a function: so what refused above was the isolation. And it warns."""
    code = spying(trained, listener.getsockname()[1], tmp_path / "left").replace(
        "from site_agent.cli import main\nmain()",
        "from lazaret.terminal import run_command\nfrom site_agent.cli import cli\nrun_command(cli, 'site-agent')",
    )
    done = run("predict", cases / "0.png", "-o", tmp_path / "out.csv", "--config", trained.config, code=code)
    assert done.returncode == 0, done.stderr
    assert set(spied(done.stderr).values()) == {"done"}
    listener.accept()[0].close()
    assert "warning: the process that saw images was not isolated" in done.stderr


def test_evaluate_and_export_say_it_too(trained: Trained, tmp_path: Path, walls: None) -> None:
    sentence = (
        "the process that saw images could not open a connection: enforced by network namespace, seccomp, Landlock"
    )
    page = tmp_path / "page.html"
    figures = run("evaluate", "--html", page, "--config", trained.config)
    assert figures.returncode == 0 and sentence in figures.stderr, figures.stderr
    assert "net benefit" in page.read_text() and os.listdir(tmp_path) == ["page.html"]
    page.unlink()
    target = tmp_path / "new" / "model"
    made = run("export", target, "--config", trained.config, "--json")
    assert made.returncode == 0, made.stderr
    told = json.loads(made.stdout)
    assert told["isolation"]["sentence"] == sentence and told["folder"] == str(target)
    assert sorted(path.name for path in target.iterdir()) == sorted(told["files"])
    assert os.listdir(tmp_path / "new") == ["model"] and os.listdir(tmp_path) == ["new"]


def with_isolation(trained: Trained, mode: str, folder: Path) -> Path:
    shutil.copytree(trained.config.parent, folder)
    config = folder / "site.toml"
    identity = json.dumps(str(keys_of(trained).parent))
    lines = config.read_text().splitlines()
    lines = [f"identity = {identity}" if line.startswith("identity = ") else line for line in lines]
    at = lines.index("[site]")
    config.write_text("\n".join([*lines[: at + 1], f'isolation = "{mode}"', *lines[at + 1 :]]) + "\n")
    return config


WEAK = "from site_agent.trainer import kernel\n\ndef no(*_):\n    raise OSError(38, 'function not implemented')\n"


@pytest.mark.parametrize("mode", ["required", "best"])
def test_a_kernel_that_isolates_nothing(mode: str, trained: Trained, cases: Path, tmp_path: Path) -> None:
    """Every call to the kernel fails as on one that does not have it: one error before any image, or one warning."""
    config = with_isolation(trained, mode, tmp_path / "agent")
    weak = WEAK + "kernel._call = no\n"
    spy = "from PIL import Image\nopened = Image.open\nImage.open = lambda *a: (print('IMAGE'), opened(*a))[1]\n"
    done = run("predict", cases / "0.png", "-o", tmp_path / "o.csv", "--config", config, code=weak + spy + SCRIPT)
    if mode == "required":
        assert done.returncode == 2 and "IMAGE" not in done.stdout and not (tmp_path / "o.csv").exists()
        assert done.stderr.count("error:") == 1 and "site.toml [site] isolation" in done.stderr
        assert "hint:" in done.stderr
    else:
        assert done.returncode == 0 and "IMAGE" in done.stdout, done.stderr
        assert done.stderr.count("warning: the process that saw images was able to open a connection") == 1


def test_a_required_isolation_that_holds_changes_nothing(
    trained: Trained, cases: Path, tmp_path: Path, walls: None
) -> None:
    config = with_isolation(trained, "required", tmp_path / "agent")
    done = run("predict", cases, "-o", tmp_path / "o.csv", "--config", config)
    assert done.returncode == 0 and "3 of 3 files predicted" in done.stderr, done.stderr


def test_errors_have_their_exit_code_and_leave_nothing(trained: Trained, cases: Path, tmp_path: Path) -> None:
    (tmp_path / "there.csv").write_text("precious")
    done = run("predict", cases, "-o", tmp_path / "there.csv", "--config", trained.config)
    assert done.returncode == 2 and done.stderr.count("refusing to overwrite") == 1
    nowhere = run("predict", cases, "-o", tmp_path / "no" / "b.csv", "--config", trained.config)
    assert nowhere.returncode == 2 and "folder is missing" in nowhere.stderr
    (tmp_path / "bad.png").write_text("no image")
    broken = run("predict", tmp_path / "bad.png", "-o", tmp_path / "c.csv", "--config", trained.config)
    assert broken.returncode == 1 and (tmp_path / "c.csv").exists()
    assert sorted(os.listdir(tmp_path)) == ["bad.png", "c.csv", "there.csv"]


# A thread that decodes cannot be interrupted, so that Ctrl-C waits for its image: three seconds here.
# A shell that starts tests in the background has them ignore Ctrl-C, which is undone first.
SLOW = """
import signal, time
from PIL import Image
signal.signal(signal.SIGINT, signal.default_int_handler)
Image.open = lambda *a: (print("IMAGE", flush=True), time.sleep(3))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_to_the_command_ends_the_process_that_sees_images(
    number: signal.Signals, trained: Trained, cases: Path, tmp_path: Path
) -> None:
    words = ["predict", str(cases / "0.png"), "-o", str(tmp_path / "o.csv"), "--config", str(trained.config)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begun = subprocess.Popen(
        [sys.executable, "-c", SLOW + SCRIPT, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert begun.stdout is not None
    assert begun.stdout.readline() == "IMAGE\n"
    (child,) = Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split()
    begun.send_signal(number)
    _, stderr = begun.communicate(timeout=30)
    assert begun.returncode == (130 if number == signal.SIGINT else -number), stderr
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() and not (tmp_path / "o.csv").exists()
    if number != signal.SIGKILL:
        assert os.listdir(tmp_path) == []


# Processor time: that of the command up to the fork, and that of the child. The child cannot read how long it waited.
TIMED = """
import os, sys, time
from pathlib import Path
import site_agent.cli
from site_agent.config import SiteConfig
from site_agent import command_process
from security.clock import SystemClock
SystemClock.now_ms = lambda self: NOW
config = SiteConfig.read(Path(sys.argv[1]))
record = command_process.open_record(config)
at_fork = []
os.register_at_fork(before=lambda: at_fork.append(time.process_time()))
begun = time.process_time()
command_process._in_child(config, record, Path(sys.argv[2]), Path(sys.argv[3]))
print(at_fork[-1] - begun + time.process_time())
""".replace("NOW", str(NOW + DAY))


def test_isolation_delays_the_start_by_less_than_a_tenth_of_a_second(
    trained: Trained, cases: Path, tmp_path: Path, walls: None
) -> None:
    """From the command's begin to the isolated child that goes on, with everything loaded that a command loads."""
    done = [run(trained.config, cases, tmp_path / "o", code=TIMED) for _ in range(5)]
    assert all(each.stdout for each in done), done[0].stderr
    took = [float(each.stdout) for each in done]
    assert median(took) < 0.1, took
