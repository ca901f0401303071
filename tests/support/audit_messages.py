"""What an agent writes about messages that leave, and what a kernel would count for them."""

from __future__ import annotations

from security.log import events as ev
from security.log.egress import due_bytes, permitted, recorded_shape
from security.secagg.registry import Shape
from tests.support.audit_attacks import Lonely

PROTOTYPES = 8 * 1280 * 4  # eight classes' prototypes of a small network, as floats
VECTOR = 16_000_000


class Site:
    """Writes what an agent writes about a message, and what a kernel would count for it."""

    def __init__(self, lonely: Lonely) -> None:
        self.log, self.clock = lonely.log, lonely.clock
        self.sent = self.number = 0

    def send(self, message: str, *, receipt: bool = True, frames: int = 1) -> None:
        self.number += 1
        shape = Shape(
            federation="lesions", site="graz", cohort=("graz", "linz", "vienna"), vector_bytes=VECTOR, frames=frames
        )
        due = due_bytes(message, shape.origin, recorded_shape(shape))
        assert due is not None
        vector, msg_id = message == "UploadFrame", f"{self.number:032x}"
        event = ev.Egress(
            msg_id=msg_id,
            message=message,
            data_class=permitted()[message],
            bytes=due,
            sha256="ab" * 32,
            expected_bytes=due,
            shape=recorded_shape(shape),
            masked=vector,
            modulus_bits=32 if vector else None,
            uniformity="0.5" if vector else None,
            destination="cd" * 32,
            head=1,
        )
        self.log.append(event, run="r", round=1)
        self.sent += due
        if receipt:
            self.log.append(ev.ReceiptReceived(msg_id=msg_id, head_size=1, head_root="ef" * 32, ingress=1, proof=None))

    def round(self) -> None:
        for message in ("Open", "Ready", "Advert", "Shares", "UploadHeader"):
            self.send(message)
        self.send("UploadFrame", frames=-(-VECTOR // (256 * 1024)))
        for message in ("Agree", "Unmask"):
            self.send(message)
        self.clock.advance(60_000)

    def read(self, *, smuggled: int = 0, lost: int = 0, opened: int = 1, beside: int | None = None) -> None:
        """The figures of gRPC over TLS, as measured."""
        out = int(self.sent * 1.0022) + 60 * self.number + 2700 + smuggled - lost
        coverage = "process" if beside is None else "network namespace"
        figures = {"connections": opened, "bytes_out": max(0, out), "bytes_in": VECTOR}
        self.log.append(ev.NetCounter(source="kernel", coverage=coverage, beside_out=beside, **figures))
        self.log.checkpoint()
