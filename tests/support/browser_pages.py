"""Pages in a real browser, watched: everything they ask for, and every complaint of the browser."""

from __future__ import annotations

from typing import Any

from scripts.local_federation.federation import wait_until

# What the browser itself would report of a script or style that the page's policy forbids.
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


def until(page: Any, true: str, seconds: float = 60.0) -> None:
    """Ask the page again and again. The browser driver's own waiting evaluates text in the page, against its policy."""
    wait_until(lambda: bool(page.evaluate(true)), true, seconds=seconds)


class Watched:
    """A page, everything it asked for, and every complaint of the browser."""

    def __init__(self, browser: Any, width: int, height: int, scheme: str) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page.set_default_timeout(60_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.add_init_script(WATCH_POLICY)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda told: self._heard(told.type, told.text))
        self.page.on("dialog", lambda dialog: (self.complaints.append("a dialog opened"), dialog.dismiss()))

    def _heard(self, kind: str, text: str) -> None:
        if kind == "error":
            self.complaints.append(text)

    def open(self, url: str) -> Any:
        self.page.goto(url)
        until(self.page, "document.getElementById('alive').textContent === 'page up to date'")
        return self.page

    def check_calm(self, url: str) -> None:
        """Nothing left the origin, nothing was against the policy, nothing went wrong."""
        assert self.page.evaluate("window.violations") == []
        assert self.complaints == []
        strangers = [one for one in self.requests if not one.startswith((url, "data:"))]
        assert strangers == []

    def check_narrow(self) -> None:
        wide, room = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= room
