"""The hospital's page in a real browser, on the state directory of a real agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from lazaret.files import write_atomically
from security.rng import SystemRandomness
from site_agent.config import SiteConfig
from site_agent.page.content import OWNERS, VECTORS, open_page
from site_agent.trainer.personal_state import PersonalState
from tests.support.browser_pages import until
from tests.support.clinical_world import HOSTILE, drawn_figures
from tests.support.site_world import SiteWorld

SITE = "graz"
NAMES = ["melanoma", "<b>nevus</b><script>window.ran=1</script>", "keratosis"]
CONFUSION = [[5, 1, 0], [2, 7, 0], [0, 0, 3]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SiteWorld:
    made = SiteWorld(tmp_path_factory.mktemp("page"))
    made.start_all()
    made.run_round()
    state_dir = made.agents[SITE].state_dir
    state_dir.note_data({"names": NAMES, "train": [40, 90, 12], "validation": [4, 9, 1], "test": [6, 9, 3]})
    for number in (1, 2, 3):
        side = {"bacc": 0.3 + number / 10, "bauc": 0.6, "images": 18, "confusion": CONFUSION}
        state_dir.note_metrics({"round": number, "test": side, "validation": side})
    vectors = np.random.default_rng(1).normal(size=(7, 16)).astype(np.float32)
    personal = PersonalState(state_dir.folder)
    write_atomically(personal.evaluation, json.dumps(drawn_figures()).encode(), mode=0o600)
    personal.remember(3, save({VECTORS: vectors, OWNERS: np.array([0, 0, 1, 1, 1, 2, 2])}))
    return made


@pytest.fixture
def address(world: SiteWorld, browser: Any) -> Iterator[str]:
    config = SiteConfig.read(world.configs[SITE])
    server, url = open_page(config, "127.0.0.1:0", clock=world.clock, rng=SystemRandomness())
    yield url
    server.stop()


def test_all_that_is_promised_is_on_it(address: str, watch: Callable[..., Any]) -> None:
    watched = watch()
    page = watched.open(address)
    page.wait_for_selector("#prototypes .proto")
    assert page.locator("#today tbody tr").count() >= 4
    assert "masked vector" in page.locator("#today").inner_text()
    assert "no privacy ledger" in page.locator("#privacy").inner_text()
    assert page.locator("#curves polyline").count() == 3
    assert page.locator("#classes tbody tr").count() == len(NAMES)
    assert page.locator("#confusion tbody td").all_inner_texts() == [str(one) for row in CONFUSION for one in row]
    assert page.locator("#prototypes figure > svg .proto").count() == 7
    assert NAMES[1] in page.locator("#classes").inner_text()
    assert page.evaluate("window.ran") is None
    watched.check_calm(address)


OUTSIDE = """
[...document.querySelectorAll("#evaluation td, #evaluation thead th, #evaluation svg")].filter((one) =>
  one.getBoundingClientRect().right > document.getElementById("evaluation").getBoundingClientRect().right + 1).length
"""


@pytest.mark.parametrize("width", [1180, 900, 360])
def test_figures_for_clinicians_are_on_it(address: str, watch: Callable[..., Any], width: int) -> None:
    watched = watch(width)
    page = watched.open(address)
    page.wait_for_selector("#evaluation table")
    figures = drawn_figures()
    shown = page.locator("#evaluation").inner_text()
    one = figures["clinical"][0]
    low, high = one["sensitivity_interval"]
    assert f"{one['sensitivity']:.2f} ({low:.2f}–{high:.2f})" in shown and HOSTILE in shown
    assert "not recorded" in shown and "Subgroups" in shown
    page.locator("#evaluation summary").first.click()
    assert page.locator("#evaluation details[open] polyline").count() == 5, "two curves and three"
    assert page.evaluate(OUTSIDE) == 0, "nothing is cut off"
    assert page.evaluate("window.ran") is None
    watched.check_calm(address)


def test_it_fits_a_telephone(address: str, watch: Callable[..., Any]) -> None:
    watched = watch(360, 740, "dark")
    page = watched.open(address)
    page.wait_for_selector("#prototypes .proto")
    page.evaluate("document.querySelectorAll('#evaluation details').forEach(one => { one.open = true })")
    watched.check_narrow()
    watched.check_calm(address)


def test_it_follows_the_agent(world: SiteWorld, address: str, watch: Callable[..., Any]) -> None:
    page = watch().open(address)
    accepted = "document.querySelectorAll('.facts dd')[1].textContent.startsWith('{} of ')"
    until(page, accepted.format(1))
    entries = page.locator(".facts dd").nth(5).inner_text()
    world.run_round()
    until(page, accepted.format(2))
    assert page.locator(".facts dd").nth(5).inner_text() != entries


def test_a_page_of_elsewhere_cannot_read_it(address: str, tmp_path: Path, browser: Any) -> None:
    """Even with the whole address: the browser keeps another origin's script from the answer."""
    page = browser.new_page()
    (tmp_path / "evil.html").write_text("<!doctype html><title>evil</title>")
    page.goto((tmp_path / "evil.html").as_uri())
    read = "url => fetch(url).then(answer => answer.text()).catch(() => 'nothing')"
    assert page.evaluate(read, f"{address}state.json") == "nothing"
    page.close()
