"""How close the secure sum comes to the least it could cost: ``python -m benchmarks.secagg --sites 10 --json``.

Both machines are the real ones, the coordinator in a process of its own; between them are the bytes of the network.
Times are CPU times; the floor, one key stream and one addition for each mask, is timed in the same processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

from benchmarks import secagg_coordinator as child
from benchmarks.secagg_parts import WEIGHT_CAP, Federation, Floor, Stopwatch, warm_memory
from protos.stream_end import StreamEnd
from security.clock import SystemClock
from security.crypto import encoding, masking, prg
from security.crypto.prg import Words
from security.identity.membership import BareMandate
from security.log import egress
from security.rng import SystemRandomness
from security.secagg import messages
from security.secagg.effects import Advanced, Effects, Send, SendUpload
from security.secagg.fixed_point import encode
from security.secagg.site.attempt import OpenAttempt, PendingUpdate, SiteCore
from security.secagg.site.journal import Journal
from security.secagg.site.machine import SiteMachine
from security.secrets import Secret

BASES = 4  # so many different updates; a hundred would not fit into one process
FLOWER = "flwr==1.41.0"
# Parts of a site that come after the aggregation: taking the result, and checking its part of the sum.
_PARTS = {messages.Result: "result", messages.SumFrame: "result", messages.ChunkPiece: "check"}
MIB = 2**20


class Coordinator:
    """The other process."""

    def __init__(self, federation: Federation, workers: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", child.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        report = {"seed": federation.seed.hex(), "sites": federation.sites, "params": federation.params}
        self._send(encoding.tlv(json.dumps(report | {"workers": workers}).encode()))

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    @property
    def _answers(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, operation: int, site: str = "", message: bytes = b"") -> list[tuple[str, bytes]]:
        self._send(bytes([operation]) + encoding.text(site) + encoding.tlv(message))
        out = []
        while child.read_exactly(self._answers, 1) == b"\1":
            out.append((child.read_tlv(self._answers).decode(), child.read_tlv(self._answers)))
        return out

    def report(self) -> dict[str, float]:
        self._send(bytes([child.REPORT]) + encoding.text("") + encoding.tlv(b""))
        report = json.loads(child.read_tlv(self._answers))
        self._process.communicate(timeout=60)
        return cast("dict[str, float]", report)


class Sites:
    """All sites, in this process, and what they say of each aggregation.

    :param dropped: these fall silent before they upload.
    """

    def __init__(self, federation: Federation, workers: int, dropped: set[str]) -> None:
        warm_memory(BASES + 4, federation.layout.byte_length)
        self.federation = federation
        self.dropped = dropped
        self.streams = {name: StreamEnd.of_site(federation.log_head(name)) for name in federation.names}
        self.watch = Stopwatch()
        self.floor = Floor(federation.layout.words, federation.layout.dtype)
        self.updates = [self._update(number) for number in range(BASES)]
        self.machines = {name: self._machine(name, workers) for name in federation.names}
        self.sent = dict.fromkeys(federation.names, 0)
        self.keys = dict.fromkeys(federation.names, 0)  # adverts and share lists: they grow with the cohort
        self.accepted: dict[str, Words] = {}
        self.masked = b""
        self.watch.watch(OpenAttempt, "mask")
        self.watch.watch(masking, "vector_root")

    def _update(self, number: int) -> Words:
        """An encoded update of small numbers from a key stream; encoded more often than needed, to have warm memory."""
        layout = self.federation.layout
        stream = prg.keystream(Secret(bytes([number] * 32)), 2 * layout.state_words)
        update = np.frombuffer(stream, dtype="<i2").astype(np.float32) * np.float32(2**-20)
        for _ in range(5):
            with self.watch.time("encode"):
                words = encode(layout, update, weight=WEIGHT_CAP - number, loss=2.5 * number, hits=number).words
        return words

    def _machine(self, name: str, workers: int) -> SiteMachine:
        federation = self.federation
        randomness = SystemRandomness()
        core = SiteCore(
            mandate=BareMandate(federation.policy, federation.signer(name)),
            journal=Journal(),
            storage_key=Secret(randomness.bytes(32)),
            randomness=randomness,
            clock=SystemClock(),
            workers=workers,
        )
        machine = SiteMachine(core, federation.model())
        machine.start()
        pending = PendingUpdate(
            round=1,
            state_hash=federation.policy.initial_state_hash,
            config_hash=federation.config_hash,
            words=self.words_of(name),
        )
        machine.load_update(pending)
        return machine

    def words_of(self, name: str) -> Words:
        return self.updates[self.federation.names.index(name) % BASES]

    def receive(self, name: str, data: bytes) -> Iterator[bytes]:
        """Give a message to a site; its answers as bytes."""
        machine = self.machines[name]
        with self.watch.time("decode"):
            message = self.streams[name].decode(data)
        if name in self.dropped and isinstance(message, messages.Deliver | messages.Survivors):
            return
        part = _PARTS.get(type(message), "receive")
        with self.watch.time(part):
            effects = machine.receive(message)
        for answer in self._carry_out(name, effects, "to bytes" if part == "receive" else "check"):
            count = self.keys if isinstance(message, messages.Plan | messages.Adverts) else self.sent
            count[name] += len(answer) * (part == "receive")
            yield answer
        if any(isinstance(effect, SendUpload) for effect in effects):
            self.floor.measure()

    def _carry_out(self, name: str, effects: Effects, part: str) -> Iterator[bytes]:
        for effect in effects:
            if isinstance(effect, Send):
                with self.watch.time(part):
                    data = self.streams[name].encode(effect.message)
                yield data
            elif isinstance(effect, SendUpload):
                self.masked = self.masked or effect.vector.tobytes()
                yield from self._frames(name, effect)
                self._forget(name)
            elif isinstance(effect, Advanced):
                self.accepted[name] = effect.total

    def _forget(self, name: str) -> None:
        """Drop a vector that was sent: a hundred sites share the memory of this process."""
        machine = self.machines[name]
        machine._answers.clear()
        if machine.aggregation.attempt is not None:
            machine.aggregation.attempt.vector = None

    def _frames(self, name: str, upload: SendUpload) -> Iterator[bytes]:
        frames = upload.frames()
        while True:
            with self.watch.time("to bytes"):
                frame = next(frames, None)
                data = self.streams[name].encode(frame) if frame is not None else b""
            if frame is None:
                return
            yield data


def aggregate(sites: Sites, coordinator: Coordinator) -> None:
    """Carry messages until nobody has anything to say."""
    waiting = coordinator.ask(child.START)
    while waiting:
        name, data = waiting.pop(0)
        for answer in sites.receive(name, data):
            waiting += coordinator.ask(child.RECEIVE, name, answer)
        if not waiting and sites.dropped and not sites.accepted:
            waiting = coordinator.ask(child.CLOSE)


def measure(sites: int, params: int, dropouts: int, workers: int) -> dict[str, Any]:
    """Run one round and compare every part with its floor."""
    federation = Federation(SystemRandomness().bytes(32), sites, params)
    coordinator = Coordinator(federation, workers)
    dropped = set(federation.names[:dropouts])
    parties = Sites(federation, workers, dropped)
    aggregate(parties, coordinator)
    report = coordinator.report()
    alive = [name for name in federation.names if name not in dropped]
    expected = sum((parties.words_of(name) for name in alive), np.zeros_like(parties.updates[0]))
    exact = len(parties.accepted) == child.LISTENERS and all(
        (total == expected).all() for total in parties.accepted.values()
    )
    watch, floor, vector = parties.watch, parties.floor, federation.layout.byte_length
    # Hashing the upload is inside `mask` and printed apart.
    mask = watch.median("mask") - watch.median("vector_root")
    streams = len(alive) * (1 + dropouts)
    stream = report["keystream_ms"] + report["one_add_ms"]
    unmask = report["unmask_ms"] + report["add_ms"]
    bytes_up = max(parties.sent[name] for name in alive)
    site_floor = sites * (floor.keystream + floor.add)
    return {
        "sites": sites,
        "params": params,
        "dropouts": dropouts,
        "workers": workers,
        "exact": exact and report["verdict"] == 0,
        "site_mask_over_floor": (watch.median("encode") + mask) / site_floor,
        "coordinator_unmask_over_floor": unmask / (streams * stream + len(alive) * report["one_add_ms"]),
        "upload_bytes_over_vector": bytes_up / vector,
        "coordinator_peak_over_vector": (report["peak_bytes"] - 64 * MIB) / federation.layout.memory_bytes,
        "coordinator_peak_mib": report["peak_bytes"] / MIB,
        "coordinator_baseline_mib": report["baseline_bytes"] / MIB,
        "vector_bytes": vector,
        "upload_bytes": bytes_up,
        "keys_bytes_per_site": max(parties.keys.values()),
        "site_encode_ms": 1e3 * watch.median("encode"),
        "site_mask_ms": 1e3 * mask,
        "site_merkle_ms": 1e3 * watch.median("vector_root"),
        "site_codec_ms": 1e3 * watch.total("to bytes") / sites,
        "site_burst_ms": 1e3 * watch.total("receive", "to bytes") / sites,
        "site_check_ms": 1e3 * watch.total("check") / child.LISTENERS,
        "coordinator_unmask_ms": report["unmask_ms"],
        "coordinator_add_ms": report["add_ms"],
        "coordinator_merkle_ms": report["merkle_ms"],
        "coordinator_spool_ms": report["spool_ms"],
        "coordinator_next_state_ms": report["next_state_ms"],
        "coordinator_codec_ms": report["decode_ms"],
        "coordinator_burst_ms": report["whole_ms"],
        "floor_keystream_ms": 1e3 * floor.keystream,
        "floor_add_ms": 1e3 * floor.add,
        **_uniformity(parties),
    }


def _uniformity(parties: Sites) -> dict[str, float]:
    plain = egress.p_value(parties.updates[0].tobytes())  # first: it also loads what the test needs
    watch = Stopwatch()
    with watch.time("check"):
        masked = egress.p_value(parties.masked)
    return {"uniformity_ms": 1e3 * watch.total("check"), "masked_p_value": masked, "unmasked_p_value": plain}


def flower_python() -> Path:
    """An environment of its own in the user's cache: Flower's pins conflict with ours."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "lazaret" / FLOWER.replace("==", "-")
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        click.echo(f"making an environment with {FLOWER} in {home}", err=True)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", FLOWER], check=True, stdout=sys.stderr)
        (home / "ready").touch()
    return python


def flower(ours: dict[str, Any]) -> dict[str, float]:
    """Flower's SecAgg+ on a vector of the same length; only the vector and timings cross."""
    python = flower_python()
    script = Path(__file__).with_name("secagg_flower.py")
    threshold = Federation(bytes(32), ours["sites"], 1000).policy.thresholds(ours["sites"]).t
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vector.npy"
        stream = prg.keystream(Secret(bytes(32)), 2 * ours["params"])
        np.save(path, np.frombuffer(stream, dtype="<i2").astype(np.float32) * np.float32(2**-20))
        numbers = (str(ours["sites"]), str(ours["dropouts"]), str(threshold))
        command: list[str | Path] = [python, script, path, *numbers]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=folder).stdout)
    # Like for like is what Flower's functions do as well: quantise, mask, add up, unmask, scale back. Whole is with
    # signatures and their checks too, which it has none of; hashing and spooling are printed apart.
    like = ours["site_encode_ms"] + ours["site_mask_ms"]
    whole = ours["site_encode_ms"] + ours["site_burst_ms"] - ours["site_merkle_ms"]
    parts = ("coordinator_add_ms", "coordinator_unmask_ms", "coordinator_next_state_ms")
    sum_like = sum(ours[part] for part in parts)
    sum_whole = ours["coordinator_burst_ms"] - ours["coordinator_merkle_ms"] - ours["coordinator_spool_ms"]
    return {
        "flower_site_ms": report["site_cpu_ms"],
        "flower_coordinator_ms": report["coordinator_cpu_ms"],
        "flower_site_cpu_over_ours": report["site_cpu_ms"] / like,
        "flower_coordinator_cpu_over_ours": report["coordinator_cpu_ms"] / sum_like,
        "flower_upload_over_ours": report["upload_bytes"] / ours["upload_bytes"],
        "flower_site_cpu_over_our_whole_burst": report["site_cpu_ms"] / whole,
        "flower_coordinator_cpu_over_our_whole_burst": report["coordinator_cpu_ms"] / sum_whole,
    }


@click.command(help=__doc__)
@click.option("--sites", default=10, show_default=True, type=click.IntRange(3, 255))
@click.option("--params", default=4_007_548, show_default=True, type=click.IntRange(1000))
@click.option("--dropouts", default=0, show_default=True, type=click.IntRange(0))
@click.option("--workers", default=1, show_default=True, help="threads for key streams", type=click.IntRange(1))
@click.option("--peer", type=click.Choice(["flower"]), help="run another toolkit on the same vector and compare")
@click.option("--json", "as_json", is_flag=True, help="one object on stdout")
def main(sites: int, params: int, dropouts: int, workers: int, peer: str | None, as_json: bool) -> None:
    figures = measure(sites, params, dropouts, workers)
    if peer == "flower":
        figures |= flower(figures)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        for name, value in figures.items():
            click.echo(f"{name:34} {value:.4g}" if isinstance(value, float) else f"{name:34} {value}")
    sys.exit(0 if figures["exact"] else 1)


if __name__ == "__main__":
    main()
