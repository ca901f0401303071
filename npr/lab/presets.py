"""Named starting points for `npr-lab run`. Every value can be overridden by a flag."""

from __future__ import annotations

from dataclasses import dataclass, field

from npr.lab.names import require_known
from npr.lab.plan import Value

PAPER_METHODS = (
    "local", "fedavg", "fedprox", "moon", "creff", "fedrs", "fedlc", "balancefl", "fedrep", "fedrod", "fedbabu",
    "fedper", "fednpr", "fednpr-per",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults of one preset; `data` is None where the user has to say where the images are."""

    summary: str
    data: str | None
    image_size: int
    architecture: str
    weights: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    folds: tuple[int | str, ...]
    fold_count: int = 5
    rounds: int
    evaluate_every: int
    train: dict[str, Value] = field(default_factory=dict)


# Settings the paper prints: Adam, 80 rounds of one local epoch, ImageNet weights, five-fold cross-validation, and the
# head alone predicts.
_PAPER: dict[str, Value] = {
    "learning_rate": 1e-3, "weight_decay": 5e-4, "batch_size": 64, "local_epochs": 1, "milestones": (60, 70),
    "augmentation": "paper", "predict": "head",
}

PRESETS = {
    "quick": Preset(
        summary="generated lesions, small images, a few minutes: does everything work here?",
        data="generated:scale=0.03",
        image_size=48,
        architecture="tf_efficientnet_lite0",
        weights="package",
        methods=("local", "fedavg", "fedper", "fednpr", "fednpr-per"),
        seeds=(0,),
        folds=(0,),
        rounds=5,
        evaluate_every=1,
    ),
    "paper-isic": Preset(
        summary="the paper's skin lesion settings; needs --data fed-isic:PATH",
        data=None,
        image_size=224,
        architecture="efficientnet_b0",
        weights="timm",
        methods=PAPER_METHODS,
        seeds=(0,),
        folds=(0, 1, 2, 3, 4),
        rounds=80,
        evaluate_every=1,
        train={**_PAPER, "clusters": 4, "lambda_npr": 0.1},
    ),
    "paper-ich": Preset(
        summary="the paper's intracranial haemorrhage settings; needs --data dicom:PATH",
        data=None,
        image_size=128,
        architecture="efficientnet_b0",
        weights="timm",
        methods=PAPER_METHODS,
        seeds=(0,),
        folds=(0, 1, 2, 3, 4),
        rounds=80,
        evaluate_every=1,
        train={**_PAPER, "clusters": 2, "lambda_npr": 0.05},
    ),
}


def preset(name: str) -> Preset:
    require_known("preset", name, PRESETS, where="--preset")
    return PRESETS[name]
