"""docs/study.md: every command of the page, in order and as it stands, for all ten hospitals, over a year.

What is not as it is in life: the ten agents and the coordinator run in this process, over a network in memory and with
a clock that is moved by hand; they train on numbers; `check` leaves out what needs images or a socket; and questions
that two people answer on the telephone are answered with yes. The page says so.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cli as coordinator
from npr.lab.cli import cli as laboratory
from security.audit.cli import main as audit
from security.clock import ManualClock, SystemClock
from security.consortium import commands
from security.consortium.cli import cli as consortium
from security.identity import enrolment_files
from site_agent.cli import cli as site_agent
from tests.support.study import StudyFederation, quick_starts

PAGE = Path(__file__).parents[2] / "docs" / "study.md"
SITES = ("graz", "linz", "vienna", "wels", "innsbruck", "salzburg", "klagenfurt", "steyr", "villach", "krems")
PROGRAMS: dict[str, click.Command] = {
    "consortium": consortium,
    "coordinator": coordinator,
    "site-agent": site_agent,
    "privacy-audit": audit,
    "npr-lab": laboratory,
}
WITHOUT = ("coordinator", "clock", "port", "data", "images", "isolation", "trial", "code", "device")
EVERY_HOSPITAL = re.compile(r"# every hospital(?P<left> that is left)?")
NOW, DAY = 1_800_000_000_000, 86_400_000


def blocks() -> list[list[str]]:
    found = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in found]


class Year:
    """Types the page."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.clock = ManualClock(wall=NOW, mono=1_000_000)
        self.federation = StudyFederation(folder, self.clock)
        self.typed: list[str] = []
        self.said: list[tuple[str, Result]] = []
        self.sites, self.gone = list(SITES), set[str]()

    def read(self, block: list[str]) -> None:
        """Every line, and from "every hospital" to the end of the block once for each of them."""
        every = next((at for at, line in enumerate(block) if EVERY_HOSPITAL.fullmatch(line)), len(block))
        for line in block[:every]:
            self.follow(line)
        found = EVERY_HOSPITAL.fullmatch(block[every]) if every < len(block) else None
        for site in list(self.sites) if found else ():
            if site not in self.gone or not found["left"]:  # type: ignore[index]  # found, or there is no site here
                for line in block[every + 1 :]:
                    self.follow(re.sub(r"\bgraz\b", site, line))

    def follow(self, line: str) -> None:
        self.happen(line) if line.startswith("#") else self.type(line)

    def type(self, line: str) -> None:
        who, command = line.split("$ ", 1)
        home = self.folder / who
        home.mkdir(exist_ok=True)
        self.monkeypatch.chdir(home)
        self.typed.append(line)
        if command == "coordinator":
            self.federation.start_hub()
        elif command == "site-agent":
            self.federation.start(who)
            self.gone.discard(who)
        elif command.startswith("sed "):
            self.edit(home, shlex.split(command))
        else:
            self.call(line, shlex.split(command))

    def call(self, line: str, words: list[str]) -> None:
        program, *words = words
        if words[0] == "check":
            command = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), "check")  # type: ignore[attr-defined]
            (option,) = [one for one in command.params if one.name == "skipped"]
            words += [word for name in WITHOUT if name in option.type.choices for word in ("--skip", name)]
        done = CliRunner().invoke(PROGRAMS[program], words)
        assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
        self.said.append((line, done))
        self.clock.advance(1000)

    def edit(self, home: Path, words: list[str]) -> None:
        path = home / words[-1]
        text = path.read_text()
        for rule in words[3:-1:2]:
            _, old, new, _ = rule.split("/")
            text, count = re.subn(old, new, text, flags=re.MULTILINE)
            assert count == 1, rule
        path.write_text(text)

    def put(self, source: Path, site: str) -> None:
        """Another machine, at the address of the old one."""
        source.rename(self.folder / "new")
        (self.folder / site).rename(self.folder / f"{site}-old")
        (self.folder / "new").rename(self.folder / site)
        self.sites += [site] if site not in self.sites else []

    def happen(self, line: str) -> None:
        """What is no command."""
        federation = self.federation
        match line.removeprefix("# ").split():
            case ["mail", source, "->", target]:
                origin, place = (self.folder.joinpath(*end.split(":")) for end in (source, target))
                place.parent.mkdir(exist_ok=True, parents=True)
                shutil.copyfile(origin, place)
            case ["wait", "for", number, "round"]:
                federation.run_rounds(int(number))
            case ["wait", "until", run, "is", "offered"]:
                offer = [self.folder / site / "state" / "offered.json" for site in federation.agents]
                federation.until(lambda: federation.manifest.run == run and all(path.exists() for path in offer))
            case ["wait", "until", run, "has", "begun"]:
                federation.until(lambda: len(federation.started) == len(federation.agents))
            case ["everybody", "stops", "for", number, "days"]:
                federation.settle()
                federation.stop_all()
                self.clock.advance(int(number) * DAY)
            case ["restart", "hub"]:
                federation.stop_hub()
                federation.start_hub()
                federation.until(lambda: len(federation.streams) == len(federation.agents))
            case ["stop", "everybody"]:
                federation.settle()
                federation.stop_all()
            case ["stop", site]:
                federation.stop(site)
                self.gone.add(site)
            case ["the", "disk", "of", site, "is", "lost"]:
                federation.kill(site)
                shutil.rmtree(self.folder / site)
                self.sites.remove(site)
            case [place, "has", "the", "place", "of", site]:
                self.put(self.folder.joinpath(*place.split(":")), site)
            case _:
                raise AssertionError(f"the page says what nobody does: {line}")


@pytest.fixture
def year(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Year]:
    made = Year(tmp_path, monkeypatch)
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: made.clock.now_ms())
    monkeypatch.setenv(commands.PASSPHRASE_VARIABLE, "a long sentence")
    monkeypatch.setattr(click, "confirm", lambda *args, **kwargs: True)
    for module in (commands, enrolment_files):
        monkeypatch.setattr(module, "can_ask", lambda: True)
    with quick_starts():
        yield made
    if made.federation.shell is not None:
        made.federation.kill_hub()
    for site in list(made.federation.agents):
        made.federation.kill(site)


@pytest.mark.timeout(300)
def test_the_study_goes_from_the_first_mail_to_the_last_audit(year: Year) -> None:
    for block in blocks():
        year.read(block)
    (cross,) = [done.output for line, done in year.said if "privacy-audit cross" in line]
    assert "verdict: clean" in cross
    for site in SITES:
        commands_of_start = [line for line in year.typed if line.startswith(f"{site}$ ")][:4]
        assert [line.split("$ ")[1].split()[:2][-1] for line in commands_of_start] == [
            "init", "join", "check", "site-agent",
        ]  # fmt: skip
    assert (year.folder / "auditor" / "report.html").stat().st_size > 0
