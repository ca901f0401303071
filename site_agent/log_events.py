"""What a site writes into its privacy log about its own work, beside the steps of an aggregation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from lazaret.errors import RemoteProtocolError
from lazaret.terminal import as_range
from security.identity.manifest import Manifest
from security.log import events as ev
from security.log.schema import MAX_COUNT
from security.secagg import relay
from security.secagg.effects import Log
from security.secagg.relay import SignedHead
from site_agent.config import STATED, DataTable
from site_agent.contribution import LocalResult
from site_agent.trainer.channel import DataReady, IsolationReport
from site_agent.trainer.isolation import IsolationMode

# How many classes are named, and how much of each name: an entry has no more than 500 letters.
_NAMED: Final = 4
_LETTERS: Final = 80
NOT_STATED: Final = "not stated"


def receipt(message: relay.Receipt, head: SignedHead | None, site: str, connection: int) -> Log:
    if head is None:
        raise RemoteProtocolError("a receipt comes with the checkpoint that covers it", where="receipt")
    if max(message.entry, head.size) > MAX_COUNT:  # false data must not end our log
        raise RemoteProtocolError("an impossible receipt", where="receipt")
    event = ev.ReceiptReceived(
        msg_id=relay.message_id(site, connection, message.sequence, from_site=True),
        head_size=head.size,
        head_root=head.root.hex(),
        ingress=message.entry,
        proof=hashlib.sha256(b"".join(message.path)).hexdigest() if message.path else None,
    )
    return Log(event)


def model_received(manifest: Manifest, number: int, state_hash: bytes, sender: str) -> Log:
    layout = manifest.aggregation.layout
    event = ev.ModelReceived(
        model=state_hash.hex(), bytes=4 * layout.state_words, layout=layout.layout_hash.hex(), sender=sender
    )
    return Log(event, number)


def run_stopped(word: relay.RunStop) -> Log:
    return Log(ev.RunStopped(statement=hashlib.sha256(word.to_bytes()).hexdigest()))


def train_done(manifest: Manifest, number: int, result: LocalResult, *, slot_ms: int) -> Log:
    """:param slot_ms: when READY is due, after the order. Under differential privacy it stands for the duration of
    training, which tells how many images there are.
    """
    artefacts: tuple[dict[str, Any], ...] = tuple(
        {"disposition": "local-only", "elements": elements, "hmac": keyed.hex(), "kind": kind}
        for kind, elements, keyed in result.artefacts
    )
    wall_ms = result.wall_ms if manifest.privacy is None else slot_ms
    event = ev.TrainDone(method=manifest.training.method, steps=result.steps, wall_ms=wall_ms, artefacts=artefacts)
    return Log(event, number)


def trained_before(manifest: Manifest, number: int, *, steps: int) -> Log:
    """Of a round whose agent ended before it could say so: what was made, and how long it took, is not known."""
    return Log(ev.TrainDone(method=manifest.training.method, steps=steps, wall_ms=0, artefacts=()), number)


def plugin_loaded(sha256: str) -> ev.PluginLoaded:
    return ev.PluginLoaded(plugin=sha256)


def trainer_isolated(asked: IsolationMode, report: IsolationReport) -> ev.TrainerIsolated:
    return ev.TrainerIsolated(
        asked=asked,
        network_namespace=report.network_namespace,
        seccomp=report.seccomp,
        landlock=report.landlock,
        connection=report.connection_possible,
        keys=report.keys_readable,
        ranks=bool(report.exception),
    )


def data_opened(table: DataTable, fingerprint: str, change: str, *, private: bool) -> ev.DataOpened:
    """:param change: what `data_change` said; under differential privacy it stays with the hospital."""
    stated = {name: getattr(table, name) or NOT_STATED for name in STATED}
    return ev.DataOpened(fingerprint=fingerprint, change=f"version {table.version}" if private else change, **stated)


def data_annex(ready: DataReady) -> dict[str, str]:
    """How many subjects and images there are, as ranges: what the site's own auditor may see, and may be erased."""
    sides = {side: sum(row) for side, row in ready.counts.items()} if ready.images is None else ready.images
    images = sum(sides.values())
    return {"images": as_range(images), "subjects": as_range(ready.subjects)}


def data_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What changed in the data between two starts, with counts as ranges: both are what `data.json` holds."""
    held, was = (notes.get("images", {}).get("train", sum(notes.get("train", ()))) for notes in (now, before))
    if not before:
        return f"opened for the first time: {as_range(held)} training images"
    if before.get("fingerprint") == now.get("fingerprint"):
        return f"unchanged: {as_range(held)} training images"
    counts = dict(zip(now.get("names", ()), now.get("train", ()), strict=False))
    earlier = zip(before.get("names", ()), before.get("train", ()), strict=False)
    gone = [name for name, count in earlier if count and not counts.get(name)]
    sentence = f"a new version: {as_range(held)} training images, {as_range(was)} before"
    named = ", ".join(name[:_LETTERS] for name in gone[:_NAMED])
    more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
    return sentence + (f"; no image any more of {named}{more}" if gone else "")
