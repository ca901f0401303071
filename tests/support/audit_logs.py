"""A small federation that writes real privacy logs: some sites, a coordinator, rounds, and one site under DP.

Nothing is trained and no network is used, but every entry goes through the library that the agents use: the egress
filter, the log, the witnesses. What the logs say is therefore what a federation's logs say, and tests can
tamper with copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from scripts.local_federation.known_updates import sees_no_image
from security.audit.agreement import AgreedRules, Keys, agreement_of, keys_for, keys_of
from security.clock import ManualClock
from security.crypto.ring import FRAME_BYTES
from security.dp.accountant import added
from security.identity.manifest import Manifest
from security.log import events as ev
from security.log.egress import (
    Outgoing,
    OutgoingVector,
    check_outgoing,
    check_outgoing_vector,
    due_bytes,
    recorded_shape,
)
from security.log.note import NoteSigner, checkpoint_of
from security.log.opening import continue_log, create_log
from security.log.roster import COORDINATOR, SITE, Roster, audit_roster
from security.log.witness import Witness
from security.rng import CountedRandomness
from security.secagg import thresholds
from security.secagg.registry import Shape
from tests.support.audit_parties import (
    DP_ROUND,
    HUB,
    MODEL_0,
    NOW,
    RUN,
    SITES,
    VECTOR,
    Member,
    QuickDisk,
    agent_start,
    data_opened,
    digest,
    member_of,
    new_member,
    payment,
)
from tests.support.consortium_world import World


class Federation:
    """The whole of it. `make`, then `play` some rounds, then `stop`.

    :ivar world: the consortium behind it, with the keys that sign its manifests; None where nobody signed one.
    """

    def __init__(
        self,
        members: Sequence[Member],
        manifest: bytes,
        clock: ManualClock,
        dp_sites: Sequence[str],
        digest_: str = "",
        vector_bytes: int = VECTOR,
        world: World | None = None,
        rules: AgreedRules | None = None,
    ) -> None:
        self.world = world
        self.rules = rules
        self.run = rules.run if rules else RUN
        self.members = {member.party.name: member for member in members}
        parties = tuple(member.party for member in members)
        self.roster = Roster(parties=parties, digest=digest_, vector_bytes=vector_bytes)
        self.vector_bytes = vector_bytes
        self.clock = clock
        self.rng = CountedRandomness(b"audit-log tests")
        self.manifest = manifest
        self.dp_sites = tuple(dp_sites)
        self.model = rules.initial_state if rules else MODEL_0
        self.round = 0
        self._vector = b""
        self.gone: list[Member] = []
        self._told: set[tuple[str, str]] = set()
        self._owed: list[tuple[Member, str, int, int]] = []
        for member in members:
            self._begin(member)

    def _begin(self, member: Member) -> None:
        member.log = create_log(
            member.folder,
            member.keys,
            party=member.party,
            roster=self.roster,
            manifest=self.manifest,
            policy=digest("policy", member.party.name),
            root=member.root,
            clock=self.clock,
            rng=self.rng,
            disk=QuickDisk(),
            ml_dsa=self._second_key(member),
        )
        self._attach(member)
        self._start(member)

    def _second_key(self, member: Member) -> Callable[[], NoteSigner] | None:
        if self.world is None:
            return None
        return partial(self.world.identity(member.party.name).log_ml_dsa, member.party.origin)

    @classmethod
    def make(cls, folder: Path, sites: Sequence[str] = SITES, dp_sites: Sequence[str] = ("graz",)) -> Federation:
        """With a really signed manifest, where there are enough sites for one."""
        if len(sites) >= len(SITES):
            return cls.from_world(World.make(folder / "world", sites), folder, dp_sites)
        rng = CountedRandomness(b"audit-log keys")
        members = [new_member(HUB, COORDINATOR, folder, rng), *(new_member(name, SITE, folder, rng) for name in sites)]
        return cls(members, b'{"stands for":"a signed manifest"}\n', ManualClock(wall=NOW), dp_sites)

    @classmethod
    def from_world(cls, world: World, folder: Path, dp_sites: Sequence[str] = ("graz",)) -> Federation:
        """The same with real keys and a really signed manifest."""
        manifest = world.publish()
        roster = audit_roster(manifest)
        members = [member_of(world, party, folder) for party in roster.parties]
        vector = roster.vector_bytes or VECTOR
        rules = agreement_of(manifest, "").rules
        return cls(members, world.published(), world.clock, dp_sites, roster.digest, vector, world, rules)

    def accept_run(self, name: str) -> None:
        """A site says that the run in force came by wire."""
        assert self.rules is not None
        said = ev.RunAccepted(
            version=1,
            manifest=sha256(self.manifest).hexdigest(),
            model=self.rules.initial_file,
            bytes=1000,
            fetched=True,
            by="policy",
        )
        self.members[name].log.append(said, run=self.run)

    # Membership changes

    def adopt(self, data: bytes, manifest: Manifest, skipped_by: Sequence[str] = ()) -> None:
        """Everybody still listed takes over a newer manifest; who joined begins a log, who left goes on as it was.

        :param skipped_by: who is not reached by this version, and takes over a later one.
        """
        self.roster, self.manifest = audit_roster(manifest), data
        self.rules = agreement_of(manifest, "").rules
        assert self.rules is not None and self.world is not None
        self.run = self.rules.run
        for name in [name for name in self.members if name not in self.roster.by_name]:
            member = self.members.pop(name)
            member.log.append(ev.AgentStop(reason="left"))
            member.log.close()
            self.gone.append(member)
        for party in self.roster.parties:
            self.clock.advance(10)
            if party.name in skipped_by:
                continue
            if party.name in self.members:
                self.members[party.name].log.adopt_manifest(data, manifest.version, self.roster)
            else:
                folder = self.hub.folder.parent
                self.members[party.name] = member_of(self.world, party, folder)
                self._begin(self.members[party.name])
        self.members = {party.name: self.members[party.name] for party in self.roster.parties}

    def republish(self, skipped_by: Sequence[str] = ()) -> Manifest:
        """The consortium signs the next version, and everybody takes it over."""
        assert self.world is not None
        manifest = self.world.publish()
        self.adopt(self.world.published(), manifest, skipped_by)
        return manifest

    @property
    def hub(self) -> Member:
        return self.members[HUB]

    @property
    def sites(self) -> list[Member]:
        return [member for member in self.members.values() if member.party.role == SITE]

    @property
    def members_ever(self) -> dict[str, Member]:
        return {member.party.name: member for member in (*self.members.values(), *self.gone)}

    @property
    def folders(self) -> list[Path]:
        return [member.folder for member in self.members_ever.values()]

    @property
    def root_key(self) -> Path:
        assert self.world is not None
        return self.world.authority.folder / "root.pem"

    @property
    def pinned(self) -> Keys:
        """What an auditor with the consortium's root believes, from the coordinator's folder."""
        return Keys.bare(self.roster) if self.world is None else keys_for(self.hub.folder, self.root_key)

    @property
    def keys(self) -> dict[Path, Keys]:
        """The same for each log, from its own folder."""
        if self.world is None:
            return dict.fromkeys(self.folders, Keys.bare(self.roster))
        return keys_of(self.folders, self.root_key)

    @property
    def destination(self) -> str:
        return min(self.rules.destinations) if self.rules else digest("hub spki")

    @property
    def layout(self) -> str:
        return self.rules.layout if self.rules else digest("layout")

    def _attach(self, member: Member) -> None:
        member.witness = Witness(member.folder, lambda: self.roster, member.cosigner, self.clock, QuickDisk())

    def _start(self, member: Member) -> None:
        member.log.append(agent_start(member.party.name))
        if member.party.role == SITE:
            sees_no_image(member.log)
        member.log.checkpoint()

    def restart(self, name: str, *, stop: bool = True) -> None:
        """Stop (or kill) and start one party."""
        member = self.members[name]
        if stop:
            member.log.append(ev.AgentStop(reason="restart"))
            member.log.close()
        else:
            member.log._writer.close()
        self.reopen(member)
        member.log.refuse_rollback(
            held for other in self.members.values() if (held := other.witness.held(member.party.origin)) is not None
        )
        self._start(member)

    def reopen(self, member: Member) -> None:
        """Go on with a log that was closed."""
        self.clock.advance(1000)
        member.log = continue_log(
            member.folder,
            member.keys,
            party=member.party,
            roster=self.roster,
            clock=self.clock,
            rng=self.rng,
            disk=QuickDisk(),
            ml_dsa=self._second_key(member),
        )
        self._attach(member)

    def play(self, rounds: int = 1, *, dropouts: Sequence[str] = ()) -> None:
        """Run rounds; sites in `dropouts` upload nothing."""
        for _ in range(rounds):
            self.round += 1
            self._round(self.round, tuple(dropouts))

    def _round(self, number: int, dropouts: tuple[str, ...]) -> None:
        cohort = self.sites
        names = [member.party.name for member in cohort]
        context = digest("context", sha256(self.manifest).hexdigest(), number, self.model, *names)
        for member in cohort:
            self._train(member, number, context, digest("cohort", *names), len(cohort))
        survivors = [member for member in cohort if member.party.name not in dropouts]
        for member in cohort:
            self.clock.advance(40)
            self._aggregation(member, number, uploads=member in survivors)
        total = digest("sum", number, self.model)
        following = digest("model", total)
        for member in [*cohort, self.hub]:
            self._finish(member, number, context, [m.party.name for m in survivors], dropouts)
        for member in cohort:
            for message in ("Agree", "Unmask", "Ack"):
                self.send(member, message, number)
            self.give_receipts()
            member.log.checkpoint()
        self.hub.log.append(
            ev.AggregatePublished(
                inputs=len(survivors), groups=self.groups, sum=total, model=following, previous=self.model
            ),
            run=self.run,
            round=number,
        )
        if self.rules is not None and self.rules.vote:
            for member in [*cohort, self.hub]:
                vote = ev.ResultVoted(
                    accepts=len(survivors), refusals=0, threshold=self.threshold, accepted=True, model=following
                )
                member.log.append(vote, run=self.run, round=number)
        self.model = following
        for member in cohort:
            member.log.append(
                ev.NetCounter(
                    source="namespace eth0",
                    coverage="network namespace",
                    beside_out=0,
                    connections=1,
                    bytes_out=int(member.sent * 1.002) + 700,
                    bytes_in=90_000,
                ),
                run=self.run,
                round=number,
            )
            member.sent = 0
        self.exchange()

    def _train(self, member: Member, number: int, context: str, cohort: str, size: int) -> None:
        log, name = member.log, member.party.name
        self.clock.advance(200)
        if (name, self.run) not in self._told:
            self._told.add((name, self.run))
            log.append(
                data_opened(name),
                run=self.run,
                annex={"images": "500 to 999", "subjects": "200 to 499"},
            )
            if self.rules is not None and self.rules.plugin is not None:
                log.append(ev.PluginLoaded(plugin=self.rules.plugin), run=self.run)
        log.append(
            ev.ModelReceived(model=self.model, bytes=16_000_000, layout=self.layout, sender=self.destination),
            run=self.run,
            round=number,
        )
        if name in self.dp_sites:
            self._pay(member, number, ev.DpReserved)
        self.clock.advance(60_000)
        artefact = {"disposition": "local-only", "elements": 640, "hmac": digest("p", name), "kind": "prototypes"}
        log.append(
            ev.TrainDone(method="fednpr-per", steps=40, wall_ms=60_000, artefacts=(artefact,)),
            run=self.run,
            round=number,
        )
        if name in self.dp_sites:
            self._pay(member, number, ev.DpCommitted)
        log.append(
            ev.RoundInvited(
                method="fednpr-per",
                attempt=0,
                context=context,
                cohort=cohort,
                cohort_size=size,
                config=min(self.rules.configs) if self.rules else digest("c"),
                groups=self.groups,
                rule="policy allows",
            ),
            run=self.run,
            round=number,
        )
        log.checkpoint()

    def _pay(self, member: Member, number: int, kind: type[ev.DpReserved] | type[ev.DpCommitted]) -> None:
        if kind is ev.DpReserved:
            member.spent_before, member.spent = member.spent, added(member.spent, DP_ROUND)
        member.log.append(
            payment(kind, number, member.spent, member.spent_before),
            run=self.run,
            round=number,
        )

    def _aggregation(self, member: Member, number: int, *, uploads: bool) -> None:
        for message in ("Ready", "Advert", "Shares"):
            self.send(member, message, number)
        if uploads:
            self.send(member, "UploadHeader", number)
            for frame in range(-(-self.vector_bytes // FRAME_BYTES)):
                self.send(member, "UploadFrame", number, frame=frame)
        self.give_receipts()
        member.log.checkpoint()

    def send(self, member: Member, message: str, number: int, *, frame: int = 0) -> None:
        """One message through the egress filter of a site into the coordinator's log."""
        shape = Shape(
            federation="lesions",
            site=member.party.name,
            cohort=tuple(site.party.name for site in self.sites),
            vector_bytes=self.vector_bytes,
            frame=frame,
        )
        due = due_bytes(message, shape.origin, recorded_shape(shape))
        assert due is not None
        msg_id, head = self.rng.bytes(16).hex(), checkpoint_of(member.log.newest_checkpoint).size
        same: dict[str, Any] = {"msg_id": msg_id, "shape": shape, "destination": self.destination, "head": head}
        if message == "UploadFrame":
            vector = self._vector if frame else self.rng.bytes(self.vector_bytes)
            self._vector = vector
            root, bits = sha256(vector).digest(), self.rules.modulus_bits if self.rules else 32
            entry = check_outgoing_vector(OutgoingVector(vector=vector, root=root, modulus_bits=bits, **same))
        else:
            entry = check_outgoing(Outgoing(message=message, payload=self.rng.bytes(due), **same))
        member.log.append(entry, run=self.run, round=number)
        member.sent += due
        self.clock.advance(3)
        arrived = ev.Ingress(
            msg_id=msg_id,
            sender=member.party.name,
            message=message,
            bytes=due,
            sha256=entry.sha256,
        )
        at = self.hub.log.append(arrived, run=self.run, round=number)
        self._owed.append((member, msg_id, at, number))

    def give_receipts(self) -> None:
        """One head of the coordinator's for all messages since the last one."""
        self.hub.log.checkpoint()
        head = checkpoint_of(self.hub.log.newest_checkpoint)
        for member, msg_id, at, number in self._owed:
            path = self.hub.log.inclusion_path(at, head.size)
            receipt = ev.ReceiptReceived(
                msg_id=msg_id,
                head_size=head.size,
                head_root=head.root.hex(),
                ingress=at,
                proof=sha256(b"".join(path)).hexdigest(),
            )
            member.log.append(receipt, run=self.run, round=number)
        self._owed.clear()

    def _finish(
        self, member: Member, number: int, context: str, survivors: list[str], dropouts: tuple[str, ...]
    ) -> None:
        member.log.append(
            ev.SecaggSurvivors(
                attempt=0,
                context=context,
                survivors=digest("survivors", *survivors),
                count=len(survivors),
                threshold=self.threshold,
                dropouts=dropouts,
            ),
            run=self.run,
            round=number,
        )
        member.log.append(
            ev.SecaggUnmasked(attempt=0, context=context, self_mask=tuple(survivors), mask_key=dropouts),
            run=self.run,
            round=number,
        )

    @property
    def groups(self) -> str | None:
        return self.rules.groups.digest if self.rules and self.rules.groups else None

    @property
    def threshold(self) -> int:
        if self.rules is None:
            return 3
        return thresholds.quorum(n=len(self.sites), c=self.rules.colluders, m=self.rules.least_survivors)

    def exchange(self) -> None:
        """Everybody cuts a head, and everybody else cosigns it, as relayed by the coordinator."""
        for member in self.members.values():
            member.log.checkpoint()
        for member in self.members.values():
            size = checkpoint_of(member.log.newest_checkpoint).size
            note = member.log.newest_checkpoint
            for other in self.members.values():
                if other is member:
                    continue
                offer = member.log.submission(other.witness.held_size(member.party.origin), note)
                cosignature = other.witness.consider(offer)
                member.log.add_cosignature(size, cosignature)
                root, name = checkpoint_of(note).root.hex(), cosignature.name
                given = ev.Cosigned(
                    origin=member.party.origin, size=size, root=root, cosigner=name, timestamp=cosignature.time
                )
                other.log.append(given)
                other.log.append(ev.CheckpointSeen(origin=member.party.origin, size=size, root=root))
        self.clock.advance(5)

    def stop(self) -> None:
        """An orderly end."""
        for member in [*self.sites, self.hub]:
            self.clock.advance(10)
            member.log.append(ev.AgentStop(reason="end of run"))
            member.log.close()


def small_federation(folder: Path, rounds: int = 2) -> Federation:
    """Some rounds, all stopped: clean logs to copy and tamper with."""
    federation = Federation.make(folder)
    federation.play(rounds)
    federation.stop()
    return federation
