"""Pictures of both pages in the states that an operator meets: `scripts/screenshots --states`.

The pages are the real ones, of a federation in one process whose clock is moved by hand
(`tests/support/whole_federation.py`): hours pass, a certificate is about to end, an agent dies, and the run completes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from PIL import Image

from coordinator.dashboard.live import Live
from coordinator.dashboard.server import PhaseClock, pages
from coordinator.dashboard.state_json import LogCheckpoints, PageState
from coordinator.phases import RunPhase
from coordinator.round_history import ReadOnlyHistory
from lazaret.control import STALE_MS, PauseFile
from lazaret.web.access import Address, Guard
from lazaret.web.server import WebServer
from security.log.roster import audit_roster
from security.rng import SystemRandomness
from site_agent.config import SiteConfig
from site_agent.page.content import open_page
from site_agent.policy import SitePolicy
from site_agent.status import AgentPresence
from tests.support.whole_federation import WholeFederation

DAY_MS: Final = 86_400_000
SITE: Final = "graz"
ROUNDS: Final = 10
SIZES: Final = {"": (1180, 560), "-phone": (390, 760)}
COLOURS: Final = 96


class StateAlbum:
    """Takes the upper part of a page in both widths, at the federation's own time."""

    def __init__(self, browser: Any, out: Path, federation: WholeFederation) -> None:
        self._browser = browser
        self._out = out
        self._federation = federation

    def take(self, url: str, name: str) -> None:
        now = self._federation.clock.now_ms()
        for suffix, (width, height) in SIZES.items():
            page = self._browser.new_page(viewport={"width": width, "height": height})
            page.add_init_script(f"Date.now = () => {now}; Date.parse = () => {now};")
            page.goto(url)
            page.wait_for_selector("#alive.good")
            page.wait_for_timeout(300)
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            image.quantize(COLOURS, dither=Image.Dither.NONE).save(self._out / f"{name}{suffix}.png", optimize=True)
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
    federation = WholeFederation(folder, rounds=ROUNDS)
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
    federation.run_rounds(ROUNDS - federation.published)
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
