"""Where a coordinator listens: a port that exists, in the file and at `coordinator init`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.config import CoordinatorConfig
from lazaret.errors import ConfigError

TEXT = 'identity = "i"\nstate = "s"\nlisten = "{listen}"\ninitial_model = "m"\n[dashboard]\nlisten = "{page}"\n'


def read(folder: Path, listen: str, page: str = "127.0.0.1:7480") -> CoordinatorConfig:
    path = folder / "coordinator.toml"
    path.write_text(TEXT.format(listen=listen, page=page))
    return CoordinatorConfig.read(path)[0]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:7443", "[::]:65535", "hub.example:00080"])
def test_ports_that_there_are(tmp_path: Path, listen: str) -> None:
    config = read(tmp_path, listen, listen)
    assert config.listen == config.dashboard.listen == listen


@pytest.mark.parametrize("port", [65_536, 99_999])
def test_ports_that_there_are_not(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="listen: there is no port above 65535") as raised:
        read(tmp_path, f"127.0.0.1:{port}")
    assert "host:port" in (raised.value.hint or "")
    with pytest.raises(ConfigError, match=r"dashboard\.listen: there is no port above 65535"):
        read(tmp_path, "127.0.0.1:7443", f"127.0.0.1:{port}")


def test_init_writes_no_file_that_would_be_refused(tmp_path: Path) -> None:
    words = ["init", str(tmp_path / "hub"), "--federation", "lesions", "--name", "hub", "--host", "hub.example"]
    result = CliRunner().invoke(cli, [*words, "--listen", "0.0.0.0:99999"])
    assert isinstance(result.exception, ConfigError) and not (tmp_path / "hub").exists()
