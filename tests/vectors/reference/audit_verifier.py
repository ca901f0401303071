"""A second verifier of one privacy log, written from docs/spec/audit-log.md alone; `audit_formats` has the formats.

In tests/vectors, ``python -m reference.audit_verifier LOG root.pem`` prints what it found and a verdict. It is small
before it is fast:
it holds a log in memory. It does not recompute epsilon (docs/spec/differential-privacy.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from statistics import median_low
from typing import Any
from urllib.parse import unquote

from cryptography import x509

from .audit_evidence import check_fork, is_signed
from .audit_formats import (
    Agreed,
    Invalid,
    Key,
    Note,
    Tree,
    canonical,
    check_chain,
    classes,
    demand,
    due_bytes,
    entry_of,
    key_of,
    leaf,
    read_json,
)
from .audit_rules import broken, is_open, round_faults

SEGMENT = 65_536
SKEW = 300_000
SILENCE = 30 * 60_000
OF_AN_AGENT = ("aggregate.published", "egress", "ingress", "model.received", "train.done")
NEVER = (1 << 62, 0)
Entry = dict[str, Any]


@dataclass
class Head:
    """A checkpoint whose signatures are valid."""

    size: int
    root: bytes
    note: Note
    epochs: list[int]
    cosigners: dict[Key, int]


@dataclass
class Boot:
    """What left and what the kernel counted since the agent started."""

    began: int
    out: int = 0
    into: int = 0
    opened: int = 0
    connections: int = 0
    logged: int = 0
    messages: int = 0
    acknowledged: int = 0
    read: int = 0
    beside: int = 0
    lost: int = 0
    coverage: str = ""
    waiting: dict[str, int] = field(default_factory=dict)


CAPS = {"segments": 1 << 29, "evidence": 1 << 29, "manifests": (1 << 22) + 1, "leaves.bin": 1 << 36}
CAPS |= dict.fromkeys(("checkpoints", "epochs", "witness", "annex", "FORMAT", "cosigned.note"), 1 << 20)
CAPS |= {"manifest.json": (1 << 22) + 1}


def hostile(folder: Path) -> Iterator[str]:
    """What no party writes: looked at, and never opened."""
    for name, most in CAPS.items():
        top = folder / name
        is_folder = "." not in name and name != "FORMAT"
        if is_folder and (top.is_symlink() or (top.exists() and not top.is_dir())):
            yield f"{name} is no folder"
            continue
        for path in (top.iterdir() if top.is_dir() else ()) if is_folder else (top,):
            if not path.exists() and not path.is_symlink():
                continue
            about = path.lstat()
            sparse = about.st_size > 1 << 26 and about.st_blocks * 512 < about.st_size // 100
            cap = 1 << 20 if name == "evidence" and not path.name.startswith("torn-") else most
            if not S_ISREG(about.st_mode) or about.st_size > cap or sparse:
                yield f"{name}: a file that no party writes"


def is_leftover(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".new")


class Verifier:
    """One log. `wrong` and `open` say what was found."""

    def __init__(
        self,
        folder: Path,
        root: x509.Certificate | None = None,
        ml_dsa: str | None = None,
        others: Sequence[Path] = (),
    ) -> None:
        self.folder = folder
        self.wrong: list[str] = []
        self.open: list[str] = []
        self.agreed: dict[str, Agreed] = {}
        self.entries: list[Entry] = []
        self.in_force: list[Agreed | None] = []  # for each entry
        self.heads: dict[int, Head] = {}
        self.chain: list[Key] = []
        self.wrong += hostile(folder)
        if self.wrong:
            return
        if not any((folder / "segments").glob("*")):
            self.open.append("there is no log")
            return
        self._manifests(root)
        self.brought = ml_dsa is not None
        beside = [Agreed(path.read_bytes(), root) for other in others for path in (other / "manifests").iterdir()]
        self._vouched(ml_dsa, beside)
        self.lines = list(self._lines())
        self._parse()
        self.origin: str = self.entries[0]["origin"] if self.entries else folder.name
        parties = [party for one in self.agreed.values() if (party := one.party(self.origin))]
        self.name = parties[-1] if parties else ""
        self.role = self.entries[0]["body"].get("role") if self.entries else None
        for check in (self._genesis, self._checkpoints, self._order, self._manifest_chain, self._tree, self._witnesses):
            self._attempt(check)
        for check in (self._evidence, self._annexes, self._settings, self._bytes, self._rules, self._rounds):
            self._attempt(check)

    @property
    def verdict(self) -> int:
        """0 clean, 1 something is wrong, 3 cannot decide."""
        return 1 if self.wrong else 3 if self.open else 0

    def _attempt(self, check: Any) -> None:
        try:
            check()
        except (Invalid, KeyError, IndexError, TypeError, ValueError, AttributeError, OSError) as error:
            self.wrong.append(f"{check.__name__}: {type(error).__name__} {error}")

    def _note(self, condition: object, what: str) -> None:
        if not condition:
            self.wrong.append(what)

    def _of(self, *types: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry["type"] in types)

    # 1. Manifests

    def _manifests(self, root: x509.Certificate | None) -> None:
        self._note(
            (self.folder / "FORMAT").is_file() and (self.folder / "FORMAT").read_bytes() == b"lazaret audit log 2\n",
            "FORMAT",
        )
        for path in [*sorted((self.folder / "manifests").glob("*")), self.folder / "manifest.json"]:
            if not path.is_file() or is_leftover(path):
                continue
            try:
                data = path.read_bytes()
                digest = sha256(data).hexdigest()
                demand(path.name in ("manifest.json", f"{digest}.json"), "a name that is not the digest")
                self.agreed[digest] = Agreed(data, root)
            except (Invalid, KeyError, TypeError, ValueError) as error:
                self.wrong.append(f"{path.name}: {error}")
        versions = [one.version for one in self.agreed.values()]
        self._note(len(versions) == len(set(versions)), "two manifests of one version")
        self.agreed = dict(sorted(self.agreed.items(), key=lambda item: item[1].version))

    def _vouched(self, known: str | None, beside: Sequence[Agreed]) -> None:
        """Versions without the root's ML-DSA signature count before the first one that has it, if the auditor does
        not have the key; and where the next version that counts, in any folder, has their digest."""
        first = next((one for one in self.agreed.values() if one.root_ml_dsa is not None), None)
        key = known or (first.root_ml_dsa if first else None)
        named, lowest = set(), 1 << 62
        for one in sorted([*self.agreed.values(), *beside], key=lambda one: one.version, reverse=True):
            if key is not None and (one.root_ml_dsa == key or one.content.hex() in named):
                named.add(one.value["previous"])
                lowest = min(lowest, one.version - 1 if one.value["previous"] else one.version)
        for digest, one in [*self.agreed.items()]:
            if key is None or one.root_ml_dsa == key or one.content.hex() in named:
                continue
            if known and one.root_ml_dsa is None and one.version < lowest:
                self.open.append(f"version {one.version} may be under the root's ML-DSA key, or not")
            elif known or (first and one.version >= first.version):
                self.wrong.append(f"version {one.version} is not under the root's ML-DSA key")
                del self.agreed[digest]

    def _lines(self) -> Iterator[bytes]:
        files = sorted((self.folder / "segments").iterdir())
        self.segments = []
        for number, path in enumerate(files):
            self._note(path.name == f"{number:08d}.jsonl", "segments are not numbered without gaps")
            data = path.read_bytes()
            self.segments.append(sha256(data).hexdigest())
            self._note(data.endswith(b"\n"), "an incomplete line")
            found = data.split(b"\n")
            found = found[:-1] if not found[-1] else found
            self._note(len(found) == SEGMENT or (path == files[-1] and len(found) <= SEGMENT), "length of a segment")
            yield from found

    def _parse(self) -> None:
        in_force: Agreed | None = None
        for number, line in enumerate(self.lines):
            try:
                entry = entry_of(line)
                demand(entry["seq"] == number, f"entry {number} has another number")
            except Invalid as error:
                self.wrong.append(f"entry {number}: {error}")
                continue
            if entry["type"] in ("log.genesis", "manifest.adopted"):
                digest = entry["body"]["manifest" if entry["type"] == "log.genesis" else "new"]
                in_force = self.agreed.get(digest)
                if in_force is None:
                    self.open.append(f"the manifest of entry {number} is not here")
            self.entries.append(entry)
            self.in_force.append(in_force)

    # 2 and 8. Genesis, endorsements, manifests in force

    def _genesis(self) -> None:
        body = self.entries[0]["body"]
        demand(self.entries[0]["type"] == "log.genesis", "no genesis")
        self._note(sum(1 for _ in self._of("log.genesis")) == 1, "a second genesis")
        demand(self.name, "no manifest lists this log")
        roots = [one.keys[self.name][0] for one in self.agreed.values() if self.name in one.keys]
        root = key_of(body["root_vkey"])
        notes = []
        while (path := self.folder / "epochs" / f"{len(notes)}.note").exists():
            notes.append(Note(path.read_bytes()))
        self.chain = check_chain(self.origin, root if root in roots else roots[-1], notes)
        first = self.in_force[0]
        if first is not None:
            keys = first.keys.get(self.name)
            role = "coordinator" if self.name == first.hub else "site"
            told = (body["role"], root, key_of(body["cosigner_vkey"]))
            self._note(keys and told == (role, *keys), "the genesis has other keys than the manifest")
        self._note(key_of(body["epoch_vkey"]) == self.chain[0], "the genesis has another key of epoch 0")

    def _manifest_chain(self) -> None:
        digest = self.entries[0]["body"]["manifest"]
        for place, entry in enumerate(self.entries):
            if entry["type"] != "manifest.adopted":
                continue
            before, after = self.in_force[place - 1], self.in_force[place]
            self._note(entry["body"]["old"] == digest, f"entry {entry['seq']} replaces another manifest")
            digest = entry["body"]["new"]
            if before and after and before is not after:
                self._note(after.version > before.version, "a version goes back")
            self._note(after is None or after.version == entry["body"]["version"], "another version than the file has")
        for agreed in self.in_force:
            if agreed is not None and not (self.folder / "manifests" / f"{agreed.digest}.json").exists():
                self.open.append("a manifest in force is not in manifests/")
                break
        current = self.folder / "manifest.json"
        self._note(current.is_file() and sha256(current.read_bytes()).hexdigest() == digest, "manifest.json")

    # 3. Checkpoints

    def _checkpoints(self) -> None:
        own = [key for one in self.agreed.values() for name, (_, key) in one.keys.items() if name != self.name]
        others = [key_of(key) for one in self.agreed.values() for key in one.value["audit"]["witnesses"]]
        second = [one.ml_dsa[self.name] for one in self.agreed.values() if self.name in one.ml_dsa]
        self.keys = [*self.chain, *own, *others, *second]
        for path in sorted(path for path in (self.folder / "checkpoints").iterdir() if not is_leftover(path)):
            try:
                head = self._head(path.read_bytes())
                demand(path.name == f"{head.size}.note", "a name that is not the size")
                self.heads[head.size] = head
            except Invalid as error:
                self.wrong.append(f"{path.name}: {error}")
        self._note(self.heads, "no checkpoint")
        for size, head in self.heads.items():
            agreed = self.in_force[size - 1] if 0 < size <= len(self.in_force) else None
            due = agreed.ml_dsa.get(self.name) if agreed else None
            if due is None and second and size == max(self.heads):
                due = second[-1]
            self._note(due is None or due in head.note.signers(self.keys), f"checkpoint {size} has one signature")
        if self.brought and not second:
            self.open.append("the log ends before the second signature")
        cosigned = self.folder / "cosigned.note"
        if cosigned.exists():
            handed = self._head(cosigned.read_bytes())
            kept = self.heads.get(handed.size)
            self._note(kept and kept.root == handed.root, "cosigned.note is none of the checkpoints")
            if kept and kept.note.data != handed.note.data:
                self.open.append("cosigned.note differs")

    def _head(self, data: bytes) -> Head:
        note = Note(data)
        origin, size, root = note.checkpoint
        demand(origin == self.origin, "a checkpoint of another log")
        demand(not note.strangers(self.keys), "signed by a stranger")
        found = note.signers(self.keys)
        epochs = [number for number, key in enumerate(self.chain) if key in found]
        demand(epochs, "not signed by the log")
        return Head(size, root, note, epochs, {key: time for key, time in found.items() if key[1] == 4})

    # 4 and 5. Order and time

    def _order(self) -> None:
        ts = mono = sealed = floor = epoch = beats = 0
        boot, boots = "", set[str]()
        self.rotations: list[int] = []
        self.running = False
        for entry in self.entries:
            seq, kind, body = entry["seq"], entry["type"], entry["body"]
            self._note(entry["origin"] == self.origin and entry["epoch"] == epoch, f"origin or epoch of entry {seq}")
            if entry["ts"] < ts:
                named = kind == "clock.adjusted" and body["offset_ms"] <= entry["ts"] - ts + SKEW
                self._note(named, f"time goes back at entry {seq}")
            self._note(entry["ts"] >= floor or kind == "clock.adjusted", f"entry {seq} is before a cosignature")
            ts = entry["ts"]
            if entry["boot"] == boot:
                self._note(0 <= entry["mono_ms"] - mono <= SILENCE, f"monotonic clock at entry {seq}")
                self._note(entry["mono_ms"] - sealed <= SILENCE, f"no checkpoint before entry {seq}")
            else:
                self._note(entry["boot"] not in boots, f"an old boot at entry {seq}")
                boot, sealed, self.running = entry["boot"], entry["mono_ms"], False
                boots.add(boot)
            mono = entry["mono_ms"]
            self._note(self.running or kind not in OF_AN_AGENT, f"entry {seq} before the agent's start")
            if kind == "clock.adjusted":
                floor = min(floor, ts)
            elif kind == "cosigned" and body["origin"] == self.origin and abs(body["timestamp"] * 1000 - ts) <= SKEW:
                floor = max(floor, body["timestamp"] * 1000 - SKEW)
            elif kind == "heartbeat":
                beats += 1
            elif kind == "key.rotated":
                keys = [self.chain[epoch], self.chain[epoch + 1]]
                told = [key_of(body["old_vkey"]), key_of(body["new_vkey"])]
                self._note(told == keys and body["epoch"] == epoch + 1 and beats, f"rotation at entry {seq}")
                self.rotations.append(seq)
                epoch, beats = epoch + 1, 0
            elif kind == "segment.sealed":
                due = {"segment": seq // SEGMENT - 1, "sha256": self.segments[seq // SEGMENT - 1]}
                self._note(seq % SEGMENT == 0 and body == due, f"seal at entry {seq}")
            elif kind in ("agent.start", "agent.stop"):
                self.running = kind == "agent.start"
            if seq + 1 in self.heads:
                sealed = mono
        self._note(len(self.chain) <= epoch + 2, "more keys than were announced")
        if self.running:
            self.open.append("the agent has not stopped")

    # 6 and 7. Tree and witnesses

    def _tree(self) -> None:
        tree, leaves = Tree(), [leaf(line) for line in self.lines]
        latest, times = 0, {entry["seq"]: entry["ts"] for entry in self.entries}
        for size in range(1, len(leaves) + 1):
            tree.add(leaves[size - 1])
            latest = max(latest, times.get(size - 1, 0))
            if (head := self.heads.get(size)) is not None:
                self._note(tree.root() == head.root, f"the entries do not lead to checkpoint {size}")
                self._times(head, latest)
        newest = max(self.heads, default=0)
        self._note(newest <= len(leaves), "entries were cut off")
        if newest < len(leaves):
            self.open.append("entries after the newest checkpoint")
        kept = (self.folder / "leaves.bin").read_bytes() if (self.folder / "leaves.bin").exists() else b""
        self._note(b"".join(leaves).startswith(kept) and len(kept) >= 32 * min(newest, len(leaves)), "leaves.bin")
        for head in self.heads.values():
            epoch = sum(entry < head.size for entry in self.rotations)
            rotated = epoch > 0 and self.rotations[epoch - 1] == head.size - 1
            self._note(head.epochs == ([epoch - 1, epoch] if rotated else [epoch]), f"signers of {head.size}")
        self._note(all(entry + 1 in self.heads for entry in self.rotations), "a rotation without its checkpoint")

    def _times(self, head: Head, latest: int) -> None:
        members = {key for one in self.agreed.values() for _, key in one.keys.values()}
        times = [time for key, time in head.cosigners.items() if key in members]
        if times:
            middle = median_low(times) * 1000
            self._note(latest <= middle + SKEW, f"checkpoint {head.size} was seen before its entries")

    def _witnesses(self) -> None:
        seen: set[Key] = set()
        covered = 0
        for size in sorted(self.heads, reverse=True):
            seen |= self.heads[size].cosigners.keys()
            agreed = self.in_force[min(size, len(self.in_force)) - 1]
            if agreed is not None and self._quorum(agreed, seen):
                covered = size
                break
        agreed = self.in_force[min(covered, len(self.in_force) - 1)]
        most = agreed.value["audit"]["max_rounds_unwitnessed"] if agreed else 3
        after = {
            (e["run"], e["round"])
            for e in self._of("egress")
            if e["body"]["data_class"] == "masked-vector" and e["seq"] >= covered
        }
        if not covered or len(after) > most:
            self.open.append("not witnessed")
        if any(entry["body"]["head"] not in self.heads for entry in self._of("egress")):
            self.open.append("a checkpoint that travelled with a message is not here")
        if covered and not (self.folder / "cosigned.note").exists():
            self.open.append("no cosigned.note")
        given: dict[str, int] = {}
        for entry in self._of("cosigned"):
            body = entry["body"]
            if body["origin"] != self.origin:
                given[body["origin"]] = max(given.get(body["origin"], 0), body["size"])
            elif body["size"] not in self.heads or body["cosigner"] not in {
                key[0] for key in self.heads[body["size"]].cosigners
            }:
                self.open.append(f"the cosignature of entry {entry['seq']} is not here")
        if not (self.folder / "witness").is_dir():
            self.open.append("no witness folder")
            return
        held = dict(self._held(path) for path in sorted((self.folder / "witness").glob("*.json")))
        self._note(
            all(held.get(origin, 0) >= size for origin, size in given.items()), "a cosigned checkpoint is not held"
        )

    def _quorum(self, agreed: Agreed, seen: set[Key]) -> bool:
        others = {name: keys[1] for name, keys in agreed.keys.items() if keys[0][0] != self.origin}
        sites = [key for name, key in others.items() if name != agreed.hub]
        hub = others.get(agreed.hub)
        return (hub is None or hub in seen) and sum(key in seen for key in sites) >= min(2, len(sites))

    def _held(self, path: Path) -> tuple[str, int]:
        origin = unquote(path.stem)
        value = read_json(path.read_bytes())
        note = Note(value["head"].encode())
        told, size, _ = note.checkpoint
        endorsements = [Note(text.encode()) for text in value["endorsements"]]
        roots = [key[0] for one in self.agreed.values() for key in one.keys.values() if key[0][0] == origin]
        demand(any(is_signed(origin, root, endorsements, note) for root in roots), f"{path.name} is not genuine")
        own = [one.keys[self.name][1] for one in self.agreed.values() if self.name in one.keys]
        demand(told == origin and note.signers(own) and value.keys() == {"endorsements", "head"}, f"{path.name}")
        return origin, size

    # 9. Evidence, annexes, settings

    def _evidence(self) -> None:
        torn = {sha256(path.read_bytes()).hexdigest() for path in (self.folder / "evidence").glob("torn-*")}
        if any(entry["body"]["quarantined"] not in torn for entry in self._of("log.recovered")):
            self.open.append("an incomplete write is not in evidence/")
        for path in sorted((self.folder / "evidence").glob("fork-*.json")):
            try:
                origin = check_fork(
                    path.read_bytes(), [key[0] for one in self.agreed.values() for key in one.keys.values()]
                )
            except (Invalid, KeyError, TypeError):
                continue  # proves nothing about anybody
            self.wrong.append(f"{origin} signed two histories")

    def _annexes(self) -> None:
        erased = [
            range(entry["body"]["first"], min(entry["body"]["last"], entry["seq"]) + 1)
            for entry in self._of("annex.erased")
        ]
        for entry in self.entries:
            path, gone = self.folder / "annex" / f"{entry['seq']}.json", any(entry["seq"] in one for one in erased)
            if entry["annex_commit"] is None:
                continue
            if not path.exists():
                if path.parent.is_dir() and not gone:
                    self.open.append(f"the annex of entry {entry['seq']} is lost")
                continue
            self._note(not gone, f"the annex of entry {entry['seq']} was to be erased")
            value = read_json(path.read_bytes())
            salt = bytes.fromhex(value["salt"])
            commitment = sha256(salt + canonical(value["details"])).hexdigest()
            one_form = salt.hex() == value["salt"] and value.keys() == {"details", "salt"}
            right = one_form and len(salt) == 32 and commitment == entry["annex_commit"]
            self._note(right, f"annex of entry {entry['seq']}")

    def _settings(self) -> None:
        policy, config = self.entries[0]["body"]["policy"], None
        for entry in self._of("agent.start", "config.changed", "policy.changed"):
            body = entry["body"]
            if entry["type"] == "policy.changed":
                self._note(body["old"] == policy, "another policy was replaced")
                policy = body["new"]
            else:
                self._note(config in (None, body.get("old", body.get("config"))), "an unannounced configuration")
                config = body.get("new", body.get("config"))

    # 10. What left

    def _bytes(self) -> None:
        boot, name, total, readings = Boot(0), "", 0, 0
        covered = {"process": 0, "network namespace": 0}
        widest = "process"
        for entry, agreed in zip(self.entries, self.in_force, strict=True):
            kind, body = entry["type"], entry["body"]
            if entry["boot"] != name:
                name, boot = entry["boot"], Boot(entry["mono_ms"])
            if kind == "egress":
                self._message(entry, agreed)
                if body["message"] == "Open":
                    boot.connections += 1
                    boot.lost += min(sum(boot.waiting.values()), 262_144)
                    boot.waiting.clear()
                boot.logged, boot.messages, total = (
                    boot.logged + body["bytes"],
                    boot.messages + 1,
                    total + body["bytes"],
                )
                boot.waiting[body["msg_id"]] = body["bytes"]
            elif kind == "receipt":
                self._note(body["msg_id"] in boot.waiting, f"receipt of entry {entry['seq']}")
                boot.acknowledged += boot.waiting.pop(body["msg_id"], 0)
            elif kind == "net.counter":
                readings += 1
                reach = "process" if body["beside_out"] is None else body["coverage"]
                covered[reach] += boot.logged - boot.read
                widest = max(widest, reach, key=["process", "network namespace"].index)
                if self.role == "site" and boot.coverage not in ("", reach):
                    self.open.append("the count changed its coverage")
                boot.coverage = reach
                boot.read, boot.beside = boot.logged, boot.beside + (body["beside_out"] or 0)
                boot.out, boot.into = boot.out + body["bytes_out"], boot.into + body["bytes_in"]
                boot.opened += body["connections"]
                if self.role == "site":
                    seconds = (entry["mono_ms"] - boot.began) / 1000
                    self._counted(boot, seconds, entry["seq"], beside=body["beside_out"] is not None)
        if self.role == "site" and total and covered[widest] < 0.5 * total:
            self.open.append("too few readings")

    def _counted(self, boot: Boot, seconds: float, seq: int, *, beside: bool) -> None:
        attempts = boot.connections + 8 + seconds / 15
        connections = min(boot.opened, attempts)
        most = boot.logged * 1.003 + boot.into * 0.0003 + 100 * boot.messages + 4096 * connections + 4 * seconds
        least = boot.acknowledged - boot.connections * 262_144
        self._note(least <= boot.out <= most, f"the kernel counted other bytes at entry {seq}")
        if not beside:
            return
        room = 2048 + 1024 * attempts + 4 * seconds + boot.lost + min(sum(boot.waiting.values()), 262_144)
        self._note(boot.beside <= room, f"bytes left beside the connections at entry {seq}")

    def _message(self, entry: Entry, agreed: Agreed | None) -> None:
        body, seq = entry["body"], entry["seq"]
        shape = body["shape"]
        self._note(classes().get(body["message"]) == body["data_class"], f"class of entry {seq}")
        try:
            due = due_bytes(body["message"], self.origin, shape)
        except Invalid as error:
            due = -1
            self.wrong.append(f"length of entry {seq}: {error}")
        self._note(body["bytes"] == body["expected_bytes"] == due and body["head"] <= seq, f"length of entry {seq}")
        if body["data_class"] == "masked-vector":
            even = body["uniformity"] is not None and 1e-9 <= float(body["uniformity"]) <= 1
            self._note(body["masked"] and even, f"entry {seq} is not masked")
        if agreed is None:
            return
        if body["data_class"] == "masked-vector":
            ring = agreed.value["aggregation"]["layout"]["ring_bits"]
            self._note(body["modulus_bits"] == ring, f"another ring in entry {seq}")
        most, free = max(len(one.value["roster"]) for one in self.agreed.values()), body["data_class"] == "checkpoint"
        possible = [shape["cohort"] <= most, free or shape["path"] < most, shape["head_signatures"] <= 2]
        possible += [body["message"] != "Head" or shape["epochs"] <= entry["epoch"] + 2]
        self._note(all(possible), f"numbers that entry {seq} cannot have")
        self._note(shape["named"] is None or shape["named"] in agreed.names, f"entry {seq} names a stranger")
        self._note(shape["vector_bytes"] == agreed.vector_bytes, f"length of the vector of entry {seq}")
        self._note(body["destination"] in agreed.value["coordinator"]["tls_keys"], f"destination of entry {seq}")
        if body["data_class"] not in ("control", "checkpoint"):
            first, last = agreed.windows.get(self.name, NEVER)
            self._note(first - SKEW <= entry["ts"] <= last + SKEW, f"certificate at entry {seq}")

    # Rules and steps of section 8

    def _rules(self) -> None:
        isolated: Entry | None = None
        for entry, agreed in zip(self.entries, self.in_force, strict=True):
            kind, body = entry["type"], entry["body"]
            isolated = body if kind == "trainer.isolated" else None if kind == "agent.start" else isolated
            self._note(kind != "train.done" or isolated, f"entry {entry['seq']}: not isolated")
            if agreed is None:
                continue
            if kind == "train.done" and isolated and is_open(isolated):
                self._note(agreed.value["training"]["isolation"] == "best", f"entry {entry['seq']}: not isolated now")
            for what in broken(entry, agreed):
                self.wrong.append(f"entry {entry['seq']}: {what}")
            if kind == "aggregate.published":
                first, last = agreed.windows.get(self.name, NEVER)
                self._note(first - SKEW <= entry["ts"] <= last + SKEW, f"certificate at entry {entry['seq']}")
            if kind == "ingress" and agreed.windows:
                first, last = agreed.windows.get(body["sender"], (1, 0))
                dated = first - SKEW <= entry["ts"] <= last + SKEW
                self._note(body["message"] in classes(), f"entry {entry['seq']}: what no site sends")
                free = classes().get(body["message"]) in ("control", "checkpoint")
                self._note(body["sender"] in agreed.windows and (dated or free), f"sender of entry {entry['seq']}")

    def _rounds(self) -> None:
        for fault in round_faults(self.entries, self.in_force, self.role):
            self.wrong.append(fault)


def main() -> int:
    root = x509.load_pem_x509_certificate(Path(sys.argv[2]).read_bytes()) if len(sys.argv) > 2 else None
    found = Verifier(Path(sys.argv[1]), root)
    for line in found.wrong:
        print(f"FAIL  {line}")
    for line in found.open:
        print(f"????  {line}")
    print({0: "clean", 1: "findings", 3: "cannot decide"}[found.verdict])
    return found.verdict


if __name__ == "__main__":
    sys.exit(main())
