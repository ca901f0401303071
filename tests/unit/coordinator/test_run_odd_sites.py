"""A listed site may say whatever the wire can carry: it may lose its stream by that, and nobody loses anything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.ingress_log import Arrived
from coordinator.send_queue import Stream
from lazaret.errors import PolicyViolation, RemoteProtocolError
from security.secagg.effects import SendFrames
from security.secagg.fields import Wire
from security.secagg.relay import FROM_SITE, Cosignature, Head, HeadSignature, Held, Pong, SignedHead
from tests.support.hub_world import Hub
from tests.support.whole_federation import WholeFederation
from tests.support.wire_strategies import messages

SITE = "graz"
LINE = HeadSignature(name="graz.lesions/witness", key_id=bytes(4), value=bytes(72))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    hub = Hub.make(tmp_path_factory.mktemp("odd"))
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeFederation]:
    """In mid-run: a sum is published, and its check is over."""
    whole = WholeFederation(tmp_path_factory.mktemp("whole"))
    whole.start_all()
    whole.run_rounds(2)
    yield whole
    whole.stop_all()


def arrived(message: Wire, sequence: int = 1) -> Arrived:
    return Arrived(site=SITE, session=1, sequence=sequence, message=message, size=1, digest="ab" * 32)


def test_a_site_says_anything_to_a_coordinator_in_mid_run(federation: WholeFederation) -> None:
    """Names and digests that exist lead further in than those that do not, so some are put in their places."""
    shell = federation.shell
    assert shell is not None
    stream = shell.streams[SITE]
    link = shell.storage.history.links()[-1]
    attempts = [attempt for known in (shell.engine.round, shell.engine.previous) for attempt in known.attempts]
    known = {
        "site": [SITE],
        "result": [link.result_hash],
        "ctx": [attempt.ctx for attempt in attempts],
        "kx": [attempt.dealing.kx for attempt in attempts],
        "round": [link.round, link.round + 1],
        "witness": ["hub", "linz"],
        "origin": [shell.books.log.origin],
    }

    @settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def says(data: st.DataObject) -> None:
        cls = data.draw(st.sampled_from(sorted(FROM_SITE, key=lambda cls: cls.__name__)))
        message = data.draw(messages(cls))
        names = [name for name in known if name in cls.__dataclass_fields__ and data.draw(st.booleans())]
        message = replace(message, **{name: data.draw(st.sampled_from(known[name])) for name in names})
        shell.received(stream, arrived(message))
        shell.call_witnesses()

    says()
    assert shell.books.log.checkpoint() is not None
    federation.run_rounds(1)


@pytest.mark.parametrize("size", [5_000, 10**14, 2**53 - 1, 2**64 - 1])
def test_a_cosignature_of_a_head_that_never_was(hub: Hub, size: int) -> None:
    shell, stream = hub.ready.shell, Stream(SITE, 1, "")
    shell.streams[SITE] = stream
    shell.received(stream, arrived(Cosignature(origin=shell.books.log.origin, size=size, signature=LINE)))
    shell.call_witnesses()
    assert shell.books.log.checkpoint() is not None, "the log goes on"


def test_a_witness_that_says_it_holds_more_than_there_is(hub: Hub) -> None:
    shell, stream = hub.ready.shell, Stream(SITE, 1, "")
    shell.streams[SITE] = stream
    head = SignedHead(origin=shell.books.log.origin, size=10**9, root=bytes(32), signatures=())
    shell.received(stream, arrived(Held(witness=SITE, head=head, epochs=())))
    shell.call_witnesses()
    offers = [message for message in _queued(stream) if isinstance(message, Head)]
    assert offers and all(offer.old_size == 0 for offer in offers)


def _queued(stream: Stream) -> Iterator[Wire]:
    while not stream.idle:
        message = stream.take()
        if message is not None:
            yield message


def test_a_head_too_large_for_any_log(hub: Hub) -> None:
    head = SignedHead(origin="graz.lesions/audit", size=10**15, root=bytes(32), signatures=())
    with pytest.raises(RemoteProtocolError):
        hub.ready.shell.desk.receive(SITE, Head(witness="hub", old_size=0, path=(), head=head, epochs=()))


def test_a_site_whose_certificate_has_ended_is_refused_and_no_more(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise PolicyViolation("signing certificate is revoked", where="site graz")

    shell, stream = hub.ready.shell, Stream(SITE, 1, "")
    monkeypatch.setattr(shell.engine, "receive", refuses)
    shell.received(stream, arrived(Pong(number=1)))


def test_a_model_that_is_gone_when_its_turn_comes_is_no_end(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    shell = hub.ready.shell
    frames = SendFrames(SITE, lambda: shell.engine.chain._state(bytes(32)))
    assert list(shell._frames(frames)) == []
    assert "cannot be sent" in caplog.text
