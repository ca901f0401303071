"""Is every step of a round in the log? Steps are gathered while the entries pass, and compared at the end.

A site's round: data opened, a plugin loaded where the manifest pins one, model received, training, invitation, upload,
agreement, receipt, shares opened, result checked. A step may be absent where something in the log explains it: the site
declined, the attempt failed and another followed, the connection or the agent broke, the log ends. `StepMissing` is for
steps that cannot be absent: nobody uploads what was not trained, or opens shares of a set that was not agreed. Nor is
anything trained by a process whose isolation the log does not state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from security.audit.agreement import AgreedRules
from security.audit.findings import Findings
from security.log.reader import Record
from security.log.roster import SITE

RoundKey = tuple[str | None, int | None]
VECTORS: Final = frozenset({"UploadFrame", "UploadHeader"})
RECEIPTED: Final = frozenset({'"UploadFrame"', '"Unmask"'})  # steps whose receipts are steps, as entries have them
# What only a running agent writes. Before `agent.start` nothing is known of its software and its options.
OF_AN_AGENT: Final = frozenset({"aggregate.published", "egress", "ingress", "model.received", "train.done"})
SENT: Final = {"UploadFrame": "upload", "Unmask": "shares sent", "Ack": "check"}


@lru_cache(maxsize=4)
def round_key(run: str, number: str) -> RoundKey:
    """Of the newest rounds, from an entry's fields as they stand there."""
    return json.loads(run), json.loads(number)


@dataclass(slots=True)
class _Awaited:
    """A message for which the coordinator owes a receipt, on which connection, and whether it came."""

    seq: int
    connection: int
    receipted: bool = False


@dataclass(slots=True)
class _Round:
    """What a log says of one round."""

    steps: dict[str, int] = field(default_factory=dict)  # each step, and the first entry that has it
    cohorts: dict[str, int] = field(default_factory=dict)  # contexts to which the site was invited, and how many were
    agreed: dict[str, dict[str, Any]] = field(default_factory=dict)  # contexts whose survivors were agreed: the entry
    uninvited: list[int] = field(default_factory=list)  # agreements in contexts to which the site was not invited
    opened: dict[str, int] = field(default_factory=dict)  # contexts whose shares were opened, and the entry
    shares: dict[str, dict[str, Any]] = field(default_factory=dict)  # what was opened first in each context
    common: set[str] | None = None  # who is in every set whose shares were opened
    sums: list[int] = field(default_factory=list)
    counts: set[int] = field(default_factory=set)  # over how many a sum may be, when the first one was published
    awaited: dict[str, _Awaited] = field(default_factory=dict)  # the newest upload and the shares sent
    releases: int = 0  # how often shares were opened, and how often they were sent
    answers: int = 0
    vectors: set[str] = field(default_factory=set)  # digests of the vectors that left
    arrived: set[str] = field(default_factory=set)  # at the coordinator: whose vectors came
    rules: AgreedRules | None = None  # those in force at the upload


class RoundBook:
    """Takes the entries of one log in order."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._rounds: dict[RoundKey, _Round] = {}
        self._opened: dict[str | None, int] = {}  # runs for which data were opened, and the first entry
        self._plugins: dict[str | None, int] = {}  # runs whose method's own file was run
        self._blocked: dict[int, str] = {}
        self._explained: dict[str, int] = {}  # numbers of entries, and the last entry in which a person explains each
        self._listed: set[str] = set()  # sites of every manifest that was in force so far
        self._ended: set[str | None] = set()  # runs that the operator has ended
        self._published: dict[str | None, int] = {}
        self._paid: dict[RoundKey, int] = {}
        self._connection = 0
        self._owed: dict[str, _Awaited] = {}  # by the message's id, as the entry has it

    def _of(self, record: Record) -> _Round:
        return self._rounds.setdefault(record.key, _Round())

    def sent(self, key: RoundKey, message: str, seq: int, rules: AgreedRules | None) -> None:
        """A site sent a message for the first time in a round."""
        step = SENT.get(message)
        if step is None:
            return
        of_a_result = step == "check" and key[1] is None
        found = self._newest_opened() if of_a_result else self._rounds.setdefault(key, _Round())
        found.steps.setdefault(step, seq)
        if step == "upload":
            found.rules = rules

    def _newest_opened(self) -> _Round:
        """An acknowledgement names a result, not a round; no site enters the next aggregation before it."""
        return next((found for found in reversed(self._rounds.values()) if found.opened), _Round())

    def reconnected(self) -> None:
        """A new connection, or a new start: receipts for what was sent before come with nothing."""
        self._connection += 1
        self._owed.clear()

    def await_receipt(self, key: RoundKey, message: str, msg_id: str, digest: str, seq: int) -> None:
        """A vector or shares left."""
        found = self._rounds.get(key) or self._rounds.setdefault(key, _Round())
        found.awaited[SENT[message]] = self._owed[msg_id] = _Awaited(seq, self._connection)
        if SENT[message] == "upload":
            found.vectors.add(digest)
            self._one_mask_each(key, found, seq)
        else:
            found.answers += 1
            self._each_release_is_logged(key, found, seq)

    def _one_mask_each(self, key: RoundKey, found: _Round, seq: int) -> None:
        """One context gives one mask, and the difference of two vectors under one mask is open. One may leave twice."""
        if len(found.vectors) > max(len(found.cohorts), 1):
            what = f"{len(found.vectors)} different vectors left, after {len(found.cohorts)} invitations"
            self._findings.add("StepMissing", f"round {key[1]} of {key[0]}: {what}", seq)

    def _each_release_is_logged(self, key: RoundKey, found: _Round, seq: int) -> None:
        """A party that answers again logs it again: shares beyond that may be those of another set."""
        if found.opened and found.answers > found.releases:
            what = f"shares left {found.answers} times, and were opened {found.releases} times"
            self._findings.add("StepMissing", f"round {key[1]} of {key[0]}: {what}", seq)

    def arrived(self, key: RoundKey, sender: str) -> None:
        """A vector came to the coordinator."""
        self._rounds.setdefault(key, _Round()).arrived.add(sender)

    def receipt(self, msg_id: str) -> None:
        """The coordinator has a message."""
        if msg_id in self._owed:
            self._owed.pop(msg_id).receipted = True

    def take(self, record: Record, rules: AgreedRules | None) -> None:
        """Any other entry."""
        if rules is not None:
            self._listed |= rules.sites
        match record.type:
            case "data.opened":
                self._opened.setdefault(record.run, record.seq)
            case "plugin.loaded":
                self._plugins.setdefault(record.run, record.seq)
            case "model.received":
                self._of(record).steps.setdefault("model", record.seq)
                self._not_ended(record)
            case "run.stopped":
                self._ended.add(record.run)
            case "train.done":
                self._of(record).steps.setdefault("training", record.seq)
            case "round.invited":
                self._of(record).steps.setdefault("invitation", record.seq)
                self._of(record).cohorts[record.body["context"]] = record.body["cohort_size"]
            case "dp.reserved":
                self._of(record).steps.setdefault("booking", record.seq)
            case "dp.committed":
                self._paid.setdefault(record.key, record.seq)
            case "secagg.survivors":
                self._agree(record)
            case "secagg.unmasked":
                self._open(record)
            case "aggregate.published":
                self._sum(record, rules)
            case "egress.blocked":
                if record.body["message"] in VECTORS:
                    self._blocked[record.seq] = record.body["rule"]
            case "operator.action":
                # Whole numbers: what explains entry 12 does not explain entry 1.
                numbers = re.findall(r"\bentry (\d+)\b", record.body["command"])
                self._explained |= dict.fromkeys(numbers, record.seq)

    def _not_ended(self, record: Record) -> None:
        if record.run in self._ended:
            detail = f"round {record.round} of {record.run}, which the operator had ended before"
            self._findings.add("RoundsExceeded", detail, record.seq)

    def _no_strangers(self, record: Record, names: Iterable[str]) -> None:
        """Names that nobody bears would hide how few sites a sum is over, and whose keys were opened."""
        strangers = set(names) - self._listed
        if strangers and self._listed:
            detail = f"round {record.round}: {min(strangers)} is a site of no manifest that was in force"
            self._findings.add("SumMismatch", detail, record.seq)

    def _agree(self, record: Record) -> None:
        found, context = self._of(record), record.body["context"]
        self._no_strangers(record, record.body["dropouts"])
        found.agreed[context] = record.body
        if context not in found.cohorts:
            found.uninvited.append(record.seq)
        # The threshold follows from the cohort; who leaves dropouts out of the entry would make it smaller.
        size = record.body["count"] + len(set(record.body["dropouts"]))
        if found.cohorts.get(context, size) != size:
            detail = f"round {record.round}: a cohort of {found.cohorts[context]}, of which {size} are accounted for"
            self._findings.add("ThresholdWrong", detail, record.seq)

    def _open(self, record: Record) -> None:
        found, context = self._of(record), record.body["context"]
        where, opened = f"round {record.round}", set(record.body["self_mask"])
        agreed = found.agreed.get(context)
        if agreed is None:
            self._findings.add("StepMissing", f"{where}: shares were opened for a set that was not agreed", record.seq)
        elif len(opened) != agreed["count"]:
            detail = f"{where}: masks of {len(opened)} sites were opened, agreed were {agreed['count']}"
            self._findings.add("SumMismatch", detail, record.seq)
        elif set(record.body["mask_key"]) - opened != set(agreed["dropouts"]):
            detail = f"{where}: keys of other sites were opened than of those that dropped out"
            self._findings.add("SumMismatch", detail, record.seq)
        self._no_strangers(record, opened | set(record.body["mask_key"]))
        self._one_kind(record)
        found.steps.setdefault("shares opened", record.seq)
        found.releases += 1
        # A party that was killed sends the same answer again and logs it again; another one is a second sum. A later
        # attempt may repeat an opened set, also without a site that was proven to cheat, and no other.
        same = found.shares.setdefault(context, record.body) == record.body
        common = found.common if found.common is not None else opened
        if not same or not all(name in common for name in opened):
            self._findings.add("SecondSum", f"{where}: shares were opened for two sets", record.seq)
        found.common = common & opened
        found.opened[context] = record.seq

    def _one_kind(self, record: Record) -> None:
        """Both kinds of share together open the vector of one site."""
        for name in sorted(set(record.body["self_mask"]) & set(record.body["mask_key"])):
            detail = f"round {record.round}: both kinds of share were opened for {name}"
            self._findings.add("MaskExposure", detail, record.seq)

    def _sum(self, record: Record, rules: AgreedRules | None) -> None:
        found = self._of(record)
        found.sums.append(record.seq)
        if len(found.sums) > 1:
            detail = f"round {record.round} has {len(found.sums)} sums"
            self._findings.add("SecondSum", detail, found.sums[0], record.seq)
        else:
            opened = found.opened or found.agreed
            found.counts = {body["count"] for context, body in found.agreed.items() if context in opened}
        counts = found.counts
        if record.body["inputs"] not in counts:
            detail = f"round {record.round}: a sum over {record.body['inputs']}, which was not agreed"
            self._findings.add("SumMismatch" if found.agreed else "StepMissing", detail, record.seq)
        elif not found.opened:
            self._findings.add("StepMissing", f"round {record.round}: a sum without opened shares", record.seq)
        count = self._published[record.run] = self._published.get(record.run, 0) + 1
        if rules is not None and record.run == rules.run and count > rules.rounds:
            self._findings.add("RoundsExceeded", f"{count} sums in a run of {rules.rounds} rounds", record.seq)

    def close(self, role: str) -> None:
        """Compare, now that everything was seen."""
        for seq, rule in self._blocked.items():
            if self._explained.get(str(seq), -1) < seq:
                self._findings.add("VectorBlocked", f"entry {seq}: {rule[:120]}", seq)
        for key, found in self._rounds.items():
            if role == SITE:
                self._judge(key, found)
            else:
                self._judge_arrivals(key, found)

    def _judge(self, key: RoundKey, found: _Round) -> None:
        run, number = key
        where = f"round {number} of {run}"
        upload = found.steps.get("upload")
        if upload is not None:
            self._judge_upload(where, run, found, upload, self._paid.get(key, upload))
        self._judge_opening(where, found)
        self._judge_receipt(where, found)
        if "invitation" in found.steps and not found.opened:
            self._findings.add("RoundUnfinished", where, found.steps["invitation"])
        if found.opened and "check" not in found.steps:
            self._findings.add("ResultUnchecked", where, found.steps["shares opened"])

    def _judge_arrivals(self, key: RoundKey, found: _Round) -> None:
        """At the coordinator: it cannot unmask a vector that did not come."""
        summed = {name for body in found.shares.values() for name in body["self_mask"]}
        if missing := sorted((summed & self._listed) - found.arrived):
            detail = f"round {key[1]} of {key[0]}: a sum with {missing[0]}, of which no vector came"
            self._findings.add("SumMismatch", detail, *found.opened.values())

    def _judge_upload(self, where: str, run: str | None, found: _Round, upload: int, paid: int) -> None:
        """Nothing leaves before the steps that it is made by."""
        steps = {step: found.steps.get(step, upload) for step in ("model", "training", "invitation")}
        steps["data opened"] = self._opened.get(run, upload)
        if found.rules is not None and found.rules.plugin is not None:
            steps["plugin loaded"] = self._plugins.get(run, upload)
        if missing := [step for step, seq in steps.items() if seq >= upload]:
            self._findings.add("StepMissing", f"{where}: a vector left without {', '.join(missing)} before it", upload)
        if found.rules is None or found.rules.privacy is None:
            return
        if paid >= upload:
            self._findings.add("PrivacyMissing", f"{where}: a vector left without dp.committed before it", upload)
        elif found.steps.get("booking", upload) > steps["training"]:
            self._findings.add("PrivacyMissing", f"{where}: trained without dp.reserved before it", upload)

    def _judge_receipt(self, where: str, found: _Round) -> None:
        """Receipts come in the order in which messages came. A coordinator that confirms shares of a sum with this site
        has its vector too, and the receipt for that cannot be absent unless the connection broke between the two.
        """
        upload, shares = found.awaited.get("upload"), found.awaited.get("shares sent")
        own = self._findings.log.partition(".")[0]
        if upload is None or upload.receipted or not any(own in body["self_mask"] for body in found.shares.values()):
            return
        later = shares is not None and shares.connection == upload.connection and shares.seq > upload.seq
        if later and shares is not None and shares.receipted:
            detail = f"{where}: shares have a receipt, and the vector before them has none"
            self._findings.add("StepMissing", detail, upload.seq)
        else:
            self._findings.add("ReceiptMissing", f"{where}: the vector", upload.seq)

    def _judge_opening(self, where: str, found: _Round) -> None:
        for seq in found.uninvited:
            self._findings.add("StepMissing", f"{where}: a set was agreed without an invitation to its cohort", seq)
        own = self._findings.log.partition(".")[0]
        if "upload" not in found.steps and any(own in body["self_mask"] for body in found.shares.values()):
            detail = f"{where}: this site is in the sum, and no vector of it left"
            self._findings.add("StepMissing", detail, found.steps["shares opened"])
        if "shares sent" in found.steps and not found.opened:
            self._findings.add("StepMissing", f"{where}: shares were sent and not logged", found.steps["shares sent"])
        if found.opened and "shares sent" not in found.steps:
            detail = f"{where}: shares were opened and did not leave"
            self._findings.add("RoundUnfinished", detail, found.steps["shares opened"])


class IsolationBook:
    """Whether the process that saw images was isolated, as the site said before it trained.

    :ivar required: by the manifest in force, which may be another one when the site trains than when it spoke.
    """

    def __init__(self, findings: Findings) -> None:
        self.required = False
        self._findings = findings
        self._open: str | None = None  # in which way the process is open; None: nothing was said since the start

    def started(self) -> None:
        """What was said of a process of an earlier start says nothing of this one."""
        self._open = None

    def said(self, match: re.Match[str], seq: int) -> None:
        """`trainer.isolated`: against what the site asks of itself, and what the manifest asks of it."""
        connection, keys, ranks, asked = match.group("body_connection", "body_keys", "body_ranks", "body_asked")
        weak = keys == "true" or (connection == "true" and ranks != "true")
        self._open = f"connection {connection}, keys {keys}" if weak else ""
        if weak:
            required = asked == '"required"' or self.required
            self._findings.add("IsolationWeak" if required else "NotIsolated", f"entry {seq}: {self._open}", seq)
        elif ranks == "true":
            self._findings.add("RanksConnected", f"entry {seq}", seq)

    def trained(self, _match: re.Match[str], seq: int) -> None:
        """`train.done`: by a process of which something was said, under the manifest that is in force now."""
        if self._open is None:
            self._findings.add("IsolationMissing", f"entry {seq}: no trainer.isolated since the start", seq)
        elif self._open and self.required:
            self._findings.add("IsolationWeak", f"entry {seq}: trained with {self._open}", seq)


class SettingsBook:
    """Configuration and policy of a log: whoever starts with others has said so before.

    :ivar policy: the digest in force, as entries have it.
    """

    def __init__(self, findings: Findings) -> None:
        self.policy = ""
        self._config = ""
        self._findings = findings

    def started(self, config: str, seq: int) -> None:
        """`agent.start`."""
        if self._config not in ("", config):
            self._findings.add("SettingsUnannounced", f"entry {seq} starts with another configuration", seq)
        self._config = config

    def config_changed(self, match: re.Match[str], seq: int) -> None:
        """`config.changed`."""
        self._changed("configuration", self._config or match["body_old"], match, seq)
        self._config = match["body_new"]

    def policy_changed(self, match: re.Match[str], seq: int) -> None:
        """`policy.changed`."""
        self._changed("policy", self.policy, match, seq)
        self.policy = match["body_new"]

    def _changed(self, what: str, before: str, match: re.Match[str], seq: int) -> None:
        if match["body_old"] != before:
            self._findings.add("SettingsUnannounced", f"entry {seq} replaces another {what} than the last one", seq)
        self._findings.add("SettingsChanged", f"entry {seq}: {what}, by {match['body_who'][:80]}", seq)
