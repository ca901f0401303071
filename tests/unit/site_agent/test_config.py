"""site.toml: what `init` writes is read back; each mistake names its key."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from lazaret.errors import ConfigError
from npr.config import DeviceSettings
from site_agent.client import meter_for
from site_agent.config import CoordinatorTable, DataTable, SiteConfig, SiteTable
from site_agent.policy import SitePolicy
from site_agent.setup_commands import site_toml

VALUES = {
    "identity": "identity",
    "state": "state",
    "initial_model": "initial.safetensors",
    "address": "hub.example:7443",
    "source": 'csv:"odd" name.csv',
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "site.toml"
    target.write_text(site_toml(**VALUES))
    return target


def test_the_written_file_is_read_back(path: Path) -> None:
    config = SiteConfig.read(path)
    assert config.coordinator.address == "hub.example:7443"
    assert config.data.source == VALUES["source"].replace("csv:", f"csv:{path.parent.resolve()}/")
    assert config.identity == (path.parent / "identity").resolve()
    assert config.policy == SitePolicy()


def test_every_key_stands_in_the_written_file_with_a_comment(path: Path) -> None:
    text = path.read_text()
    for table in (SiteTable, CoordinatorTable, DataTable, SitePolicy):
        for name in table.model_fields:
            assert any(line.lstrip("# ").startswith((f"{name} =", f"[policy.{name}]")) for line in text.splitlines()), (
                name
            )


def test_where_to_compute_is_read(path: Path) -> None:
    assert SiteConfig.read(path).site.computing == DeviceSettings()
    asked = 'device = "cuda:1"\nprecision = "bfloat16"\ndeterministic = true\nmicro_batch = 8\n'
    asked += "checkpointing = true\ncompiled = true\n"
    path.write_text(path.read_text().replace("[site]\n", f"[site]\n{asked}"))
    assert SiteConfig.read(path).site.computing == DeviceSettings(
        device="cuda:1", precision="bfloat16", deterministic=True, micro_batch=8, checkpointing=True, compiled=True
    )
    path.write_text(path.read_text().replace('"cuda:1"', '"gpu"'))
    with pytest.raises(ConfigError, match="device"):
        SiteConfig.read(path)


def test_uncommented_defaults_are_valid(path: Path) -> None:
    lines = [
        line.removeprefix("# ") if "=" in line or "[policy.settings]" in line else line
        for line in path.read_text().splitlines()
    ]
    wanted = "\n".join(line for line in lines if not line.startswith("                    "))
    told = tomllib.loads("\n".join(line for line in wanted.splitlines() if not line.startswith("# ")))
    assert told["policy"]["settings"]["learning_rate"] == {"most": 0.01}
    (path.parent / "all.toml").write_text("\n".join(line for line in wanted.splitlines() if not line.startswith("# ")))
    assert SiteConfig.read(path.parent / "all.toml").policy.hours == "20:00-06:00"


ADDRESS = 'address = "hub.example:7443"'
PROXY = '# proxy = "http://proxy.example:3128"'
MISTAKES = [
    ("state = ", "stat = ", "site.stat", "unknown key", "did you mean state?"),
    ("[policy]", "[polices]", "polices", "unknown key", "did you mean policy?"),
    ('address = "hub.example:7443"', 'address = "hub.example"', "coordinator.address", "should match", ""),
    ('address = "hub.example:7443"', "address = 7443", "coordinator.address", "valid string", ""),
    ("# threads = 4", 'threads = "4"', "site.threads", "valid integer", ""),
    ("# ready_slot = 600", "ready_slot = 0", "site.ready_slot", "greater than 0", ""),
    ("# least_cohort = 3", "least_cohort = 1", "policy.least_cohort", "greater than or equal to 2", ""),
    ("# most_rounds = 80", "most_round = 80", "policy.most_round", "unknown key", "did you mean most_rounds?"),
    ('# hours = "20:00-06:00"', 'hours = "8pm"', "policy.hours", "two times of day", ""),
    ('# proxy = "http://proxy.example:3128"', 'proxy = "socks5://x"', "coordinator.proxy", "should match", ""),
    ('initial_model = "initial.safetensors"', "", "site.initial_model", "field required", ""),
    (ADDRESS, 'address = "hub.example:99999"', "coordinator.address", "from 1 to 65535", "host:port"),
    (ADDRESS, 'address = "hub.example:0"', "coordinator.address", "from 1 to 65535", "host:port"),
    (ADDRESS, 'address = "[::::]:7443"', "coordinator.address", "from 1 to 65535", "host:port"),
    (ADDRESS, 'address = "hub.example?:7443"', "coordinator.address", "should match", "host:port"),
    (PROXY, 'proxy = "http://x:abc"', "coordinator.proxy", "from 1 to 65535", "http://host:port"),
    (PROXY, 'proxy = "http://x:65536"', "coordinator.proxy", "from 1 to 65535", "http://host:port"),
    (PROXY, 'proxy = "http://:3128"', "coordinator.proxy", "from 1 to 65535", "http://host:port"),
    ('# listen = "127.0.0.1:7481"', 'listen = "127.0.0.1:65536"', "metrics.listen", "up to 65535", ""),
]


@pytest.mark.parametrize(("old", "new", "key", "what", "hint"), MISTAKES, ids=[mistake[1] for mistake in MISTAKES])
def test_mistakes_name_file_and_key(path: Path, old: str, new: str, key: str, what: str, hint: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        SiteConfig.read(path)
    assert caught.value.where == f"{path}: {key}" or str(caught.value.where).startswith(f"{path}: {key}.")
    assert what in caught.value.message and hint in (caught.value.hint or "") and caught.value.exit_code == 2


@pytest.mark.parametrize(("content", "what"), [(b"[site", "not toml"), (b"\xff\xfe", "cannot be read")])
def test_files_that_are_no_configuration(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=what) as caught:
        SiteConfig.read(path)
    assert "may this user read it" in (caught.value.hint or "")


@pytest.mark.parametrize("proxy", ["http://user:hunter2@x:abc", "http://user:hunter2", "http://user:hunter2@[::1"])
def test_a_proxys_password_is_not_repeated(path: Path, proxy: str) -> None:
    path.write_text(path.read_text().replace(PROXY, f'proxy = "{proxy}"'))
    with pytest.raises(ConfigError) as caught:
        SiteConfig.read(path)
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"


GOOD = [
    ("hub:1", "http://proxy"),
    ("hub.example:65535", "http://proxy:1"),
    ("10.0.0.1:7443", "http://user:word@proxy:8"),
    ("[::1]:7443", "http://[::1]:8"),
]


@pytest.mark.parametrize(("address", "proxy"), GOOD)
def test_what_can_be_dialled_is_taken_and_metered(address: str, proxy: str) -> None:
    for table in (CoordinatorTable(address=address), CoordinatorTable(address=address, proxy=proxy)):
        assert meter_for(table).sent == 0


def test_the_example_of_the_errors_page_is_what_is_printed(path: Path) -> None:
    path.write_text(path.read_text().replace("# least_cohort = 3", "least_cohort = 1"))
    with pytest.raises(ConfigError) as caught:
        SiteConfig.read(path)
    page = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")
    said = str(caught.value).replace(str(path), path.name)
    assert f"    site-agent: error: {said}\n    hint: {caught.value.hint}\n" in page


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not found") as caught:
        SiteConfig.read(tmp_path / "site.toml")
    assert "init" in (caught.value.hint or "")


def test_a_folder_that_was_moved_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        SiteConfig.read(tmp_path / "site.toml")
    assert "if its folder was moved, --config says where it is now" in str(caught.value.hint)
