"""A real browser for both pages: the Chromium of this machine, started once. No browser is ever downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scripts.local_federation.screenshots import chromium, running
from tests.support.browser_pages import Watched


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one file: while the driver is in this thread, no other test can run an event loop in it."""
    path = chromium()
    if path is None:
        pytest.skip("there is no Chromium on this machine: install it, or set CHROMIUM to its path")
    with running(path) as found:
        yield found


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[..., Watched]]:
    opened: list[Watched] = []

    def make(width: int = 1180, height: int = 900, scheme: str = "light") -> Watched:
        opened.append(Watched(browser, width, height, scheme))
        return opened[-1]

    yield make
    for one in opened:
        one.page.close()
