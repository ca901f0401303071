"""What a party was shown of another's log, against that log: heads that came with messages, and receipts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from security.audit.collect import Findings
from security.audit.facts import History, Record
from security.audit.store import LogFolder
from security.merkle import Tree, leaf_hash


def tree_of(path: Path) -> Tree:
    """The tree over a log's lines, whatever they say."""
    tree = Tree()
    for file in sorted(LogFolder(path).segments.glob("*.jsonl")):
        with file.open("rb") as lines:
            tree.extend(leaf_hash(raw.removesuffix(b"\n")) for raw in lines)
    return tree


def join_seen(histories: Iterable[History], trees: Mapping[str, Tree], joint: Findings) -> None:
    """Every message carries its sender's newest head, and the receiver wrote it down.

    Only the heads that witnesses hold are proof against somebody; this is one party's word. But it costs nothing to
    ask, and whoever shows a head to one party only contradicts itself here.
    """
    for history in histories:
        for record in history.of("checkpoint.seen"):
            origin, size, root = (record.body[name] for name in ("origin", "size", "root"))
            tree = trees.get(origin)
            if tree is not None and (size > tree.size or tree.root(size).hex() != root):
                detail = f"{history.name} entry {record.seq}: a head of {size} entries of {origin}"
                joint.add("HeadContradicted", detail, record.seq)


def join_receipts(sites: Iterable[History], hub: History, tree: Tree, joint: Findings) -> int:
    """Check every receipt that the sites kept; returns how many fit.

    A receipt binds the coordinator to one history of its own log: a head that it showed to one site only, or an entry
    that it moved or dropped later, does not lead to the same root.
    """
    arrived = {record.seq: record for record in hub.of("ingress")}
    roots: dict[int, str] = {}
    fitting = 0
    for site in sites:
        for receipt in site.of("receipt"):
            fault = _fault(site.name, receipt, arrived.get(receipt.body["ingress"]), tree, roots)
            if fault is None:
                fitting += 1
            else:
                joint.add("ReceiptInvalid", f"{site.name} entry {receipt.seq}: {fault}", receipt.seq)
    return fitting


def _fault(name: str, receipt: Record, entry: Record | None, tree: Tree, roots: dict[int, str]) -> str | None:
    body = receipt.body
    if entry is None or (entry.body["sender"], entry.body["msg_id"]) != (name, body["msg_id"]):
        return f"the coordinator's entry {body['ingress']} is not that message"
    size = body["head_size"]
    if not entry.seq < size <= tree.size:
        return f"the head shown has {size} entries, which does not cover entry {entry.seq}"
    if body["head_root"] != roots.setdefault(size, tree.root(size).hex()):
        return f"the head of {size} entries that was shown is not one of this log"
    path = tree.inclusion_path(entry.seq, size)
    if body["proof"] != (sha256(b"".join(path)).hexdigest() if path else None):
        return "the proof that was shown is another one"
    return None
