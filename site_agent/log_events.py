"""What a site writes into its privacy log about its own work, beside the steps of an aggregation."""

from __future__ import annotations

import hashlib
from typing import Any

from lazaret.errors import RemoteProtocolError
from security.identity.manifest import Manifest
from security.log import events as ev
from security.secagg import relay
from security.secagg.effects import Log
from security.secagg.relay import SignedHead
from site_agent.config import DataTable
from site_agent.contribution import LocalResult
from site_agent.trainer.channel import IsolationReport
from site_agent.trainer.isolation import IsolationMode


def receipt(message: relay.Receipt, head: SignedHead | None, site: str, connection: int) -> Log:
    if head is None:
        raise RemoteProtocolError("a receipt comes with the checkpoint that covers it", where="receipt")
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


def train_done(manifest: Manifest, number: int, result: LocalResult) -> Log:
    artefacts: tuple[dict[str, Any], ...] = tuple(
        {"disposition": "local-only", "elements": elements, "hmac": keyed.hex(), "kind": kind}
        for kind, elements, keyed in result.artefacts
    )
    event = ev.TrainDone(
        method=manifest.training.method, steps=result.steps, wall_ms=result.wall_ms, artefacts=artefacts
    )
    return Log(event, number)


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


def data_opened(table: DataTable, fingerprint: str) -> ev.DataOpened:
    return ev.DataOpened(
        fingerprint=fingerprint, purpose=table.purpose, legal_basis=table.legal_basis or "not stated"
    )
