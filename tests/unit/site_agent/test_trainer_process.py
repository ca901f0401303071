"""What a trainer's process is started with."""

from __future__ import annotations

import pytest

from site_agent.trainer_process import _environment


def test_addresses_and_passwords_of_proxies_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTP_PROXY", "all_proxy", "GRPC_PROXY"):
        monkeypatch.setenv(name, "http://user:s3cr3t@proxy.example:3128")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = _environment()
    assert "s3cr3t" not in str(found) and found["OMP_NUM_THREADS"] == "1"
