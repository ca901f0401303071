"""Logs, progress and questions of all commands: what goes where, and in which form."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from lazaret import terminal
from lazaret.errors import ConfigError
from lazaret.terminal import ask, log_to_stderr, progress, run_command


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a command switches on holds for its process."""
    logger = logging.getLogger("test-program")
    yield
    terminal._json_lines = terminal._progress_shown = False
    logger.handlers = []
    logger.propagate = True


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("test-program", None, json_lines=False)
    logging.getLogger("test-program").info("round %d: training", 3)
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith(" round 3: training\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} ", said.err), "date and zone"


@pytest.mark.parametrize("json_lines", [False, True])
@pytest.mark.parametrize("propagate", [False, True])
def test_a_handler_of_a_library_repeats_no_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, json_lines: bool, propagate: bool
) -> None:
    """The accountant imports a library that puts a handler on the root logger; the twin lets it have our lines."""
    foreign = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [foreign])
    log_to_stderr("test-program", None, json_lines=json_lines)
    if propagate:
        monkeypatch.setattr(logging.getLogger("test-program"), "propagate", True)
    logging.getLogger("test-program").info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1 + propagate


@pytest.mark.parametrize(("flag", "configured"), [("json", False), (None, True)])
def test_json_on_request(capsys: pytest.CaptureFixture[str], flag: str | None, configured: bool) -> None:
    log_to_stderr("test-program", flag, json_lines=configured)
    logging.getLogger("test-program").warning('site %s: "%s"', "graz", "Über")
    told = json.loads(capsys.readouterr().err)
    assert set(told) == {"time", "level", "program", "message"} and told["time"].endswith("+00:00")
    assert (told["level"], told["program"], told["message"]) == ("warning", "test-program", 'site graz: "Über"')


def test_the_flag_overrides_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("test-program", "text", json_lines=True)
    logging.getLogger("test-program").info("plain")
    assert not capsys.readouterr().err.startswith("{")


def test_an_error_that_ends_a_command_is_a_json_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def broken() -> None:
        log_to_stderr("test-program", "json", json_lines=False)
        raise ConfigError("is not there", where="site.toml", hint="make it")

    monkeypatch.setattr(sys, "argv", ["test-program"])
    with pytest.raises(SystemExit) as ended:
        run_command(broken, "test-program")
    told = json.loads(capsys.readouterr().err)
    assert ended.value.code == 2 and told["level"] == "error" and told["code"] == "config"
    assert told["message"] == "site.toml: is not there" and told["hint"] == "make it"


@pytest.mark.parametrize(
    ("code", "to_do"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "system log"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, None),
    ],
)
@pytest.mark.parametrize("where", [None, "/state/spool"])
def test_what_a_disk_refuses_is_one_line_and_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int, to_do: str | None, where: str | None
) -> None:
    @click.command()
    def broken() -> None:
        raise OSError(code, os.strerror(code), where)

    monkeypatch.setattr(sys, "argv", ["test-program"])
    with pytest.raises(SystemExit) as ended:
        run_command(broken, "test-program")
    line, *hints = capsys.readouterr().err.splitlines()
    place = f"{where}: " if where else ""
    assert ended.value.code == 1 and line == f"test-program: error: {place}{os.strerror(code).lower()}"
    assert len(hints) == (to_do is not None)
    assert all(hint.startswith("hint: ") and to_do in hint for hint in hints)


def test_a_library_shows_no_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("decoding") as tell:
        tell(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("json_lines", [False, True])
def test_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, json_lines: bool
) -> None:
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    log_to_stderr("test-program", None, json_lines=json_lines)
    terminal.show_progress()
    with progress("decoding") as tell:
        tell(64, 640)
    said = capsys.readouterr().err
    assert "decoding: 64 of 640" in (json.loads(said)["message"] if json_lines else said)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress("decoding", quiet=False) as tell:
        tell(5, 10)
    assert "decoding" in screen.getvalue() and "\x1b[" in screen.getvalue()


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("decoding", quiet=False) as tell:
        tell(10, 10)
    assert capsys.readouterr().err == ""


def test_nobody_is_asked_without_a_terminal() -> None:
    assert ask("given", "--name", "Name") == "given"
    assert ask(None, "--name", "Name", default="usual") == "usual"
    with pytest.raises(ConfigError, match="--name is missing"):
        ask(None, "--name", "Name")


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "no"), (1, "1 to 9"), (10, "10 to 19"), (20, "20 to 49"), (99, "50 to 99"), (1234, "1000 to 1999")],
)
def test_a_count_is_a_range(count: int, words: str) -> None:
    assert terminal.as_range(count) == words


@pytest.mark.parametrize("journal", [True, False])
def test_the_journal_gets_a_number_and_no_time(tmp_path: Path, journal: bool) -> None:
    """In a process of its own, whose stderr is the file that the variable names; or is another one."""
    code = (
        "from lazaret import terminal; import logging; terminal.log_to_stderr('p', None, json_lines=False);"
        "log = logging.getLogger('p'); log.info('said'); log.warning('careful'); terminal._complain('p', 'bad', 'do')"
    )
    with (tmp_path / "stderr").open("wb") as file:
        there = os.fstat(file.fileno())
        named = f"{there.st_dev}:{there.st_ino}" if journal else "1:1"
        environment = os.environ | {"JOURNAL_STREAM": named}
        subprocess.run([sys.executable, "-c", code], stderr=file, env=environment, check=True, timeout=60)
    lines = (tmp_path / "stderr").read_text().splitlines()
    if journal:
        assert lines == ["<6>said", "<4>careful", "<3>p: error: bad", "<3>hint: do"]
    else:
        assert [line.split(" ")[-1] for line in lines[:2]] == ["said", "careful"]
        assert lines[2:] == ["p: error: bad", "hint: do"]
