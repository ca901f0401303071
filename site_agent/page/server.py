"""`site-agent status --web`: the hospital's page on this machine's own address, behind a token for one start."""

from __future__ import annotations

import base64

import click

from lazaret.terminal import say
from lazaret.web.access import Guard, require_loopback
from lazaret.web.pages import Pages, assets
from lazaret.web.server import WebServer
from security.clock import Clock, SystemClock
from security.rng import Randomness, SystemRandomness
from site_agent.config import SiteConfig
from site_agent.page.content import Content

TOKEN_BYTES = 24


def open_page(config: SiteConfig, listen: str, *, clock: Clock, rng: Randomness) -> tuple[WebServer, str]:
    """The page, listening, and the address to open. Who does not have the whole address gets nothing: other people
    may have accounts on this machine.

    :raises ConfigError: if another machine could reach it.
    """
    address = require_loopback(listen, where="--listen")
    token = base64.urlsafe_b64encode(rng.bytes(TOKEN_BYTES)).decode()
    routes = {
        **assets("lazaret.web", "kit.js", "base.css"),
        **assets("site_agent.page", "index.html", "app.js", "style.css"),
        "/state.json": Content(config, clock).state,
    }
    server = WebServer(Pages(routes, Guard(folder=token)).answer, address)
    server.start()
    return server, f"{server.url}{token}/"


def show_page(config: SiteConfig, listen: str) -> None:
    """Show the page until it is interrupted."""
    server, url = open_page(config, listen, clock=SystemClock(), rng=SystemRandomness())
    say("this page is confidential: it shows data that never leave this site. Ctrl-C ends it")
    click.echo(url)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.stop()
