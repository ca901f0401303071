"""`scripts/screenshots`: pictures of both pages from a federation that really runs, and in which an attempt fails.

`--reports` takes pictures of the auditor's report, `--states` of the pages in the states that an operator meets.
"""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import pypdfium2
from click.testing import CliRunner
from PIL import Image

from coordinator.dashboard.live import Live
from coordinator.dashboard.server import PhaseClock, pages
from coordinator.dashboard.state_json import LogCheckpoints, PageState
from coordinator.phases import RunPhase
from coordinator.round_history import ReadOnlyHistory
from lazaret.control import STALE_MS, PauseFile
from lazaret.errors import ConfigError
from lazaret.terminal import run_command
from lazaret.web.access import Address, Guard
from lazaret.web.server import WebServer
from scripts.local_federation.demo import DemoOptions, ProgressPrinter, set_up
from scripts.local_federation.federation import ROOT, FederationFolders, free_port, stop_all, wait_until
from security.audit.cli import main as audit
from security.clock import SystemClock
from security.log.roster import audit_roster
from security.rng import SystemRandomness
from site_agent.config import SiteConfig
from site_agent.page.content import open_page
from site_agent.policy import SitePolicy
from site_agent.status import AgentPresence
from tests.support.audit_attacks import Tampering, copied
from tests.support.audit_logs import Federation, data_opened
from tests.support.whole_federation import WholeFederation

# The Chromium of this machine, by its path: no browser is downloaded.

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def chromium() -> str | None:
    """Where it is: what CHROMIUM names, else the first one on the path."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running(path: str) -> Iterator[Any]:
    """A browser, gone afterwards. In a container there is no sandbox to be had, and root may not have one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


ROUNDS = 12
SHOWN_AFTER = 5
SIZES = {"": (1180, 900, "light"), "-phone": (390, 844, "light")}
PHONE_HEIGHT = 1700
COLOURS = 128
WAIT = 300.0


class Album:
    """Takes pictures of a page in both widths."""

    def __init__(self, browser: Any, out: Path, tell: ProgressPrinter) -> None:
        self._browser = browser
        self._out = out
        self._tell = tell

    def take(self, url: str, name: str, *, until: str, dark: bool = False) -> None:
        for suffix, (width, height, scheme) in SIZES.items():
            page = self._browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else scheme
            )
            page.goto(url)
            wait_until(lambda page=page: bool(page.evaluate(until)), until, seconds=WAIT)
            page.wait_for_timeout(300)
            self._keep(page.screenshot(full_page=True), self._out / f"{name}{suffix}.png", phone=bool(suffix))
            page.close()

    def _keep(self, data: bytes, path: Path, *, phone: bool) -> None:
        """Few colours are enough for a page, and make a small file."""
        image = Image.open(io.BytesIO(data)).convert("RGB")
        if phone and image.height > PHONE_HEIGHT:
            image = image.crop((0, 0, image.width, PHONE_HEIGHT))
        image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        self._tell(f"{path.name}: {path.stat().st_size // 1024} kB")


def put_dashboard(folders: FederationFolders) -> str:
    """Give the coordinator's page a port of its own; returns its address."""
    config, port = folders.coordinator / "coordinator.toml", free_port()
    config.write_text(config.read_text().replace("127.0.0.1:7480", f"127.0.0.1:{port}"))
    return f"http://127.0.0.1:{port}/"


def play(folders: FederationFolders, album: Album, tell: ProgressPrinter) -> None:
    """Run; pictures during the run; then one hospital stops answering in an aggregation, and pictures again."""
    url = put_dashboard(folders)
    coordinator, sites = folders.parties()
    first, last = next(iter(sites)), list(sites)[-1]
    server = None
    try:
        for site in sites.values():
            site.start()
        for site in sites.values():
            site.wait_for("again in", seconds=WAIT)  # it has started, and nobody is there yet
        coordinator.start()
        coordinator.wait_for(f"round {SHOWN_AFTER}: published", seconds=WAIT)
        tell("the run is under way")
        album.take(url, "dashboard", until=f"document.querySelectorAll('#rounds tbody tr').length >= {SHOWN_AFTER}")
        config = SiteConfig.read(folders.site(first) / "site.toml")
        server, address = open_page(config, "127.0.0.1:0", clock=SystemClock(), rng=SystemRandomness())
        album.take(address, "hospital", until="document.querySelectorAll('#confusion td').length > 4")
        sites[last].kill_at("before-S2")
        sites[last].wait_dead(seconds=WAIT)
        coordinator.wait_for("attempt ended", seconds=WAIT)
        tell(f"{last} does not answer, an attempt has failed")
        failed = "document.querySelectorAll('#aborts tbody tr').length > 0"
        album.take(url, "dashboard-after-abort", until=failed, dark=True)
    finally:
        if server is not None:
            server.stop()
        stop_all(sites.values(), coordinator)


# Pictures of the auditor's report: `scripts/screenshots --reports`.
#
# Three federations whose logs are really written and really audited: one that kept its rules, one in which a hospital
# changed an entry afterwards, and one in which a hospital opened data for another purpose. Each at a desk, on a
# telephone and on paper; long pages are folded into columns, so that a picture shows all of its report.


# Ink and its soft edges, and what the report says in colour.
REPORT_COLOURS: Final = (
    *((level, level, level) for level in (255, 243, 226, 205, 180, 150, 118, 84, 40)),
    *((146, 32, 38), (200, 130, 132), (32, 92, 58), (130, 170, 150), (28, 58, 98), (130, 148, 172), (140, 90, 10)),
)
REPORT_BLANK: Final = 200
REPORT_GAP: Final = 16
REPORT_GREY: Final = (190, 190, 190)
REPORT_WIDTHS: Final = {"": (1180, 3), "-phone": (390, 7)}  # how wide, and into how many columns it is folded
PAPER_SCALE: Final = 1.0
PAPER_COLUMNS: Final = 4


def federations(folder: Path) -> Iterator[tuple[str, Path, list[Path]]]:
    """Three federations: the name of their pictures, the consortium's root certificate, and the logs."""
    clean = Federation.make(folder / "clean")
    clean.play(4)
    clean.stop()
    yield "clean", clean.root_key, clean.folders

    changed = copied(clean.members["graz"].folder, folder / "tampered" / "graz")
    tampering = Tampering(changed)
    place = next(at for at, line in enumerate(tampering.lines) if b'"UploadFrame"' in line)
    tampering.edit(place, lambda entry: entry["body"].update(sha256="be" * 32))
    yield "tampered", clean.root_key, [changed if path.name == "graz" else path for path in clean.folders]

    lax = Federation.make(folder / "non-compliant")
    opened = dataclasses.replace(data_opened("vienna"), purpose="marketing", legal_basis="not stated")
    lax.members["vienna"].log.append(opened, run=lax.run)
    lax.play(4)
    lax.stop()
    yield "non-compliant", lax.root_key, lax.folders


def _report(target: Path, root: Path, folders: list[Path]) -> str:
    """The page that an auditor gets, at its address."""
    arguments = ["report", *map(str, folders), "--root-key", str(root), "-o", str(target)]
    done = CliRunner().invoke(audit, arguments)
    if not target.exists():
        raise ConfigError("no report was made", where=str(target), hint=done.output[-300:])
    return target.as_uri()


def _keep(image: Image.Image, path: Path, tell: Callable[[str], None]) -> None:
    """Sixteen colours are enough for a report, and make a small file."""
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in REPORT_COLOURS for part in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True, bits=4)
    tell(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size // 1024} kB")


def _sheet(parts: list[Image.Image], columns: int) -> Image.Image:
    width, height = max(part.width for part in parts), max(part.height for part in parts)
    rows = -(-len(parts) // columns)
    sheet = Image.new(
        "RGB", (columns * (width + REPORT_GAP) - REPORT_GAP, rows * (height + REPORT_GAP) - REPORT_GAP), REPORT_GREY
    )
    for number, part in enumerate(parts):
        row, column = divmod(number, columns)
        sheet.paste(part, (column * (width + REPORT_GAP), row * (height + REPORT_GAP)))
    return sheet


def _folded(image: Image.Image, columns: int) -> Image.Image:
    """A long page as columns of one height, cut between lines of text where there is white."""
    cuts, grey = [0], image.convert("L")
    for left in range(columns, 1, -1):
        height = -(-(image.height - cuts[-1]) // left)
        lowest = cuts[-1] + height
        rows = range(lowest, lowest - height // 4, -1)
        blank = (at for at in rows if grey.crop((0, at, image.width, at + 1)).getextrema()[0] > REPORT_BLANK)
        cuts.append(next(blank, lowest))
    ends = [*cuts[1:], image.height]
    return _sheet([image.crop((0, top, image.width, end)) for top, end in zip(cuts, ends, strict=True)], len(cuts))


def take_reports(browser: Any, out: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """All nine pictures."""
    out.mkdir(parents=True, exist_ok=True)
    for name, root, folders in federations(folder):
        address = _report(folder / f"{name}.html", root, folders)
        for suffix, (width, columns) in REPORT_WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(address)
            shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
            _keep(_folded(shot, columns), out / f"report-{name}{suffix}.png", tell)
            page.close()
        page = browser.new_page()
        page.goto(address)
        with pypdfium2.PdfDocument(page.pdf(format="A4", prefer_css_page_size=True)) as paper:
            sheets = [sheet.render(scale=PAPER_SCALE).to_pil().convert("RGB") for sheet in paper]
        _keep(_sheet(sheets, PAPER_COLUMNS), out / f"report-{name}-print.png", tell)
        page.close()


# Pictures of both pages in the states that an operator meets: `scripts/screenshots --states`.
#
# The pages are the real ones, of a federation in one process whose clock is moved by hand
# (`tests/support/whole_federation.py`): hours pass, a certificate is about to end, an agent is killed, and the run
# completes.


DAY_MS: Final = 86_400_000
SITE: Final = "graz"
STATE_ROUNDS: Final = 10
STATE_SIZES: Final = {"": (1180, 560), "-phone": (390, 760)}
STATE_COLOURS: Final = 96


class StateAlbum:
    """Takes the upper part of a page in both widths, at the federation's own time."""

    def __init__(self, browser: Any, out: Path, federation: WholeFederation) -> None:
        self._browser = browser
        self._out = out
        self._federation = federation

    def take(self, url: str, name: str) -> None:
        now = self._federation.clock.now_ms()
        for suffix, (width, height) in STATE_SIZES.items():
            page = self._browser.new_page(viewport={"width": width, "height": height})
            page.add_init_script(f"Date.now = () => {now}; Date.parse = () => {now};")
            page.goto(url)
            page.wait_for_selector("#alive.good")
            page.wait_for_timeout(300)
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            image.quantize(STATE_COLOURS, dither=Image.Dither.NONE).save(
                self._out / f"{name}{suffix}.png", optimize=True
            )
            page.close()


@contextmanager
def dashboard(federation: WholeFederation) -> Iterator[str]:
    """The operator's page as it is now."""
    shell, manifest = federation.shell, federation.manifest
    assert shell is not None
    heads = LogCheckpoints(shell.storage.log, audit_roster(manifest), manifest.coordinator.id)
    history = ReadOnlyHistory(shell.storage.path)
    page = PageState(manifest, history, heads)
    page.look(Live.of(shell))
    server = WebServer(pages(page, PhaseClock(), Guard()).answer, Address(host="127.0.0.1", port=0))
    server.start()
    try:
        yield server.url
    finally:
        server.stop()
        history.close()


def take_states(browser: Any, out: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """Every state, one after the other, in one run."""
    out.mkdir(parents=True, exist_ok=True)
    federation = WholeFederation(folder, rounds=STATE_ROUNDS)
    album = StateAlbum(browser, out, federation)
    federation.start_all()
    config = SiteConfig.read(federation.configs[SITE])

    def both(name: str, *, alive: bool = True) -> None:
        if alive:
            AgentPresence(config, federation.agents[SITE]).look()
        server, address = open_page(config, "127.0.0.1:0", clock=federation.clock, rng=SystemRandomness())
        try:
            album.take(address, f"hospital-{name}")
        finally:
            server.stop()
        with dashboard(federation) as url:
            album.take(url, f"dashboard-{name}")
        tell(name)

    federation.run_rounds(3)
    both("healthy")

    agent = federation.agents[SITE]
    agent.session.policy = SitePolicy(hours=_hours(federation.clock.now_ms() + DAY_MS // 4))
    federation.run_rounds(1)
    federation.run(lambda: agent.session.declined is not None)
    both("waiting-for-hours")
    agent.session.policy = SitePolicy()
    federation.clock.advance(DAY_MS)
    federation.run(lambda: agent.session.declined is None)

    PauseFile(config.state).set("the server room is moved", now_ms=federation.clock.now_ms())
    assert federation.shell is not None
    federation.shell.pause.set("the server room is moved", now_ms=federation.clock.now_ms())
    federation.run(lambda: federation.engine.phase is RunPhase.WAITING)
    both("paused")
    federation.shell.pause.clear()
    PauseFile(config.state).clear()
    federation.run_rounds(1)

    _renew(federation, days=5)
    federation.run_rounds(1)
    both("certificate-ending")
    _renew(federation, days=365)
    federation.run_rounds(1)

    federation.kill(SITE)
    federation.clock.advance(STALE_MS)
    federation.step()
    both("agent-dead", alive=False)

    federation.start(SITE)
    federation.run_rounds(STATE_ROUNDS - federation.published)
    federation.clock.advance(DAY_MS)
    federation.step()
    both("run-complete")
    federation.kill_hub()
    for site in list(federation.agents):
        federation.kill(site)


def _renew(federation: WholeFederation, *, days: int) -> None:
    world = federation.world
    world.authority.renew(world.key, SITE, None, now_ms=world.now, days=days)
    world.install(SITE)
    federation.manifest = world.publish()
    federation.adopt_at_hub()


def _hours(begin_ms: int) -> str:
    minute = begin_ms // 60_000 % 1440
    return f"{minute // 60:02}:{minute % 60:02}-{(minute // 60 + 2) % 24:02}:{minute % 60:02}"


# The command.


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--states", is_flag=True, help="Only the pages in the states that an operator meets.")
@click.option("--reports", is_flag=True, help="Only the auditor's report: clean, tampered with, rules not kept.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "docs" / "images")
def main(out: Path, states: bool, reports: bool) -> None:
    """Take all pictures again."""
    path, tell = chromium(), ProgressPrinter()
    if path is None:
        raise ConfigError("there is no Chromium", where="PATH", hint="install chromium, or set CHROMIUM to its path")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lazaret-screenshots-") as folder, running(path) as browser:
        if states:
            take_states(browser, out / "states", Path(folder), tell)
            return
        if reports:
            take_reports(browser, out / "report", Path(folder), tell)
            return
        options = DemoOptions(
            out=Path(folder), model="test_efficientnet", rounds=ROUNDS, sites=5, data="generated:scale=0.05"
        )
        play(set_up(options, tell), Album(browser, out, tell), tell)


if __name__ == "__main__":
    run_command(main, "screenshots")
