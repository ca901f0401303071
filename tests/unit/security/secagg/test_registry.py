"""The registry: adding a message is one class, and a class that states too little is refused at import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from lazaret.errors import LocalProtocolError
from protos.parse import FROM_COORDINATOR, FROM_SITE, Parcel, parcel_pieces
from protos.schema import schema
from security.secagg import messages, relay
from security.secagg.certificates import Ack, Advert
from security.secagg.fields import Bounded, DataClass, Digest, Fixed, Maybe, Nested, SiteId, Wire
from security.secagg.messages import DealtShare
from security.secagg.registry import REGISTRY, Filing, Registry, Sender, Shape
from security.secagg.relay import HeadSignature, SignedHead
from security.secagg.sizes import expected_bytes

CONTROL = DataClass.CONTROL
SHAPE = Shape(federation="lesions", site="graz", cohort=("graz", "linz", "wien"), named="linz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather(Wire):
    """How the sky looks at the site. Nobody asks."""

    site: SiteId
    kx: Digest
    sky: Annotated[bytes, Bounded(100), CONTROL]


def sky(shape: Shape) -> dict[str, Any]:
    return {"sky": 7 * len(shape.cohort)}


def with_weather() -> Registry:
    scope = REGISTRY.copy()
    scope.message(80, Sender.SITE, CONTROL, filing=Filing.ATTEMPT, size=sky)(Weather)
    return scope


def test_adding_a_message_is_one_class() -> None:
    """Schema, envelope, permitted types, filing and closed-form size follow from what the class states."""
    scope = with_weather()
    text = schema(scope)
    assert "// How the sky looks at the site. Nobody asks.\nmessage Weather {" in text
    assert "  bytes sky = 3;  // control; at most 100 bytes" in text
    to_coordinator, to_site = text.split("message FromSite {")[1].split("message FromCoordinator {")
    assert "    Weather weather = 80;" in to_coordinator and "Weather weather" not in to_site.split("}")[0]
    assert scope.permitted()["Weather"] == "control"
    assert Weather in scope.from_site() and Weather not in scope.from_coordinator() | scope.frames()
    message = Weather(site="graz", kx=bytes(32), sky=bytes(21))
    assert scope[Weather].attempt_of(message) == bytes(32)
    assert expected_bytes(Weather, SHAPE, scope) == written(message, 80)


def written(message: Wire, number: int) -> int:
    """The length of the parcel, by the writer of the network."""
    own = HeadSignature(name=SHAPE.origin, key_id=bytes(4), value=bytes(64))
    head = SignedHead(origin=SHAPE.origin, size=1, root=bytes(32), signatures=(own,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(parcel_pieces.__globals__["NUMBER_OF"], type(message), number)
        return sum(map(len, parcel_pieces(message, 1, head)))


def test_a_copy_leaves_the_registry_alone() -> None:
    with_weather()
    assert Weather not in REGISTRY.from_site() and "Weather" not in schema()
    with pytest.raises(LocalProtocolError, match="Weather: is not a message"):
        REGISTRY[Weather]
    with pytest.raises(LocalProtocolError, match="Weather does not travel"):
        FROM_SITE.encode(Parcel(message=Weather(site="a", kx=bytes(32), sky=b""), sequence=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclassed(Wire):
    """Bytes of which nobody says what they are."""

    note: Annotated[bytes, Bounded(10)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OddKey(Wire):
    """A length that tells nothing."""

    key: Annotated[bytes, Fixed(4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped(Wire):
    """The same, one level down."""

    inner: Annotated[Unclassed | None, Maybe(Nested(Unclassed))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden(Wire):
    """A sealed share that calls itself something else."""

    share: Annotated[DealtShare, Nested(DealtShare)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Wire):
    """A site's name, and another name."""

    site: SiteId
    other: SiteId


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute(Wire):
    site: SiteId


def other(shape: Shape) -> dict[str, Any]:
    return {"other": len(shape.named)}


def ruled(cls: type[Wire], **options: Any) -> Callable[[Registry], Any]:
    stated: dict[str, Any] = {"number": 80, "sender": Sender.SITE, "data_class": CONTROL, **options}
    return lambda scope: scope.message(**stated)(cls)


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (ruled(Named, size=other, number=14), "number 14 is taken by Shares"),
        (ruled(Named, size=other, number=0), "0 is not the number of a message"),
        (ruled(Named, size=other, number=100), "100 is not the number of a message"),
        (ruled(messages.Ready), "there is a message of this name"),
        (ruled(Mute), "Mute: needs a docstring"),
        (ruled(Unclassed), r"Unclassed\.note: needs a class of data"),
        (ruled(OddKey), r"OddKey\.key: needs a class of data"),
        (ruled(Wrapped, sender=Sender.COORDINATOR), r"Unclassed\.note: needs a class of data"),
        (ruled(Hidden, size=lambda shape: {"share": {"box": 92}}), "carries sealed-share and states control"),
        (ruled(Hidden, sender=Sender.COORDINATOR), "carries sealed-share and states control"),
        (ruled(Named), "needs a size rule for exactly its open fields: other"),
        (ruled(Named, sender=Sender.BOTH), "needs a size rule for exactly its open fields: other"),
        (ruled(Named, size=lambda shape: {"othr": 1}), "needs a size rule for exactly its open fields: other, othr"),
        (ruled(Named, size=lambda shape: other(shape) | {"x": 1}), "exactly its open fields: x"),
        (ruled(Named, size=other, sender=Sender.COORDINATOR), "no site sends it"),
        (ruled(Named, mentions=lambda message: {}, sender=Sender.COORDINATOR), "no site sends it"),
        (ruled(Named, size=other, filing=Filing.ATTEMPT), "if and only if it names one"),
        (ruled(Named, size=other, filing=Filing.ROUND), "names no round"),
        (ruled(Weather, size=sky), "if and only if it names one"),
    ],
)
def test_a_class_that_states_too_little_is_refused(register: Callable[[Registry], Any], text: str) -> None:
    scope = REGISTRY.copy()
    with pytest.raises(LocalProtocolError, match=text):
        register(scope)
    assert list(scope) == list(REGISTRY)


def test_a_message_says_nothing_about_cohort_or_vector() -> None:
    """A length that followed from the message itself would prove nothing about it."""
    scope = REGISTRY.copy()
    scope.message(80, Sender.SITE, CONTROL, size=other, mentions=lambda message: {"vector_bytes": 9})(Named)
    with pytest.raises(LocalProtocolError, match="nothing about cohort or vector"):
        scope[Named].shape_of(Named(site="graz", other="linz"), SHAPE)


def test_a_class_that_states_enough_is_taken() -> None:
    """The counterpart of the refusals: it is their one fault that they are refused for."""
    for register in (
        ruled(Named, size=other),
        ruled(Named, sender=Sender.COORDINATOR),
        ruled(Hidden, size=lambda shape: {"share": {"box": 92}}, data_class=DataClass.SEALED_SHARE),
    ):
        scope = REGISTRY.copy()
        register(scope)
        assert len(list(scope)) == len(list(REGISTRY)) + 1


def test_the_directions_of_the_network_are_the_registry() -> None:
    assert FROM_SITE.allowed == relay.FROM_SITE == REGISTRY.from_site()
    assert FROM_COORDINATOR.allowed == relay.FROM_COORDINATOR == REGISTRY.from_coordinator()
    both = {entry.cls for entry in REGISTRY if entry.sender is Sender.BOTH}
    assert both == relay.FROM_SITE & relay.FROM_COORDINATOR
    disputes = {messages.Accusation, messages.Disclosure}
    assert both == disputes | {messages.Rollback, relay.Head, relay.Cosignature, relay.Held}


def test_frames_are_what_holds_a_piece_of_something_announced() -> None:
    of_sums = {messages.UploadFrame, messages.SumFrame, messages.StateFrame, messages.ChunkPiece}
    assert of_sums | {relay.ManifestFrame, relay.ModelFrame} == relay.FRAMES


def test_both_logs_file_the_steps_of_an_attempt_under_its_round() -> None:
    """By hand, once: an auditor compares two logs entry by entry, so this list is part of the format."""
    filed = {entry.cls for entry in REGISTRY if entry.from_site and entry.filing is Filing.ATTEMPT}
    steps = {messages.Shares, messages.UploadHeader, messages.UploadFrame, messages.Agree, messages.Unmask}
    assert filed == steps | {Advert, messages.Accusation, messages.Disclosure}
    assert {entry.cls for entry in REGISTRY if entry.from_site and entry.filing is Filing.ROUND} == {
        messages.Ready,
        relay.Decline,
    }
    ready = messages.Ready(site="graz", round=7)
    assert REGISTRY[messages.Ready].round_of(ready) == 7 and REGISTRY[messages.Ready].attempt_of(ready) is None
    abort = messages.Abort(site="graz", ctx=bytes(range(32)), code=1, signature=bytes(64))
    assert REGISTRY[messages.Abort].attempt_of(abort) == abort.ctx and REGISTRY[messages.Abort].round_of(abort) is None
    ack = Ack(site="graz", result=bytes(32), state_hash=bytes(32), bitmap=b"", signature=bytes(64))
    assert REGISTRY[Ack].attempt_of(ack) is None
