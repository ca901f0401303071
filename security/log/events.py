"""What a privacy log can hold, as frozen typed bodies: all but what a log writes about itself, which is in machine.py.
docs/spec/audit-log.md says what each one states.

To add an event, write one class here: `@event_type` with its name in the log, and a kind for each field. The schema,
the strict parse and the verifier's check of its form follow from the class. Name the module that emits it, and test
that it does, in tests/unit/security/log/test_events_emitters.py; describe it in docs/spec/audit-log.md, which a test
asks for. If logs are compared by it, add it to `security.audit.facts.TYPES`; if a check of one log needs it, give it a
handler in `security.audit.scan`.

Never in a body: patient identifiers, paths, label counts, the digest of an unmasked update (it would confirm a guess),
or a plain hash of data with little entropy; such things go to the annex, or under a site's own HMAC key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from security.log.schema import (
    Artefacts,
    Count,
    DataClass,
    Decimal,
    Digest,
    Event,
    Flag,
    Ident,
    MaybeCount,
    MaybeDecimal,
    MaybeDigest,
    Mechanisms,
    Numbers,
    Plan,
    Relation,
    Text,
    Texts,
    Token,
    Tokens,
    Unit,
    VKey,
    choice,
    event_type,
)


@event_type("agent.start")
class AgentStart(Event):
    """What is running: digests of the package, its dependencies, the bill of materials that the environment was made
    from, the wire schema and the configuration. The image is what the launcher states: nobody here can verify it.
    """

    version: Text
    package: Digest
    dependencies: Digest
    sbom: MaybeDigest
    proto: Digest
    image: MaybeDigest
    config: Digest
    insecure: Texts


@event_type("software.differs")
class SoftwareDiffers(Event):
    """Packages of the environment are not those of its bill of materials; the first ones are named."""

    count: Count
    packages: Texts


@event_type("agent.stop")
class AgentStop(Event):
    """An orderly stop."""

    reason: Text


@event_type("config.changed")
class ConfigChanged(Event):
    """The configuration is another one now."""

    old: Digest
    new: Digest
    who: Text
    reason: Text


@event_type("policy.changed")
class PolicyChanged(Event):
    """The site's policy is another one now; `document` is the digest of what justifies it."""

    old: Digest
    new: Digest
    who: Text
    reason: Text
    document: MaybeDigest


@event_type("manifest.adopted")
class ManifestAdopted(Event):
    """Another signed manifest is in force: its version and the SHA-256 of its file, of which the folder has a copy."""

    version: Count
    old: Digest
    new: Digest


@event_type("run.offered")
class RunOffered(Event):
    """A signed manifest that begins another run came by wire, and does not begin yet: what keeps it from that.

    :param manifest: SHA-256 of its file.
    """

    next: Token
    version: Count
    manifest: Digest
    reason: Text


@event_type("run.accepted")
class RunAccepted(Event):
    """This site has begun the run of the manifest in force, which came by wire.

    :param manifest: SHA-256 of its file.
    :param model: SHA-256 of the initial model's file, which is here and was checked.
    :param fetched: that file came from the coordinator. False: it was here.
    :param by: who decided: the policy, or an operator.
    """

    version: Count
    manifest: Digest
    model: Digest
    bytes: Count
    fetched: Flag
    by: Annotated[str, choice("policy", "operator")]


@event_type("run.stopped")
class RunStopped(Event):
    """The operator has ended the run before its last round, under the coordinator's signature; its digest is here."""

    statement: Digest


@event_type("peer.enrolled")
class PeerEnrolled(Event):
    """A site may take part."""

    site: Token
    spki: Digest
    vkey: VKey


@event_type("peer.revoked")
class PeerRevoked(Event):
    """A site may no longer take part."""

    site: Token
    spki: Digest
    reason: Text


@event_type("data.opened")
class DataOpened(Event):
    """A data set was opened: its fingerprint under the site's own key, what the site states about its processing, and
    what changed since the last time.

    Organisations and kinds, never a person's name. `change` has counts as ranges; under differential privacy it has
    none. How many subjects there are is in the annex, as a range.
    """

    fingerprint: Digest
    controller: Text
    purpose: Text
    legal_basis: Text
    subjects: Text
    categories: Text
    retention: Text
    change: Text


@event_type("plugin.loaded")
class PluginLoaded(Event):
    """A process that is to see images has run a method's own file, with this SHA-256."""

    plugin: Digest


@event_type("trainer.isolated")
class TrainerIsolated(Event):
    """A process that is to see images has started: what the site asks for, and what holds, as tried from inside.

    `connection`: it could open one. `keys`: it could read a private key. `ranks`: it was given a network on purpose, to
    train together with other processes of its hospital.
    """

    asked: Annotated[str, choice("required", "best")]
    network_namespace: Flag
    seccomp: Flag
    landlock: Flag
    connection: Flag
    keys: Flag
    ranks: Flag


@event_type("round.invited")
class RoundInvited(Event):
    """The site agreed to one attempt of a round, under the context that its masks are bound to.

    :param config: digest of the training settings, which the context binds and the manifest lists.
    :param groups: digest of the groups whose sums are opened apart; None: one sum of everybody.
    """

    method: Token
    attempt: Count
    context: Digest
    cohort: Digest
    cohort_size: Count
    config: Digest
    groups: MaybeDigest
    rule: Text


@event_type("round.declined")
class RoundDeclined(Event):
    """The site refused, by the rule named."""

    method: Token
    attempt: Count
    context: MaybeDigest
    rule: Text


@event_type("model.received")
class ModelReceived(Event):
    """The model a round trains on: received, or computed by the site itself from the published sum."""

    model: Digest
    bytes: Count
    layout: Digest
    sender: Digest


@event_type("train.done")
class TrainDone(Event):
    """Local training ended; what it made besides the update, and that this stays here."""

    method: Token
    steps: Count
    wall_ms: Count
    artefacts: Artefacts


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyBooking(Event):
    """What both entries about privacy budget say, so that epsilon can be computed again from the log."""

    reservation: Ident
    mechanisms: Mechanisms
    delta: Decimal
    unit: Unit
    relation: Relation
    accountant: Text
    order: Decimal
    plan: Plan
    epsilon_round: Decimal
    epsilon_total: Decimal
    cap: Decimal


@event_type("dp.reserved")
class DpReserved(PrivacyBooking):
    """Privacy budget set aside before the data are touched. What is reserved counts as spent."""


@event_type("dp.committed")
class DpCommitted(PrivacyBooking):
    """A reservation was used: the mechanisms that ran, and epsilon after them."""


@event_type("egress")
class Egress(Event):
    """A message that is about to leave. Written and synced before the first byte does.

    :param shape: the public numbers from which the message's length follows.
    :param head: size of the checkpoint that travels with the message; it cannot cover this entry.
    """

    msg_id: Ident
    message: Token
    data_class: DataClass
    bytes: Count
    sha256: Digest
    expected_bytes: Count
    shape: Numbers
    masked: Flag
    modulus_bits: MaybeCount
    uniformity: MaybeDecimal
    destination: Digest
    head: Count


@event_type("egress.blocked")
class EgressBlocked(Event):
    """A message that the egress filter stopped; nothing of it left."""

    rule: Text
    message: Token
    bytes: Count
    sha256: MaybeDigest


@event_type("receipt")
class ReceiptReceived(Event):
    """The coordinator's answer to a message: its checkpoint and where the message is in its log."""

    msg_id: Ident
    head_size: Count
    head_root: Digest
    ingress: MaybeCount
    proof: MaybeDigest


@event_type("ingress")
class Ingress(Event):
    """A message that arrived at the coordinator."""

    msg_id: Ident
    sender: Token
    message: Token
    bytes: Count
    sha256: Digest


@event_type("ingress.partial")
class IngressPartial(Event):
    """Frames that arrived and did not become a whole upload: the attempt or the stream ended, or nobody asked for them.

    :param msg_id: of the first of them; the site's entry for the upload has the same.
    """

    msg_id: Ident
    sender: Token
    bytes: Count


@event_type("secagg.survivors")
class SecaggSurvivors(Event):
    """The set of uploads that the sum is over."""

    attempt: Count
    context: Digest
    survivors: Digest
    count: Count
    threshold: Count
    dropouts: Tokens


@event_type("secagg.unmasked")
class SecaggUnmasked(Event):
    """Which kind of share was opened for whom: self-mask shares of survivors, key shares of dropouts, never both."""

    attempt: Count
    context: Digest
    self_mask: Tokens
    mask_key: Tokens


@event_type("aggregate.published")
class AggregatePublished(Event):
    """A sum was published, and the model that follows from it; with groups, the sum of each of them."""

    inputs: Count
    groups: MaybeDigest
    sum: Digest
    model: Digest
    previous: Digest


@event_type("result.voted")
class ResultVoted(Event):
    """The vote set on a published sum: so many sites accept the model, so many do not, and this model stands."""

    accepts: Count
    refusals: Count
    threshold: Count
    accepted: Flag
    model: Digest


@event_type("checkpoint.seen")
class CheckpointSeen(Event):
    """Another party's checkpoint came with a message and was kept."""

    origin: Token
    size: Count
    root: Digest


@event_type("cosigned")
class Cosigned(Event):
    """A cosignature: given by this party to another's checkpoint, or received for one of this log."""

    origin: Token
    size: Count
    root: Digest
    cosigner: Token
    timestamp: Count




@event_type("net.counter")
class NetCounter(Event):
    """What the kernel counted since the last one: payload over TCP, and what else left a network namespace of ours."""

    source: Text
    coverage: Annotated[str, choice("process", "network namespace")]
    beside_out: MaybeCount
    connections: Count
    bytes_out: Count
    bytes_in: Count












@event_type("operator.action")
class OperatorAction(Event):
    """A person ran a command that matters."""

    command: Text
    role: Text


@event_type("access.exported")
class AccessExported(Event):
    """The log was handed out: to whom, and up to which size."""

    auditor: Text
    purpose: Text
    size: Count
