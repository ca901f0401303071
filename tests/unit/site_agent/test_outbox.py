"""The one door out: what it stops, what it logs first, and that each check matters."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import AuditLogError, LocalProtocolError, PolicyViolation
from protos.parse import FROM_SITE
from security.crypto.key_agreement import BOX_BYTES, PAIR_BYTES
from security.crypto.masking import vector_root
from security.log import egress
from security.rng import CountedRandomness
from security.secagg import messages, relay
from security.secagg.effects import Send, SendUpload
from site_agent import outbox as outboxes
from site_agent.assembly import logged_bytes
from site_agent.run import Agent
from tests.support.consortium_world import SITES
from tests.support.site_world import SiteWorld, policy_table

SITE = "linz"


def agent_of(tmp_path: Path, policy: str = "") -> tuple[SiteWorld, Agent]:
    world = SiteWorld(tmp_path, policy=policy)
    agent = world.start(SITE)
    agent.outbox.opened(7)
    return world, agent


def masked(agent: Agent, *, plain: bool = False) -> SendUpload:
    """A vector as masks leave it, or as a broken masking path would."""
    layout = agent.seat.layout
    if plain:
        vector = layout.ring.pack(np.arange(layout.words, dtype=layout.dtype) % 90)
    else:
        vector = np.frombuffer(CountedRandomness(b"masks").bytes(layout.byte_length), dtype=np.uint8)
    return SendUpload(bytes(32), vector, root=vector_root(vector), round=1, cohort=SITES)


def test_a_masked_vector_leaves_after_one_entry_for_all_of_it(tmp_path: Path) -> None:
    world, agent = agent_of(tmp_path)
    post = masked(agent)
    leaving = agent.outbox.vector(post)
    first = next(leaving)
    (entry,) = world.entries(SITE, "egress")  # on disk before the first frame is out of our hands
    payloads = [first, *leaving]
    assert entry["bytes"] == entry["expected_bytes"] == sum(map(len, payloads))
    assert entry["sha256"] == post.root.hex() and entry["masked"] is True
    assert entry["msg_id"] == relay.message_id(SITE, 7, 1, from_site=True)
    assert [FROM_SITE.decode(payload).sequence for payload in payloads] == list(range(1, len(payloads) + 1))


def test_an_unmasked_vector_is_blocked_and_its_digest_is_not_even_logged(tmp_path: Path) -> None:
    world, agent = agent_of(tmp_path)
    with pytest.raises(PolicyViolation, match="does not look masked"):
        list(agent.outbox.vector(masked(agent, plain=True)))
    assert world.entries(SITE, "egress") == []
    (entry,) = world.entries(SITE, "egress.blocked")
    assert entry["rule"] == "vector does not look masked" and entry["sha256"] is None
    assert agent.outbox.sent == {}


def test_twin_without_the_look_at_it_the_plain_vector_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, agent = agent_of(tmp_path)
    monkeypatch.setattr(egress, "uniformity_of", lambda outgoing: 1.0)
    payloads = list(agent.outbox.vector(masked(agent, plain=True)))
    frame = FROM_SITE.decode(payloads[0]).message
    assert isinstance(frame, messages.UploadFrame)
    assert agent.seat.layout.ring.unpack(frame.data)[:3].tolist() == [0, 1, 2]


def shares(count: int) -> messages.Shares:
    """A message with more room in it than a cohort of three explains."""
    empty = messages.DealtShare(b_hash=bytes(32), s_hash=bytes(32), box=b"", pair=b"")
    full = {"box": bytes(BOX_BYTES), "pair": bytes(PAIR_BYTES)}
    boxed = messages.DealtShare(b_hash=bytes(32), s_hash=bytes(32), **full)
    return messages.Shares(site=SITE, kx=bytes(32), shares=(empty, *[boxed] * (count - 1)), signature=bytes(64))


def test_a_message_longer_than_its_type_is_blocked(tmp_path: Path) -> None:
    world, agent = agent_of(tmp_path)
    assert list(agent.outbox.post(Send(shares(3), round=1, cohort=SITES)))
    with pytest.raises(PolicyViolation, match="length differs"):
        list(agent.outbox.post(Send(shares(4), round=1, cohort=SITES)))
    assert [entry["message"] for entry in world.entries(SITE, "egress")] == ["Shares"]
    assert len(world.entries(SITE, "egress.blocked")) == 1


def test_twin_without_the_size_equation_92_hidden_bytes_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, agent = agent_of(tmp_path)
    monkeypatch.setattr(egress, "due_bytes", lambda message, origin, numbers: 1024)
    monkeypatch.setattr(egress, "_refused", lambda rule, outgoing: pytest.fail("unused"))

    def lax(outgoing: egress.Outgoing) -> egress.Egress:
        data_class = egress.permitted()[outgoing.message]
        return egress.Egress(
            msg_id=outgoing.msg_id,
            message=outgoing.message,
            data_class=data_class,
            bytes=len(outgoing.payload),
            sha256="00" * 32,
            expected_bytes=len(outgoing.payload),
            shape=egress.recorded_shape(outgoing.shape),
            masked=False,
            modulus_bits=None,
            uniformity=None,
            destination=outgoing.destination,
            head=outgoing.head,
        )

    monkeypatch.setattr(outboxes, "check_outgoing", lax)
    (payload,) = agent.outbox.post(Send(shares(4), round=1, cohort=SITES))
    assert isinstance(FROM_SITE.decode(payload).message, messages.Shares)


def test_what_only_the_coordinator_may_say_does_not_leave(tmp_path: Path) -> None:
    world, agent = agent_of(tmp_path)
    with pytest.raises(LocalProtocolError):
        list(agent.outbox.post(Send(relay.Ping(number=1))))
    frame = messages.UploadFrame(kx=bytes(32), index=0, data=b"")
    with pytest.raises(LocalProtocolError, match="frames are sent as one vector"):
        list(agent.outbox.post(Send(frame)))
    assert world.entries(SITE, "egress") == []


def test_without_a_stream_nothing_is_logged_as_sent(tmp_path: Path) -> None:
    world, agent = agent_of(tmp_path)
    agent.closed()
    assert list(agent.outbox.post(Send(relay.Pong(number=1)))) == []
    assert list(agent.outbox.vector(masked(agent))) == []
    assert world.entries(SITE, "egress") == []


def test_a_log_that_cannot_be_written_stops_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, agent = agent_of(tmp_path)

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent.log._writer.disk, "write", full)
    for _ in range(2):  # and it stays closed
        with pytest.raises(AuditLogError):
            list(agent.outbox.post(Send(relay.Pong(number=1))))
    assert agent.outbox.sent == {}


def test_bytes_of_a_round_are_limited_over_all_its_attempts(tmp_path: Path) -> None:
    vector = SiteWorld(tmp_path / "size").manifest.aggregation.layout.byte_length
    world, agent = agent_of(tmp_path / "world", policy_table(most_bytes_per_round=str(vector + 500)))
    assert list(agent.outbox.vector(masked(agent)))
    with pytest.raises(PolicyViolation, match="bytes in one round"):
        list(agent.outbox.vector(masked(agent)))
    assert world.entries(SITE, "egress.blocked")[0]["message"] == "UploadFrame"


def test_a_restart_does_not_give_a_round_its_limit_once_more(tmp_path: Path) -> None:
    vector = SiteWorld(tmp_path / "size").manifest.aggregation.layout.byte_length
    world, agent = agent_of(tmp_path / "world", policy_table(most_bytes_per_round=str(vector + 500)))
    list(agent.outbox.post(Send(relay.Pong(number=1))))  # of no round
    assert list(agent.outbox.vector(masked(agent)))
    spent = agent.outbox.spent(1)
    world.kill(SITE)
    again = world.start(SITE)
    again.outbox.opened(8)
    assert (again.outbox.spent(1), again.outbox.spent(2)) == (spent, 0) and again.session.spent(1) == spent > vector
    with pytest.raises(PolicyViolation, match="bytes in one round"):
        list(again.outbox.vector(masked(again)))


def test_what_a_round_has_cost_is_told_by_run(tmp_path: Path) -> None:
    world, agent = agent_of(tmp_path)
    list(agent.outbox.post(Send(shares(3), round=1, cohort=SITES)))
    folder = agent.state_dir.log
    assert logged_bytes(folder, world.manifest.run) == {1: agent.outbox.spent(1)}
    assert logged_bytes(folder, "another-run") == {}


def test_a_broken_stream_ends_the_vector_between_two_frames(tmp_path: Path) -> None:
    _, agent = agent_of(tmp_path)
    leaving = agent.outbox.vector(masked(agent))
    next(leaving)
    agent.closed()
    assert list(leaving) == []


# What the whole package promises.

PACKAGE = Path(outboxes.__file__).parent


def test_only_the_outbox_encodes_and_only_the_client_writes() -> None:
    def with_words(pattern: str) -> set[str]:
        found = [path for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())]
        return {str(path.relative_to(PACKAGE)) for path in found}

    assert with_words(r"FROM_SITE\.encode") == {"outbox.py"}
    assert with_words(r"call\.write") == {"client.py"}
    # The channel joins agent and trainer on one machine; the trainer has no other socket.
    channel = {"trainer_process.py", "trainer/__main__.py", "trainer/channel.py"}
    assert with_words(r"\.sendall\(") == {"trainer/channel.py"}
    # The workers' sockets join processes of the same hospital; they carry no message of the protocol. `check` opens a
    # connection to the coordinator and closes it again. The isolation tries from inside that no socket can be opened.
    networks = {"client.py", "checks/context.py", "trainer/workers.py", "trainer/isolation.py", "trainer/kernel.py"}
    # The hospital's own archive is asked by a process that can read neither keys nor state, and has no stream.
    archive = {"archive/access.py", "archive/dicomweb.py"}
    assert with_words(r"import (grpc|socket|ssl|http)") == networks | channel | archive


def test_everything_but_learning_works_without_torch() -> None:
    code = "import sys\nsys.modules['torch'] = None\n"
    code += "from site_agent import run, assembly, client, outbox, session, state_dir, config, policy, cli, status"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
