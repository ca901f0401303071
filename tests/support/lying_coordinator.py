"""A coordinator on the network that lies to one site when it is told to, with its own good signatures; and a site that
does without one of its checks, for the twins.

The order to lie is a file with one word. The lie goes out before the honest message it is made from, or in its place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from coordinator.config import CoordinatorConfig
from coordinator.send_queue import Stream
from coordinator.service import Service, run_until_stopped
from lazaret.terminal import run_command
from scripts.local_federation.party import cli, log_to_stderr
from security.secagg import messages, published, statements
from security.secagg.context import RoundContext
from security.secagg.fields import Wire
from security.secagg.statements import Signer

VICTIM: Final = "site0"
CHOSEN: Final = bytes([9]) * 32


def plan_of(signer: Signer, plan: messages.Plan, **changes: Any) -> messages.Plan:
    context: RoundContext = replace(plan.context, **changes)
    return replace(plan, context=context, signature=signer.sign(statements.plan(context)))


def two_views(_: Signer, message: messages.Survivors) -> Wire:
    """A4: one site is said to have dropped out, so that its mask key may be asked for."""
    return replace(message, uploads=message.uploads[:-1])


def retry_without_one(signer: Signer, message: messages.Result) -> Wire:
    """A7: the attempt has a sum, yet is said to have failed; the next one leaves a site out."""
    context = message.context
    members = tuple(member for member in context.members if member.site != "site3")
    sizes = {"n": 3, "t": 3, "a": 2}
    plan = messages.Plan(context=context, check=None, aborts=(), repeats=(), signature=bytes(64))
    return plan_of(signer, plan, attempt=context.attempt + 1, members=members, **sizes)


def other_model(signer: Signer, message: messages.Plan) -> Wire:
    """A8: the victim alone is planned with another model."""
    return plan_of(signer, message, state_hash=bytes([7]) * 32)


def chosen_model(signer: Signer, message: messages.Result) -> Wire:
    """A9: the next model is one that the coordinator chose, not the one that the sum gives."""
    unsigned = replace(message, state_hash=CHOSEN)
    _, _, digest = published.result_digests(unsigned)
    return replace(unsigned, signature=signer.sign(statements.result(digest)))


def flipped_sum(_: Signer, message: messages.SumFrame) -> Wire:
    """A11: one bit of one value of the sum."""
    return replace(message, data=bytes([message.data[0] ^ 1]) + message.data[1:])


def one_acknowledgement_twice(_: Signer, message: messages.ResultCertificate) -> Wire:
    """A11: one site's acknowledgement in the place of those of c + 1 sites."""
    assert message.check is not None
    fullest = max(message.check.acks, key=lambda ack: int.from_bytes(ack.bitmap, "little").bit_count())
    return replace(message, check=replace(message.check, acks=(fullest,) * len(message.check.acks)))


def burnt_number(signer: Signer, message: messages.Plan) -> Wire:
    """A25: a round number so high that no later one would be left."""
    return plan_of(signer, message, round=2**60)


LIES: Final[dict[str, tuple[type[Wire], Callable[[Signer, Any], Wire]]]] = {
    "A4": (messages.Survivors, two_views),
    "A7": (messages.Result, retry_without_one),
    "A8": (messages.Plan, other_model),
    "A9": (messages.Result, chosen_model),
    "A11": (messages.SumFrame, flipped_sum),
    "A11-twice": (messages.ResultCertificate, one_acknowledgement_twice),
    "A25": (messages.Plan, burnt_number),
}
AGAIN: Final = "A11-again"  # the pieces of a chunk are held back, and the result is shown again, this many times:
TIMES: Final = 12


INSTEAD: Final = ("A9", "A11")


class LyingService(Service):
    """Tells the truth to everybody but the victim."""

    _false_result: bytes | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shown: list[Wire] = []

    async def _show_again(self, stream: Stream, piece: messages.ChunkPiece, context: Any, order: Path) -> None:
        """Once for each chunk that is asked for: its first piece is followed by the others, which are held back too."""
        with (order.parent / "asked").open("a") as asked:
            asked.write(f"{piece.result.hex()} {piece.chunk} {piece.site}\n")
        lines = (order.parent / "asked").read_text().splitlines()
        survivors = len(self._shown[0].uploads)  # type: ignore[attr-defined]
        if len(lines) % survivors:
            return
        if len(lines) == TIMES * survivors:
            order.unlink()
        for message in list(self._shown):
            await super().deliver(stream, message, context)

    async def deliver(self, stream: Stream, message: Wire, context: Any) -> None:
        order = self.shell.storage.folder.parent / "lie"
        name = order.read_text() if stream.site == VICTIM and order.exists() else ""
        if stream.site == VICTIM and isinstance(message, messages.Result | messages.SumFrame):
            self._shown = [message] if isinstance(message, messages.Result) else [*self._shown, message]
        if name == AGAIN:
            if isinstance(message, messages.ChunkPiece):
                await self._show_again(stream, message, context, order)
                return
        elif name and isinstance(message, LIES[name][0]):
            lie = LIES[name][1](self.shell.engine.core.signer, message)
            self._false_result = published.result_digests(lie)[2] if name == "A9" else None
            order.unlink()
            await super().deliver(stream, lie, context)
            if name in INSTEAD:
                return
        if self._false_result and stream.site == VICTIM and isinstance(message, messages.SumFrame):
            # The sum belongs to the result that was shown; its last frame is the end of this lie.
            message = replace(message, result=self._false_result)
            last = message.index == self.shell.engine.core.policy.layout.sum_order[-1]
            self._false_result = None if last else self._false_result
        await super().deliver(stream, message, context)


@cli.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True)
def liar(path: Path) -> None:
    """The coordinator that lies."""
    log_to_stderr()
    run_until_stopped(*CoordinatorConfig.read(path), service_type=LyingService)


@cli.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True)
@click.option("--without", required=True, help="module.check that this site does not make.")
@click.pass_context
def careless(context: click.Context, path: Path, without: str) -> None:
    """A site without one of its checks: the twin of the attacks."""
    module, _, name = without.rpartition(".")
    setattr(importlib.import_module(f"security.secagg.{module}"), name, lambda *_, **__: None)
    site = cli.get_command(context, "site")
    assert site is not None
    context.invoke(site, path=path, numbers=True)


if __name__ == "__main__":
    run_command(cli, "party")
