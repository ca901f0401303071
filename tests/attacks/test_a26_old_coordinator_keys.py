"""A26 over real TLS: somebody answers with a coordinator's key that the consortium has replaced. Its certificate is of
the right root and has not expired; only the manifest in force knows that the key is no longer the coordinator's."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from protos import tls
from security.identity import keystore, pki
from security.identity.pki import Purpose, Role
from site_agent import outbox
from site_agent.client import Client
from site_agent.run import Agent
from tests.integration.test_site_client import Coordinator, agent, greet, table, until, world
from tests.support.consortium_world import World, subject

import grpc  # isort: skip

__all__ = ["agent", "world"]  # fixtures


def old_key(world: World, folder: Path) -> grpc.ServerCredentials:
    """A certificate that the consortium has issued once, for a key that no manifest lists any more."""
    key = pki.new_tls_key()
    hub = subject("hub", Role.COORDINATOR)
    certificate = pki.issue(
        world.key,
        world.authority.root,
        hub,
        Purpose.TLS,
        key.public_key(),
        hosts=("localhost", "127.0.0.1"),
        now_ms=world.now,
    )
    keystore.save_private_key(folder / "old.key", key)
    root = world.identity("hub").root_path.read_bytes()
    pair = ((folder / "old.key").read_bytes(), pki.to_pem(certificate).encode())
    return grpc.ssl_server_credentials([pair], root_certificates=root, require_client_auth=True)


def called(world: World, agent: Agent, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a site says to it, in three connections or until it is greeted."""
    impostor = old_key(world, folder)

    async def scenario() -> Coordinator:
        coordinator = Coordinator(world, greet)
        monkeypatch.setattr(tls, "server_credentials", lambda _: impostor)
        port = await coordinator.start()
        client = Client(agent, table(port))

        async def give_up() -> None:
            while coordinator.streams < 3:
                await asyncio.sleep(0.05)
            coordinator.done.set()

        watch = asyncio.create_task(give_up())
        await until(client, coordinator.done)
        watch.cancel()
        await coordinator.server.stop(0)
        return coordinator

    return [type(message).__name__ for message in asyncio.run(scenario()).heard]


def test_an_old_key_of_the_coordinator_is_told_nothing(
    world: World, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="site-agent")
    assert set(called(world, agent, tmp_path, monkeypatch)) == {"Open"}
    assert "the coordinator's TLS key is not in manifest version 1" in caplog.text


def test_an_old_key_of_the_coordinator_twin(
    world: World, agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "check_coordinator_pin", lambda *_: None)
    assert "Hello" in called(world, agent, tmp_path, monkeypatch)
