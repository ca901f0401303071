"""The coordinator as a witness of the sites' logs, and as the forwarder between them.

Hospitals do not connect to each other. Each site's checkpoint goes to the coordinator and to two peers. The
coordinator only estimates how much of a log each witness has seen: a witness with another size says so, and the owner
is asked again.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.ingress_log import IngressLog
from lazaret.errors import CheckpointConflict, RemoteProtocolError
from security.log.events import Cosigned
from security.log.roster import PEERS_FOR_QUORUM, Roster
from security.log.schema import MAX_COUNT
from security.log.witness import Witness
from security.secagg.fields import Wire
from security.secagg.relay import Cosignature, Head, HeadSignature, Held, WitnessCall

Letter = tuple[str, Wire]  # to whom, and what


class WitnessDesk:
    """Checkpoints in, messages out. Has no socket."""

    def __init__(self, name: str, books: IngressLog, witness: Witness) -> None:
        self._name = name
        self._books = books
        self._witness = witness
        self._held: dict[tuple[str, str], int] = {}  # (witness, origin of the log) -> size, as far as we know
        self._retried: set[tuple[str, str]] = set()

    @property
    def _roster(self) -> Roster:
        return self._witness.roster

    def known(self) -> dict[tuple[str, str], int]:
        """Which witness holds how much of which log, as far as it has said so since this start."""
        return dict(self._held)

    def greet(self, site: str) -> list[Letter]:
        """What this coordinator holds of a site's log: the site compares it with its own before it sends anything."""
        held = self._witness.held(self._roster.by_name[site].origin)
        return [(site, Held.of(self._name, held))] if held is not None else []

    def call(self, online: Collection[str]) -> list[Letter]:
        """Ask every site for its newest checkpoint, for the coordinator and two peers; offer our own to all."""
        self._retried.clear()
        letters: list[Letter] = []
        order = sorted(site for site in online if site in self._roster.by_name)
        for place, site in enumerate(order):
            origin = self._roster.by_name[site].origin
            letters.append((site, WitnessCall(witness=self._name, held_size=self._witness.held_size(origin))))
            peers = [order[(place + step) % len(order)] for step in range(1, min(PEERS_FOR_QUORUM, len(order) - 1) + 1)]
            letters += [(site, self._ask(peer, origin)) for peer in peers]
            letters.append((site, self._own_head(site)))
        return letters

    def _ask(self, peer: str, origin: str) -> WitnessCall:
        return WitnessCall(witness=peer, held_size=self._held.get((peer, origin), 0))

    def _own_head(self, site: str) -> Head:
        log = self._books.log
        held = self._held.get((site, log.origin), 0)
        # A size beyond our checkpoint is not of our history: there is no proof from there, so it is offered from the
        # start.
        return Head.of(site, log.submission(held if held <= self._books.head.size else 0))

    def receive(self, site: str, message: Head | Cosignature | Held) -> list[Letter]:
        """Take one of the three messages between witnesses."""
        match message:
            case Head():
                return self._head(site, message)
            case Cosignature():
                return self._cosignature(site, message)
            case Held():
                return self._other_size(site, message)
        raise RemoteProtocolError(f"{type(message).__name__} is not a message between witnesses", where=f"site {site}")

    def _head(self, site: str, message: Head) -> list[Letter]:
        origin = self._roster.by_name[site].origin
        if message.head.origin != origin or message.head.size > MAX_COUNT:
            raise RemoteProtocolError("checkpoint of another party's log", where=f"site {site}")
        if message.witness != self._name:
            known = message.witness in self._roster.by_name and message.witness != site
            return [(message.witness, message)] if known else []
        try:
            cosignature = self._witness.consider(message.submission)
        except CheckpointConflict as conflict:
            # Once per call, as with the peers: several heads on their way would each ask for another one.
            if (self._name, origin) in self._retried:
                return []
            self._retried.add((self._name, origin))
            return [(site, WitnessCall(witness=self._name, held_size=conflict.held_size))]
        size = message.head.size
        self._books.write(
            Cosigned(
                origin=origin,
                size=size,
                root=message.head.root.hex(),
                cosigner=cosignature.name,
                timestamp=cosignature.time,
            )
        )
        return [(site, Cosignature(origin=origin, size=size, signature=HeadSignature.of(cosignature)))]

    def _cosignature(self, site: str, message: Cosignature) -> list[Letter]:
        self._held[site, message.origin] = message.size
        log = self._books.log
        if message.origin == log.origin:
            log.add_cosignature(message.size, message.signature.line)
            return []
        owner = self._roster.by_origin.get(message.origin)
        return [(owner.name, message)] if owner is not None and owner.name != site else []

    def _other_size(self, site: str, message: Held) -> list[Letter]:
        """A witness holds another size than we thought. Ask once more from there; a second time it is out of step."""
        origin = message.head.origin
        self._held[site, origin] = message.head.size
        if (site, origin) in self._retried:
            return []
        self._retried.add((site, origin))
        log = self._books.log
        if origin == log.origin:
            self._check_own(message)
            return [(site, self._own_head(site))]
        owner = self._roster.by_origin.get(origin)
        return [(owner.name, self._ask(site, origin))] if owner is not None else []

    def _check_own(self, message: Held) -> None:
        """A checkpoint of our log that our log does not lead to: it is an old copy, and the service must stop."""
        self._books.log.refuse_rollback([message.held])
