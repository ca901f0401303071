"""Data sets from a file of the user: with folds and sides like any other."""

import pytest

from lazaret.errors import ConfigError, LocalProtocolError
from npr.data.sources import open_catalogue
from npr.lab import plugins
from npr.lab.cell import load_data
from npr.lab.plan import DataSettings, Settings
from npr.lab.plugins import register_data
from npr.lab.request import make_plan, preset


@pytest.fixture
def scans(monkeypatch):
    monkeypatch.setattr(plugins, "_data", {})
    asked = []

    @register_data("scans")
    def opener(rest, image_size):
        asked.append((rest, image_size))
        return open_catalogue("generated:scale=0.001,sites=3", image_size=image_size, seed=0)

    return asked


def test_a_plugins_data_set_has_sides_like_any_other(scans):
    plan = make_plan(preset("quick"), data="scans:here")
    assert plan.settings.data.source == "scans:here"
    dataset = load_data(Settings(data=DataSettings(source="scans:here", image_size=16)), "fold")
    assert scans == [("here", 16)] and all(site.validation is not None for site in dataset.sites)


def test_a_name_is_taken_once_and_an_unknown_one_is_refused(scans):
    for name in ("scans", "csv"):
        with pytest.raises(LocalProtocolError, match="registered already"):
            register_data(name)(lambda rest, image_size: None)
    with pytest.raises(ConfigError, match="unknown data source 'scan'") as caught:
        make_plan(preset("quick"), data="scan:here")
    assert "scans" in str(caught.value.hint)
