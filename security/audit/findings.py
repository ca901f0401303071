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


def _fail(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.FAIL, meaning=meaning, ask=ask)


def _undecided(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.UNDECIDED, meaning=meaning, ask=ask)


def _note(meaning: str, ask: str) -> Code:
    return Code(severity=Severity.NOTE, meaning=meaning, ask=ask)


_SITE_COPY: Final = "ask the party for a new copy of the whole folder, and the witnesses for the checkpoints they hold"
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
        "no manifest, so the keys of other parties are not known", "ask the consortium for it"
    ),
    "KeysNotPinned": _note(
        "keys taken from the log itself; pin them with --root-key", "ask the consortium for its root"
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
    "SettingsChanged": _note("configuration or policy was changed between starts", "ask who approved the change"),
    "SettingsUnannounced": _fail("configuration or policy changed and no entry says so", "ask for both versions"),
    "InsecureOption": _note("an agent ran with an option that weakens it", "ask who approved the option"),
    "IsolationMissing": _fail(
        "a site trained, and no entry says how the process that saw images was isolated", "ask what ran there, and how"
    ),
    "IsolationWeak": _fail(
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
    # Checkpoints, keys and witnesses
    "Unsealed": _fail("the log has no signed checkpoint, although sealing begins with its first entry", _SITE_COPY),
    "UnsealedTail": _undecided("entries after the newest signed checkpoint are not signed yet", "ask for a newer copy"),
    "BadHead": _fail("a signed checkpoint cannot be read or is under another's name", _SITE_COPY),
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
    "WitnessRecordInvalid": _fail(
        "a checkpoint kept for another log is not genuine", "ask that log's owner for its checkpoint"
    ),
    "Fork": _fail(
        "one log has shown two histories; both signed checkpoints are evidence", "keep the evidence, stop the party"
    ),
    # What left
    "SurplusBytes": _fail(
        "a message was not as long as its type must be", "ask for the message; bytes were hidden in it"
    ),
    "ForbiddenMessage": _fail(
        "a message was sent whose type may not contain this data", "ask why the egress filter permitted it"
    ),
    "UnmaskedVector": _fail(
        "a vector was sent that was not masked, or did not look masked", "stop the site; find the message"
    ),
    "LayoutMismatch": _fail(
        "a vector had another length than the manifest's layout gives", "ask for the manifest then"
    ),
    "ReceiptInvalid": _fail("a receipt fits neither what was sent nor what was logged as arrived", _BOTH),
    "NoNetworkCounter": _note(
        "nothing but the log itself counts what left", "ask why the agent could not read the kernel's counters"
    ),
    "UnloggedTraffic": _fail("the network counted other bytes than the log explains", "ask for the counters' source"),
    "DuplicateMessage": _fail("one message id was used twice", _BOTH),
    # Between logs
    "EgressUnacknowledged": _fail("a message left a site and never reached the coordinator's log", _BOTH),
    "IngressUnexplained": _fail("the coordinator logged a message that no site's log explains", _BOTH),
    "DigestMismatch": _fail("two logs disagree on a message's bytes, type or length", _BOTH),
    "ModelInconsistency": _fail("parties worked on different models in one round", "ask the coordinator for its entry"),
    "SplitCohort": _fail("sites saw different cohorts, contexts or survivors", "ask the coordinator for its entry"),
    "HeadContradicted": _fail(
        "a party was shown a checkpoint that the log does not lead to", "ask both for that message"
    ),
    "MaskExposure": _fail("both kinds of mask share were opened for one site", "treat that site's update as exposed"),
    "ClockSkew": _fail("two parties' clocks differ by more than the tolerance", "ask both for their time source"),
    "LogMissing": _undecided("a party's log was not given, so its side could not be compared", "ask for that log"),
    "InFlight": _note(
        "messages were under way when an agent was killed, a connection broke or a log was copied",
        "compare again later",
    ),
    # Differential privacy
    "EpsilonMismatch": _fail("the epsilon written is not what its inputs give", "ask for the privacy ledger"),
    "UnaccountedRound": _fail("a site under a privacy budget took part without paying", "ask for the privacy ledger"),
    "BudgetExceeded": _fail("epsilon is above its cap", "ask who raised or ignored the cap"),
    "DpTermsChanged": _fail("delta, unit, order or cap changed in mid-run", "ask who changed the terms"),
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
    def meaning(self) -> str:
        """What it means, for a reader who does not know the log."""
        return CODES[self.code].meaning

    @property
    def ask(self) -> str:
        """What to ask for next."""
        return CODES[self.code].ask

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "code": self.code,
            "severity": self.severity.value,
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
