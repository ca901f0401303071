"""Flower's SecAgg+ on the same vector, for `bench --peer flower`.

Runs in an environment of its own, as a child process: it imports Flower and nothing of ours. It drives Flower's own
workflow and client functions in one process, hands messages over in memory, and prints CPU times and sizes as JSON.

Usage: python secagg_flower.py VECTOR.npy SITES DROPOUTS THRESHOLD
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.client.mod.secure_aggregation import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.supercore.task_identity import TaskIdentity

CLIP = 1.0
EXAMPLES = 1000


def content_bytes(record: ConfigRecord) -> int:
    """What a reply says, without the framing around it."""
    values = [value for field in record.values() for value in (field if isinstance(field, list) else [field])]
    return sum(len(value) if isinstance(value, bytes) else 8 for value in values)


class Grid:
    """Hands each message to its client's mod; some clients never answer with their vector."""

    def __init__(self, vector: np.ndarray[Any, Any], sites: int, dropped: set[int]) -> None:
        self.vector = vector
        self.dropped = dropped
        self.contexts = {site: SimpleNamespace(state=RecordDict()) for site in range(1, sites + 1)}
        self.cpu = dict.fromkeys(self.contexts, 0.0)
        self.uploads = dict.fromkeys(self.contexts, 0)
        self.outside = 0.0

    def _train(self, message: Message, _: Any) -> Message:
        result = FitRes(
            status=Status(Code.OK, ""),
            parameters=ndarrays_to_parameters([self.vector]),
            num_examples=EXAMPLES,
            metrics={},
        )
        return Message(compat.fitres_to_recorddict(result, keep_input=True), reply_to=message)

    def send_and_receive(self, messages: list[Message], **_: Any) -> list[Message]:
        begun = time.process_time()
        replies = []
        for message in messages:
            message.content = copy.deepcopy(message.content)  # as a wire would: clients change what they are given
            site = message.metadata.dst_node_id
            stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            if stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK) and site in self.dropped:
                continue
            # Serialising the plain parameters is Flower's own round, not its secure aggregation.
            trained = self._train(message, None)
            started = time.process_time()
            reply = secaggplus_mod(message, self.contexts[site], lambda *_, trained=trained: trained)
            self.cpu[site] += time.process_time() - started
            self.uploads[site] += content_bytes(reply.content.config_records[RECORD_KEY_CONFIGS])
            replies.append(reply)
        self.outside += time.process_time() - begun
        return replies


def context_of(vector: np.ndarray[Any, Any], sites: int, kept: list[Any]) -> Any:
    """What the workflow asks of its context: the round, the model, and a strategy that takes every site."""
    empty = ndarrays_to_parameters([vector[:1]])
    chosen = [(SimpleNamespace(node_id=site), FitIns(empty, {})) for site in range(1, sites + 1)]

    def aggregate(_: int, results: list[Any], __: list[Any]) -> tuple[None, dict[str, Any]]:
        kept.extend(results[:1])
        return None, {}

    state = RecordDict()
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(empty, keep_input=True)
    return SimpleNamespace(
        state=state,
        strategy=SimpleNamespace(configure_fit=lambda *_: chosen, aggregate_fit=aggregate),
        client_manager=SimpleNamespace(num_available=lambda: sites),
        history=SimpleNamespace(add_metrics_distributed_fit=lambda **_: None),
    )


def main(path: str, sites: int, dropouts: int, threshold: int) -> dict[str, float]:
    logging.disable(logging.CRITICAL)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, sites + 1
    vector = np.load(path)
    grid = Grid(vector, sites, dropped=set(range(1, dropouts + 1)))
    kept: list[Any] = []
    context = context_of(vector, sites, kept)
    workflow = SecAggPlusWorkflow(
        num_shares=sites, reconstruction_threshold=threshold, max_weight=float(EXAMPLES), clipping_range=CLIP
    )
    state = WorkflowState()
    begun = time.process_time()
    for stage in (
        workflow.setup_stage,
        workflow.share_keys_stage,
        workflow.collect_masked_vectors_stage,
        workflow.unmask_stage,
    ):
        if not stage(grid, context, state):
            raise RuntimeError(f"{stage.__name__} failed")
    coordinator = time.process_time() - begun - grid.outside
    alive = [cpu for site, cpu in grid.cpu.items() if site not in grid.dropped]
    return {
        "site_cpu_ms": 1e3 * sorted(alive)[len(alive) // 2],
        "coordinator_cpu_ms": 1e3 * coordinator,
        "upload_bytes": max(grid.uploads.values()),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *(int(value) for value in sys.argv[2:]))))
