"""One round of SecAgg+ with a clock: from the moment all nodes are there to the aggregate."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

app = ServerApp()


class Kept(FedAvg):
    """FedAvg that shows its aggregate."""

    aggregate: Any = None

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        found, metrics = super().aggregate_fit(server_round, results, failures)
        self.aggregate = found
        return found, metrics


@app.main()
def main(grid: Any, context: Context) -> None:
    settings = context.run_config
    sites, params = int(settings["sites"]), int(settings["params"])
    vector = np.linspace(-1e-3, 1e-3, params, dtype=np.float32)
    strategy = Kept(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=sites,
        min_available_clients=sites,
        initial_parameters=ndarrays_to_parameters([vector]),
    )
    legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
    secure = SecAggPlusWorkflow(
        num_shares=sites, reconstruction_threshold=int(settings["threshold"]), clipping_range=1.0, timeout=240
    )
    report: dict[str, Any] = {}

    def timed(driver: Any, inner: Any) -> None:
        while len(list(driver.get_node_ids())) < sites:
            time.sleep(0.05)
        begun = time.monotonic()
        secure(driver, inner)
        report["seconds"] = time.monotonic() - begun

    DefaultWorkflow(fit_workflow=timed)(grid, legacy)
    found = strategy.aggregate
    report["exact"] = found is not None and bool(np.abs(parameters_to_ndarrays(found)[0] - vector).max() < 1e-5)
    Path(str(settings["out"])).write_text(json.dumps(report))
