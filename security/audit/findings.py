"""What an audit can find. Every code has one meaning and one next question; docs/auditors.md lists them.

A finding says that the record is wrong, or that it cannot be decided whether it is. The second is never a pass, and
the first outranks it. `Findings` gathers those of one log, so that a thousand equal ones become one that says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from lazaret.errors import LocalProtocolError


class Concern(Enum):
    """Which of the two verdicts a finding is about."""

    RECORD = "record intact"
    RULES = "rules kept"


class Severity(Enum):
    """How much a finding weighs. Only `NOTE` leaves an audit clean."""

    FAIL = "fail"
    UNDECIDED = "cannot decide"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One thing that can be found."""

    severity: Severity
    meaning: str
    ask: str
    concern: Concern = Concern.RECORD


def _fail(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.FAIL, meaning=meaning, ask=ask)


def _breach(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.FAIL, meaning=meaning, ask=ask, concern=Concern.RULES)


def _unjudged(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.UNDECIDED, meaning=meaning, ask=ask, concern=Concern.RULES)


def _undecided(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.UNDECIDED, meaning=meaning, ask=ask)


def _note(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.NOTE, meaning=meaning, ask=ask)


_SITE_COPY: Final = "ask the party for a new copy of the whole folder, and the witnesses for the checkpoints they hold"
_CONSORTIUM: Final = "ask the consortium which manifest was in force, and the party why it did not keep to it"
_LEDGER: Final = "ask the site for its privacy ledger and its configuration at that time"
_BOTH: Final = "ask both parties for the entries named, and for the messages themselves if they are kept"

CODES: Final[dict[str, Code]] = {
    # The folder
    "FormatUnknown": _fail("FORMAT is missing or of another version", _SITE_COPY),
    "SegmentMissing": _fail("segment files are missing, misnumbered or of the wrong length", _SITE_COPY),
    "SegmentMismatch": _fail("a segment file is not the one that was sealed", _SITE_COPY),
    "LeavesMismatch": _fail(
        "an entry does not have the hash that was stored for it", "compare the entry with a backup"
    ),
    "ManifestMismatch": _fail("the manifest copy is not the one the log says is in force", "ask the consortium for it"),
    "ManifestRejected": _fail("the manifest is not signed by the root key given", "check the root key's fingerprint"),
    "ManifestMissing": _undecided(
        "a manifest that was in force is not here, so its keys and rules are not known", "ask the consortium for it"
    ),
    "ManifestConflict": _fail(
        "two different signed manifests have one version", "ask the consortium who used its root key, and when"
    ),
    "HostileFolder": _fail("the folder holds what no party writes; nothing more of it was read", _SITE_COPY),
    "EmptyLog": _undecided("there is no privacy log in this folder", "ask for the whole folder, with FORMAT"),
    "KeysNotPinned": _note(
        "keys taken from the log itself; pin them with --root-key", "ask the consortium for its root"
    ),
    "SecondKeyNotPinned": _note(
        "manifests have an ML-DSA signature, and the root.pem given has no key to check it by",
        "ask the consortium for its root.pem as it is now",
    ),
    "OneSignature": _undecided(
        "no ML-DSA signature covers a manifest or the end of the log, which a forger of the others could make",
        "ask the consortium for every version of the manifest, and the party for a newer copy",
    ),
    # Entries
    "MalformedEntry": _fail("a line is not a canonical entry of a known type", _SITE_COPY),
    "SequenceGap": _fail("entries are missing, repeated or out of order", _SITE_COPY),
    "ForeignEntry": _fail("an entry belongs to another log", _SITE_COPY),
    "GenesisInvalid": _fail("the log does not begin with the keys it should have", "ask the consortium for the keys"),
    "ClockRollback": _fail("wall-clock time went back without an entry that says so", "ask the operator what happened"),
    "ClockAdjusted": _note("the wall clock was moved, and the log says so", "ask the operator for the reason"),
    "MonotonicRollback": _fail("the monotonic clock went back inside one boot", "ask the operator what happened"),
    "Backdated": _fail("an entry's time contradicts a witness's time", "ask the witness for its own entry"),
    "HeartbeatGap": _fail(
        "a running agent wrote no entry or no checkpoint for too long", "ask what the agent did in that time"
    ),
    "UncleanStop": _note(
        "the agent ended without an entry (a crash or a kill), and continued later", "ask the operator"
    ),
    "TornWrite": _note(
        "a crash left an incomplete write, which was moved to evidence/", "examine the file in evidence/"
    ),
    "TornWriteMissing": _undecided(
        "what a crash left is not in evidence/ as the log says", "ask for a new copy of the whole folder"
    ),
    "NoStop": _undecided(
        "the log ends while the agent is running: it is incomplete, or the end was cut off", "ask for a newer copy"
    ),
    "SettingsChanged": _note("configuration or policy was changed between starts", "ask who approved the change"),
    "SettingsUnannounced": _fail("configuration or policy changed and no entry says so", "ask for both versions"),
    "InsecureOption": _breach("an agent ran with an option that weakens it", "ask who approved the option"),
    "IsolationMissing": _breach(
        "a site trained, and no entry says how the process that saw images was isolated", "ask what ran there, and how"
    ),
    "IsolationWeak": _breach(
        "the process that saw images could open a connection or read keys, which manifest or site forbid",
        "ask the site for its unit or container, and for `site-agent check`",
    ),
    "NotIsolated": _note(
        "the process that saw images could open a connection or read keys, and the log says so", "ask what prevents it"
    ),
    "RanksConnected": _note(
        "processes that trained together had a network among themselves, and the log says so",
        "ask which machines it joins",
    ),
    "AnnexMismatch": _fail("an annex is not what its entry commits to", "ask the site for the annex that opens it"),
    "AnnexUnavailable": _note(
        "annexes are not in this copy (opened: no longer available)", "ask the site's own auditor"
    ),
    "AnnexLost": _undecided(
        "an annex is gone without an entry that says who had it erased", "ask the site, and for a backup of annex/"
    ),
    "AnnexKept": _fail("an annex that was to be erased is still there", "ask the site to erase it again"),
    # Checkpoints, keys and witnesses
    "Unsealed": _fail("the log has no signed checkpoint, although sealing begins with its first entry", _SITE_COPY),
    "UnsealedTail": _undecided("entries after the newest signed checkpoint are not signed yet", "ask for a newer copy"),
    "BadHead": _fail("a signed checkpoint cannot be read or is under another's name", _SITE_COPY),
    "HeadMissing": _undecided("a checkpoint that travelled with a message is not in this copy", _SITE_COPY),
    "BadSignature": _fail("a signature on a checkpoint does not verify", _SITE_COPY),
    "UnknownSigner": _fail("a checkpoint has a signature of a key outside the roster", "ask who that key belongs to"),
    "RootMismatch": _fail(
        "the entries do not lead to a signed checkpoint", "compare with the checkpoints that witnesses hold"
    ),
    "TruncatedTail": _fail("a checkpoint of this log is larger than the log: entries were cut off", _SITE_COPY),
    "EpochChain": _fail("the endorsements of the epoch keys are broken", "ask the consortium for the root key"),
    "WrongEpochKey": _fail(
        "a checkpoint is signed by the key of another epoch", "ask when that key was in use, and where"
    ),
    "EpochUnsealed": _fail("an epoch ended without a checkpoint that both its keys signed", _SITE_COPY),
    "EpochWithoutHeartbeat": _fail("an epoch has no heartbeat", "ask what the agent did in that time"),
    "NotWitnessed": _undecided("cannot decide beyond the newest witnessed checkpoint", "ask the witnesses named"),
    "BeyondWitnessed": _note("the last entries have only this log's own signature so far", "ask the witnesses again"),
    "WitnessFolderMissing": _undecided(
        "what this party holds of the others' logs is not here", "ask for the whole folder, with witness/"
    ),
    "WitnessClock": _note("a witness's time is far from the log's own, and does not count", "ask the witness"),
    "EvidenceInvalid": _note(
        "a file of evidence proves nothing: its signatures are not those of a listed key", "ask where it came from"
    ),
    "CosignatureMissing": _undecided(
        "a cosignature that the log itself names is not in this copy", "ask for a new copy, and the witness named"
    ),
    "WitnessRecordInvalid": _fail(
        "a checkpoint kept for another log is not genuine", "ask that log's owner for its checkpoint"
    ),
    "Fork": _fail(
        "one log has shown two histories; both signed checkpoints are evidence", "keep the evidence, stop the party"
    ),
    # Outside of the logs
    "KeysReplaced": _fail(
        "the log is under other keys than when the auditor last saw it",
        "ask the consortium who enrolled it again, and why",
    ),
    "CollectorMismatch": _fail(
        "a log collector has other entries than the log, or lacks some",
        "compare both with the checkpoints of witnesses",
    ),
    # What left
    "SurplusBytes": _breach(
        "a message was not as long as its type must be", "ask for the message; bytes were hidden in it"
    ),
    "ForbiddenMessage": _breach(
        "a message was sent whose type may not contain this data", "ask why the egress filter permitted it"
    ),
    "UnmaskedVector": _breach(
        "a vector was sent that was not masked, or did not look masked", "stop the site; find the message"
    ),
    "LayoutMismatch": _breach(
        "a vector had another length than the manifest's layout gives", "ask for the manifest then"
    ),
    "ReceiptInvalid": _fail("a receipt fits neither what was sent nor what was logged as arrived", _BOTH),
    "NoNetworkCounter": _unjudged(
        "nothing but the log itself counts what left", "ask why the agent could not read the kernel's counters"
    ),
    "UnloggedTraffic": _breach("the network counted other bytes than the log explains", "ask for the counters' source"),
    "DuplicateMessage": _fail("one message id was used twice", _BOTH),
    "IngressSurplus": _undecided(
        "the coordinator's kernel counted more bytes in than its log explains; anybody may connect to its port",
        "ask the operator for the firewall's count, by address",
    ),
    "CounterCoverage": _unjudged(
        "too little of what left was counted by the kernel, or too little by its widest count",
        "ask why readings are missing, and for a firewall's count",
    ),
    "ProcessCount": _note(
        "the kernel's count covers one process: what another process sends, or UDP, is not in it",
        "ask for a network namespace of the agent's own, or for a firewall's count",
    ),
    # Rules of the manifest in force
    "RulesUnknown": _unjudged("the rules in force are not known, so none was checked", "ask the consortium for them"),
    "DestinationUnknown": _breach("a message went to a key that is not the coordinator's", _CONSORTIUM),
    "SenderUnlisted": _breach(
        "a message, or a model, of a party that the manifest in force does not list was taken", _CONSORTIUM
    ),
    "CertificateInvalid": _breach("a party acted outside of the dates of its certificate", _CONSORTIUM),
    "ManifestEnded": _breach("a site joined a round although the manifest in force had ended", _CONSORTIUM),
    "CohortTooSmall": _breach("a cohort was smaller than the manifest permits", _CONSORTIUM),
    "SurvivorsTooFew": _breach("a sum was over fewer sites than the manifest permits", _CONSORTIUM),
    "GroupsMismatch": _breach("sums were of other groups of sites than the manifest's draw gives", _CONSORTIUM),
    "VoteWrong": _breach("a model was accepted, or not, by other votes than it takes", _CONSORTIUM),
    "ThresholdWrong": _breach("a threshold does not follow from cohort and colluder bound", _CONSORTIUM),
    "SecondSum": _breach("one round has two sums: their difference reveals updates", "treat these updates as exposed"),
    "SumMismatch": _breach("a sum is not over the survivors that were agreed", _BOTH),
    "VectorBlocked": _breach(
        "the egress filter stopped a vector and nobody explained it",
        'ask the site; it explains with `site-agent log-note "entry N: reason"`',
    ),
    "SoftwareUnlisted": _breach("software or wire schema is none of those that the manifest lists", _CONSORTIUM),
    "SoftwareDiffers": _note(
        "packages of a party were not those of its bill of materials, and the log says so", "ask who installed them"
    ),
    "PluginMismatch": _breach("a method's own file was run that is not the one that the manifest pins", _CONSORTIUM),
    "MethodMismatch": _breach("a method, model or layout is not the one that the manifest names", _CONSORTIUM),
    "SettingsMismatch": _breach("training settings are none of those that the manifest lists", _CONSORTIUM),
    "RoundsExceeded": _breach("there were more rounds than the manifest permits", _CONSORTIUM),
    "RunMismatch": _breach("an entry is of another run than the manifest in force", _CONSORTIUM),
    "PurposeNotStated": _breach("data were opened without a stated purpose or legal basis", "ask the site for both"),
    "PurposeNotAgreed": _breach("data were opened for a purpose or on a basis that was not agreed", _CONSORTIUM),
    "PrivacyMissing": _breach("a vector left without the differential privacy that is demanded", _LEDGER),
    "PrivacyTerms": _breach("unit or delta is not what the manifest demands", _LEDGER),
    "NoiseBelowFloor": _breach("noise was below the floor that the manifest demands", _LEDGER),
    "ClipExceeded": _breach("a clip was above the one that the manifest demands", _LEDGER),
    "ScheduleMismatch": _breach("steps or sampling rate are not those of the manifest's schedule", _LEDGER),
    "RunEpsilonExceeded": _breach("a run spent more epsilon than the manifest permits", _LEDGER),
    "StepMissing": _breach("a step of a round is not in the log, and nothing explains its absence", _SITE_COPY),
    "RoundUnfinished": _note("rounds that began here and did not end in a sum with this site", "compare all logs"),
    "ReceiptMissing": _note(
        "vectors in a sum for which this site has no receipt: the connection or the agent stopped before it came",
        "compare with the coordinator's log",
    ),
    "ResultUnchecked": _note("results that this site took over and did not check itself", "compare all logs"),
    # Between logs
    "EgressUnacknowledged": _fail("a message left a site and never reached the coordinator's log", _BOTH),
    "IngressUnexplained": _fail("the coordinator logged a message that no site's log explains", _BOTH),
    "DigestMismatch": _fail("two logs disagree on a message's bytes, type or length", _BOTH),
    "ModelInconsistency": _fail("parties worked on different models in one round", "ask the coordinator for its entry"),
    "SplitCohort": _fail("sites saw different cohorts, contexts or survivors", "ask the coordinator for its entry"),
    "HeadContradicted": _fail(
        "a party was shown a checkpoint that the log does not lead to", "ask both for that message"
    ),
    "MaskExposure": _breach("both kinds of mask share were opened for one site", "treat that site's update as exposed"),
    "ClockSkew": _fail("two parties' clocks differ by more than the tolerance", "ask both for their time source"),
    "LogMissing": _undecided("a party's log was not given, so its side could not be compared", "ask for that log"),
    "LogLost": _note(
        "a party's log is lost, as the auditor said (`--lost`): its side of the messages is compared with nothing",
        "ask for the report of the loss, and for a copy that was forwarded",
    ),
    "InFlight": _note(
        "messages were under way when an agent was killed, a connection broke or a log was copied",
        "compare again later",
    ),
    # Differential privacy
    "EpsilonMismatch": _fail("the epsilon written is not what its inputs give", "ask for the privacy ledger"),
    "UnaccountedRound": _breach(
        "a site under a privacy budget took part without a booking in its ledger", "ask for the privacy ledger"
    ),
    "BudgetExceeded": _breach("epsilon is above its cap", "ask who raised or ignored the cap"),
    "DpTermsChanged": _breach("delta, unit, order or cap changed in mid-run", "ask who changed the terms"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found: where, and in one sentence what."""

    code: str
    log: str
    detail: str
    entries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise LocalProtocolError(f"no finding is called {self.code}")

    @property
    def severity(self) -> Severity:
        """Its weight."""
        return CODES[self.code].severity

    @property
    def unreliable(self) -> bool:
        """Whether nothing is built on a log with this finding: it is wrong, or a forger may have made it."""
        return self.severity is Severity.FAIL or self.code == "OneSignature"

    @property
    def meaning(self) -> str:
        """What it means, for a reader who does not know the log."""
        return CODES[self.code].meaning

    @property
    def concern(self) -> Concern:
        """Whether it is about the record or about the rules."""
        return CODES[self.code].concern

    @property
    def ask(self) -> str:
        """What to ask for next."""
        return CODES[self.code].ask

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "concern": self.concern.value,
            "log": self.log,
            "entries": list(self.entries),
            "detail": self.detail,
            "meaning": self.meaning,
            "ask": self.ask,
        }


def exit_code(findings: Iterable[Finding]) -> int:
    """0 clean, 1 a finding, 3 cannot decide. A finding outranks what cannot be decided."""
    severities = {finding.severity for finding in findings}
    if Severity.FAIL in severities:
        return 1
    return 3 if Severity.UNDECIDED in severities else 0


def verdict_on(findings: Iterable[Finding], concern: Concern) -> int:
    """The same for one of the two verdicts. Where the record cannot be relied on, nothing is known of the rules."""
    found = tuple(findings)
    own = exit_code(finding for finding in found if finding.concern is concern)
    if concern is Concern.RULES and own == 0:
        return 3 if exit_code(finding for finding in found if finding.concern is Concern.RECORD) else 0
    return own


# The findings of one log

_SHOWN: Final = 20


@dataclass(slots=True)
class _Group:
    detail: str
    entries: list[int] = field(default_factory=list)
    count: int = 0


class Findings:
    """Findings about one log, grouped by code."""

    def __init__(self, log: str) -> None:
        self.log = log
        self._groups: dict[str, _Group] = {}

    def add(self, code: str, detail: str, *entries: int) -> None:
        """Note one thing; the first of its code gives the text."""
        group = self._groups.setdefault(code, _Group(detail))
        group.count += 1
        if len(group.entries) < _SHOWN:
            group.entries.extend(entries)

    def __contains__(self, code: str) -> bool:
        return code in self._groups

    def listed(self) -> tuple[Finding, ...]:
        """All of them, heaviest first."""
        found = [
            Finding(
                code=code,
                log=self.log,
                detail=group.detail + (f" (and {group.count - 1} more like this)" if group.count > 1 else ""),
                entries=tuple(group.entries[:_SHOWN]),
            )
            for code, group in self._groups.items()
        ]
        order = ["fail", "cannot decide", "note"]
        return tuple(sorted(found, key=lambda finding: order.index(finding.severity.value)))
