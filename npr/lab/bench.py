"""`npr-lab bench`: ratios that say whether the learning code is fast, each taken within one run.

Seconds of one machine say little on another, and on a busy machine they say nothing. So every figure is the median of
ratios of measurements that alternate, and counts processor time of this process (all its threads) rather than
elapsed time, which also holds what others did meanwhile. Ratios of elapsed time are reported beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lazaret.errors import ConfigError
from npr.data.generated import ISIC_TRAIN
from npr.data.sources import open_dataset
from npr.federation import Federation, RoundReport
from npr.lab.plan import Cell, DataSettings, ModelSettings, Settings
from npr.methods.base import Method
from npr.model import SplitModel
from npr.prototypes import balanced_plan
from npr.seeds import generator
from npr.training import evaluating

import timm  # isort: skip

Json = dict[str, Any]

LIMITS = {
    "npr_round_over_bsm_round": 1.30,
    "npr_epoch_round_over_bsm_round": 1.08,
    "sinkhorn_over_pot": 0.5,
    "input_pipeline_share": 0.10,
    "round_over_plain_loop": 0.90,
    "evaluate_over_forward": 1.10,
}
DP_LIMITS = {"dp_step_over_plain_step": 1.3, "dp_peak_over_plain_peak": 1.5, "norm_relative_error": 1e-4}
# How close two plans must be, as a share of the mean entry 1 / (n K).
PLAN_TOLERANCE = 1e-4
SMOOTHING = 0.05
CLUSTERS = 4
FEATURES = 10_000


def learning_report(*, repeats: int = 5, scale: float = 0.03) -> Json:
    """All ratios, the limits they are held to, and what they were taken from."""
    return {
        **round_ratios(repeats=repeats, scale=scale),
        **sinkhorn_ratio(repeats=repeats),
        **loop_ratios(repeats=repeats, scale=scale),
        "limits": LIMITS,
    }


def private_report() -> Json:
    """What a differentially private step costs beside a plain one; memory is measured in processes of their own."""
    from npr.lab.dp_bench import bench

    return {**bench(), "limits": DP_LIMITS}


def round_ratios(*, repeats: int, scale: float, architecture: str = "tf_efficientnet_lite0") -> Json:
    """Rounds with NPR against rounds without, and how long training waits for its batches. Evaluation is not in it."""
    settings = Settings(
        data=DataSettings(source=f"generated:scale={scale}", image_size=64),
        model=ModelSettings(architecture=architecture),
    )
    dataset = open_dataset(settings.data.source, fold="fold", image_size=settings.data.image_size)
    from npr.lab.cell import build_federation

    def federation(method: str, **options: Any) -> Federation:
        cell = Cell(method=method, seed=0, fold="fold", options=tuple(options.items()))
        return build_federation(settings, cell, dataset)

    federations = {
        "bsm": federation("fedavg"),
        "npr": federation("fednpr", prototype_source="exact"),
        "npr_epoch": federation("fednpr", prototype_source="epoch"),
    }
    reports: list[RoundReport] = []

    def timed_round(name: str) -> Callable[[], None]:
        def run() -> None:
            report = federations[name].run_round()
            if name == "bsm":
                reports.append(report)

        return run

    # The first round of each is not counted: it warms caches up, and makes the prototypes that later rounds start from.
    seconds = alternate({name: timed_round(name) for name in federations}, repeats=repeats, warm_up=1)
    sites = [site for report in reports[1:] for site in report.sites.values()]
    return {
        "npr_round_over_bsm_round": paired_ratio(seconds["npr"], seconds["bsm"]),
        "npr_epoch_round_over_bsm_round": paired_ratio(seconds["npr_epoch"], seconds["bsm"]),
        "input_pipeline_share": round(sum(s.seconds_waiting for s in sites) / sum(s.seconds for s in sites), 4),
        "rounds": {
            "images": sum(len(site.train) for site in dataset.sites),
            "threads": torch.get_num_threads(),
            "repeats": repeats,
            "wall_ratios": {
                name: paired_ratio(seconds[name], seconds["bsm"], of="wall") for name in ("npr", "npr_epoch")
            },
            "median_cpu_seconds": medians(seconds),
        },
    }


# Against the hardware: a loop that anybody would write with timm, and its convolutions and matrix products alone.


def loop_ratios(
    *, repeats: int, scale: float, architecture: str = "tf_efficientnet_lite0", image_size: int = 64
) -> Json:
    """A FedAvg round against a plain loop over the same batches, and against the least that a step computes.

    The loop has timm's model as it is (channels_last), cross-entropy and torch's Adam, and no federation. Its batches
    come from our own data path, so that the ratio is about steps alone.
    """
    settings = Settings(
        data=DataSettings(source=f"generated:scale={scale}", image_size=image_size),
        model=ModelSettings(architecture=architecture),
    )
    dataset = open_dataset(settings.data.source, fold="fold", image_size=image_size)
    from npr.lab.cell import build_federation

    federation = build_federation(settings, Cell(method="fedavg", seed=0, fold="fold"), dataset)
    judged = build_federation(settings, Cell(method="fednpr", seed=0, fold="fold"), dataset)
    plain = PlainLoop(federation)
    sizes = [size for site in federation.sites for size in site.epoch(1, 0).sizes]
    floor = Floor(federation.sites[0].model, max(sizes), image_size)
    seconds = alternate(
        {"round": federation.run_round, "plain": plain.run, "floor": lambda: floor.run(sizes)},
        repeats=repeats,
        warm_up=1,
    )
    reading = alternate(
        {"evaluate": lambda: evaluate(judged), "forward": lambda: forward(judged)}, repeats=repeats, warm_up=1
    )
    return {
        "round_over_plain_loop": paired_ratio(seconds["round"], seconds["plain"]),
        "round_over_floor": paired_ratio(seconds["round"], seconds["floor"]),
        "evaluate_over_forward": paired_ratio(reading["evaluate"], reading["forward"]),
        "loops": {
            "architecture": architecture,
            "pixels": image_size,
            "steps": len(sizes),
            "wall_ratios": {
                "round_over_plain_loop": paired_ratio(seconds["round"], seconds["plain"], of="wall"),
                "round_over_floor": paired_ratio(seconds["round"], seconds["floor"], of="wall"),
                "evaluate_over_forward": paired_ratio(reading["evaluate"], reading["forward"], of="wall"),
            },
            "median_cpu_seconds": medians({**seconds, **reading}),
        },
    }


class PlainLoop:
    """One epoch at every site, as anybody would write it."""

    def __init__(self, federation: Federation) -> None:
        spec, config = federation.spec, federation.config
        model = timm.create_model(spec.architecture, num_classes=spec.num_classes, in_chans=spec.in_channels)
        self._model = model.to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._sites = federation.sites

    def run(self) -> None:
        self._model.train()
        for site in self._sites:
            for batch in site.epoch(1, 0):
                self._optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self._model(batch.images), batch.labels)
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()


class Floor:
    """Convolutions and matrix products of one step, forward and backward, each by itself on numbers that are there."""

    def __init__(self, model: SplitModel, batch: int, image_size: int) -> None:
        self._layers: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor, bool]] = []
        handles = [
            layer.register_forward_hook(self._keep)
            for layer in model.modules()
            if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)
        ]
        model.train()
        with torch.no_grad():
            images = torch.randn(batch, 3, image_size, image_size, generator=generator(0, "bench", "floor"))
            model(images.to(memory_format=torch.channels_last))
        for handle in handles:
            handle.remove()

    def _keep(self, layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        # Nothing asks for the gradient of the images themselves.
        self._layers.append((layer, inputs[0].detach(), torch.randn_like(output), bool(self._layers)))

    def run(self, sizes: Sequence[int]) -> None:
        """:param sizes: images of each step."""
        for size in sizes:
            for layer, inputs, gradient, inner in self._layers:
                given = inputs[:size].requires_grad_(inner)
                wanted = [*layer.parameters(), *([given] if inner else [])]
                torch.autograd.grad(layer(given), wanted, gradient[:size])


def evaluate(federation: Federation) -> None:
    """What an agent does after a round: prototypes of the new model, then predictions on held-out images."""
    for site, data in zip(federation.sites, federation.dataset.sites, strict=True):
        predict = Method(federation.config.changed(predict="both"), name="bench", npr=True, predict="both").predictor(
            site, site.model, "local"
        )
        predict(data.test)
        site.forget_features()  # else the next measurement would have them from this one


def forward(federation: Federation) -> None:
    """The passes that this cannot do without."""
    for site, data in zip(federation.sites, federation.dataset.sites, strict=True):
        with evaluating(site.model), torch.inference_mode():
            for samples in (site.train, data.test):
                for batch in site.reading(samples):
                    site.model.features(batch.images)


def sinkhorn_ratio(*, repeats: int) -> Json:
    """Our solver against POT's log-domain solver in double precision, on the same similarities.

    POT stops at a marginal error of 1e-4. Both plans are held against POT's own plan at 1e-9, so that a fast answer
    has to be a right one.
    """
    similarity, labels = similarities()
    clusters = torch.full((int(labels.max()) + 1,), CLUSTERS)
    by_class = [similarity[labels == c].double().numpy() for c in range(len(clusters))]

    def ours() -> NDArray[np.float64]:
        plan = balanced_plan(similarity, labels, clusters, smoothing=SMOOTHING, tolerance=PLAN_TOLERANCE / 10)
        return plan.weights.double().numpy()

    def theirs(threshold: float = 1e-4) -> NDArray[np.float64]:
        return np.concatenate([_pot_plan(part, threshold) * len(part) for part in by_class])

    exact = theirs(1e-9)
    seconds = alternate({"ours": ours, "pot": theirs}, repeats=max(repeats, 5), warm_up=1)
    return {
        "sinkhorn_over_pot": paired_ratio(seconds["ours"], seconds["pot"]),
        "sinkhorn": {
            "features": len(labels),
            "classes": len(clusters),
            "clusters": CLUSTERS,
            # n_c Q has mean entry 1 / K, so K times the gap is the gap in units of 1 / (n_c K).
            "plan_gap": float(f"{CLUSTERS * np.abs(ours() - exact).max():.3g}"),
            "pot_plan_gap": float(f"{CLUSTERS * np.abs(theirs() - exact).max():.3g}"),
            "plan_tolerance": PLAN_TOLERANCE,
            "wall_ratio": paired_ratio(seconds["ours"], seconds["pot"], of="wall"),
            "median_cpu_seconds": medians(seconds),
        },
    }


def similarities() -> tuple[torch.Tensor, torch.Tensor]:
    """10,000 unit features of eight classes, in proportion as at Fed-ISIC2019's largest site, in four uneven modes."""
    draw = generator(0, "bench", "sinkhorn")
    share = ISIC_TRAIN[0] / ISIC_TRAIN[0].sum()
    counts = np.maximum(1, np.rint(share * FEATURES)).astype(int)
    counts[counts.argmax()] += FEATURES - counts.sum()
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.from_numpy(counts))
    modes = torch.nn.functional.normalize(1 + 0.6 * torch.randn(len(counts), CLUSTERS, 64, generator=draw), dim=2)
    mode = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.1]), FEATURES, replacement=True, generator=draw)
    features = modes[labels, mode] + 0.1 * torch.randn(FEATURES, 64, generator=draw)
    features = torch.nn.functional.normalize(features, dim=1)
    return torch.einsum("nd,nkd->nk", features, modes[labels]), labels


def _pot_plan(similarity: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    try:
        import ot
    except ImportError:
        raise ConfigError("the benchmark needs POT, which is missing", hint="pip install 'lazaret[bench]'") from None
    rows, columns = similarity.shape
    plan = ot.bregman.sinkhorn_log(
        np.full(rows, 1 / rows),
        np.full(columns, 1 / columns),
        -similarity,
        SMOOTHING,
        stopThr=threshold,
        numItermax=5000,
    )
    return np.asarray(plan)


@dataclass(frozen=True, slots=True)
class Seconds:
    """One measurement: processor time of all threads, and elapsed time."""

    cpu: float
    wall: float


def alternate(tasks: Mapping[str, Callable[[], Any]], *, repeats: int, warm_up: int) -> dict[str, list[Seconds]]:
    """Each task measured in turns; the order turns round each time, so that none always goes first."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in tasks}
    for number in range(warm_up + repeats):
        for name in sorted(tasks, reverse=number % 2 == 1):
            cpu, wall = time.process_time(), time.perf_counter()
            tasks[name]()
            if number >= warm_up:
                seconds[name].append(Seconds(time.process_time() - cpu, time.perf_counter() - wall))
    return seconds


def paired_ratio(ours: list[Seconds], theirs: list[Seconds], *, of: str = "cpu") -> float:
    """The median of the ratios of neighbours: a burst of load from outside falls on both of a pair."""
    return round(float(median(getattr(a, of) / getattr(b, of) for a, b in zip(ours, theirs, strict=True))), 4)


def medians(seconds: Mapping[str, list[Seconds]]) -> dict[str, float]:
    return {name: round(median(each.cpu for each in values), 4) for name, values in seconds.items()}
