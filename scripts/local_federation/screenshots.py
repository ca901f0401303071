"""`scripts/screenshots`: pictures of both pages from a federation that really runs, and in which an attempt fails."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from PIL import Image

from lazaret.errors import ConfigError
from lazaret.terminal import run_command
from scripts.local_federation.demo import Told, Wishes, lay_out
from scripts.local_federation.processes import ROOT, stop_all, wait_until
from scripts.local_federation.setup import Grounds, free_port
from security.clock import SystemClock
from security.rng import SystemRandomness
from site_agent.config import SiteConfig
from site_agent.page.content import open_page

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

    def __init__(self, browser: Any, out: Path, tell: Told) -> None:
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


def put_dashboard(grounds: Grounds) -> str:
    """Give the coordinator's page a port of its own; returns its address."""
    config, port = grounds.coordinator / "coordinator.toml", free_port()
    config.write_text(config.read_text().replace("127.0.0.1:7480", f"127.0.0.1:{port}"))
    return f"http://127.0.0.1:{port}/"


def play(grounds: Grounds, album: Album, tell: Told) -> None:
    """Run; pictures during the run; then one hospital stops answering in an aggregation, and pictures again."""
    url = put_dashboard(grounds)
    coordinator, sites = grounds.parties()
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
        config = SiteConfig.read(grounds.site(first) / "site.toml")
        server, address = open_page(config, "127.0.0.1:0", clock=SystemClock(), rng=SystemRandomness())
        album.take(address, "hospital", until="document.querySelectorAll('#confusion td').length > 4")
        sites[last].ordain("before-S2")
        sites[last].wait_dead(seconds=WAIT)
        coordinator.wait_for("attempt ended", seconds=WAIT)
        tell(f"{last} does not answer, an attempt has failed")
        failed = "document.querySelectorAll('#aborts tbody tr').length > 0"
        album.take(url, "dashboard-after-abort", until=failed, dark=True)
    finally:
        if server is not None:
            server.stop()
        stop_all(sites.values(), coordinator)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--states", is_flag=True, help="Only the pages in the states that an operator meets.")
@click.option("--reports", is_flag=True, help="Only the auditor's report: clean, tampered with, rules not kept.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "docs" / "images")
def main(out: Path, states: bool, reports: bool) -> None:
    """Take all pictures again."""
    path, tell = chromium(), Told()
    if path is None:
        raise ConfigError("there is no Chromium", where="PATH", hint="install chromium, or set CHROMIUM to its path")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lazaret-screenshots-") as folder, running(path) as browser:
        if states:
            from scripts.local_federation.state_pictures import take_states

            take_states(browser, out / "states", Path(folder), tell)
            return
        if reports:
            from scripts.local_federation.report_pictures import take_reports

            take_reports(browser, out / "report", Path(folder), tell)
            return
        wishes = Wishes(
            out=Path(folder), model="test_efficientnet", rounds=ROUNDS, sites=5, data="generated:scale=0.05"
        )
        play(lay_out(wishes, tell), Album(browser, out, tell), tell)


if __name__ == "__main__":
    run_command(main, "screenshots")
