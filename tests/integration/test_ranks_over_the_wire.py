"""One hospital of a federation trains with two ranks under torchrun; the sums are those of one process.

Long: two federations with real processes, one after the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from coordinator.export import export_model
from scripts.local_federation.federation import free_port, wait_until
from security.log.reader import LogReader
from tests.support.isolated import ROOT
from tests.support.learning_federation import LearningFederation

ROUNDS = 2
SPREAD = "vidir-modern"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def torchrun(federation: LearningFederation, output: Path) -> subprocess.Popen[bytes]:
    """The shipped agent, as docs/site-agent.md starts it."""
    words = ["--nproc-per-node=2", "--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    config = federation.folders.site(SPREAD) / "site.toml"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words, "-m", "site_agent", "--config", str(config)],
        stdout=output.open("wb"), stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def published(
    folder: Path, *, ranks: bool, seeds: LearningFederation | None = None
) -> tuple[dict[str, NDArray[Any]], LearningFederation]:
    """The model after two rounds.

    :param seeds: a federation whose hospitals' seeds of training, which depend on a key of theirs, are taken.
    """
    federation = LearningFederation(folder, rounds=ROUNDS, images=48)
    for name in federation.sites if seeds is not None else ():
        key = Path("identity", "keys", "data.key")
        shutil.copyfile(seeds.folders.site(name) / key, federation.folders.site(name) / key)
    output = folder / "torchrun.log"
    begun: subprocess.Popen[bytes] | None = None
    try:
        for party in federation.parties:
            if not (ranks and party.name == SPREAD):
                party.start()
        if ranks:
            begun = torchrun(federation, output)
        wait_until(lambda: federation.published >= ROUNDS, "two rounds", seconds=900, output=output if ranks else None)
    finally:
        if begun is not None:
            begun.terminate()
            begun.wait(60)
        federation.stop()
    export_model(federation.folders.coordinator / "coordinator.toml", folder / "model.safetensors", None)
    return load_file(folder / "model.safetensors"), federation


def test_two_ranks_at_one_hospital_give_the_sums_of_one_process(tmp_path: Path) -> None:
    alone, first = published(tmp_path / "alone", ranks=False)
    spread, federation = published(tmp_path / "spread", ranks=True, seeds=first)
    begun = load_file(first.folders.initial)
    names = [name for name in alone if name in begun and alone[name].dtype == np.float32]
    moved, apart = (
        np.sqrt(sum(float(((alone[name] - other[name]) ** 2).sum()) for name in names)) for other in (begun, spread)
    )
    print(f"moved {moved:.4f}, apart {apart:.6f}: {apart / moved:.3%}")
    assert 0 < apart < 0.01 * moved
    # The exception from isolation is in the log: there was a network, and no key could be read.
    log = federation.folders.site(SPREAD) / "state" / "log"
    told = [record.body for record in LogReader(log).records("trainer.isolated")]
    assert told and all(body["ranks"] and body["connection"] and not body["keys"] for body in told)
