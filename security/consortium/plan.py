"""`federation.toml`: what the consortium decides, and the template that `consortium init` writes.

docs/consortium.md explains each key; `drafting` makes a manifest of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from lazaret.settings import read_settings
from security.crypto.ring import DEFAULT_BITS
from security.identity.manifest import (
    MAX_WINDOW,
    Architecture,
    ClassNames,
    Count,
    Document,
    Hash,
    Name,
    Phrase,
    Positive,
    VerifierKey,
    Word,
)

Real = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Annotated[int, Field(gt=0)]


class ModelPlan(Document):
    initial: str
    architecture: Architecture | None = None
    code_digest: Hash | None = None
    classes: ClassNames | None = None
    personal: tuple[str, ...] = ()


class TrainingPlan(Document):
    method: Word | None = None
    rounds: Positive
    steps: Positive
    config_hashes: tuple[Hash, ...] = ()
    weights: Literal["samples", "bucketed", "uniform"] = "samples"
    local_statistics: bool = False
    isolation: Literal["required", "best"] = "best"
    plugin: str | None = None
    settings: dict[Word, bool | int | float | str] = Field(default_factory=dict)


class AggregationPlan(Document):
    colluders: Count | None = None
    least_survivors: Positive | None = None
    single_history: bool = True
    allow_two_sites: bool = False
    key_agreement: Literal["hybrid"] = "hybrid"
    ring_bits: Literal[16, 24, 32, 64] = DEFAULT_BITS
    weight_cap: Positive = 16_384
    report_metrics: bool = True
    clip_margin: Real = 8
    movement_window: Annotated[int, Field(ge=0, le=MAX_WINDOW)] = 5
    movement_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | Annotated[int, Field(ge=1)] = 2
    groups: Annotated[int, Field(ge=3)] | None = None
    combine: Literal["median", "trimmed-mean"] = "median"
    secrets: dict[Name, Hash] = Field(default_factory=dict)
    clip_exponents: dict[str, int] = Field(default_factory=dict)


class AuditPlan(Document):
    mode: Literal["auto", "covered", "sampled"] = "auto"
    chunks_per_site: Positive = 1
    strict: bool = False
    vote_drop: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    max_rounds_unwitnessed: Positive = 3
    witnesses: tuple[VerifierKey, ...] = ()
    ml_dsa: bool = False


class TimingPlan(Document):
    train: Positive = 3600
    message: Positive = 30
    upload: Positive = 60
    secret_ttl: Positive = 86_400
    manifest_days: Annotated[int, Field(ge=1, le=366)] = 90


class PrivacyPlan(Document):
    epsilon: Real
    delta: Real
    clip: Real
    noise_floor: Real
    unit: Literal["patient", "lesion", "study", "image"]
    least_patients: Positive | None = None


class ProcessingPlan(Document):
    purposes: tuple[Phrase, ...] = ("model training",)
    legal_bases: tuple[Phrase, ...] = ()
    packages: tuple[Hash, ...] = ()
    schemas: tuple[Hash, ...] = ()


class ScoresPlan(Document):
    figure: Literal["bacc", "auc", "loss"] = "bacc"
    sites: Annotated[tuple[Name, ...], Field(min_length=1)]
    patience: Count = 0
    least_gain: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0


class FederationPlan(Document):
    run: Name
    model: ModelPlan
    training: TrainingPlan
    aggregation: AggregationPlan = AggregationPlan()
    audit: AuditPlan = AuditPlan()
    timing: TimingPlan = TimingPlan()
    privacy: PrivacyPlan | None = None
    processing: ProcessingPlan = ProcessingPlan()
    scores: ScoresPlan | None = None

    @classmethod
    def read(cls, path: Path) -> FederationPlan:
        return read_settings(cls, path, what="plan", written_by="consortium init")


# The commented `federation.toml` that `consortium init` writes.

PLAN: Final = """\
# What this federation trains, and under which rules. `consortium publish` signs it into the manifest.
# Every key is explained in docs/consortium.md. Keys behind a `#` show their defaults.

run = "run-1"                         # (required) a new model or method needs a new run id

[model]
initial = "initial.safetensors"       # (required) the model that all sites start from; relative to this folder
# architecture = "efficientnet_b0"    # these three are taken from the file's metadata where it has them
# code_digest = "<64 hex digits>"
# classes = ["melanoma", "nevus"]     # names in the order of the model's outputs; the same at every site
personal = []                         # patterns of tensors that never leave a site, such as "head.*"

[training]
method = "fednpr-per"                 # taken from the file's metadata where it has it, like the settings below
rounds = 80                           # (required)
steps = 50                            # (required) optimiser steps of a site in one round; the clips follow from it
# config_hashes = []                  # training configurations that sites may be asked to run; metadata may hold them
# weights = "samples"                 # or "bucketed", "uniform": how much the sum reveals of a site's size
# local_statistics = false            # true keeps batch-normalisation statistics at the sites
# plugin = "own_method.py"            # the method's own file, which every hospital approves; see docs/methods.md
# isolation = "best"                  # "required": a site trains only where what sees images has no network

[training.settings]
learning_rate = 0.001                 # (required)

[aggregation]
# colluders = 1                       # sites that may collude with the coordinator; default: fewer than a third
# least_survivors = 3
# single_history = true               # every cohort has more than half of the sites
# allow_two_sites = false             # only together with [privacy]
# key_agreement = "hybrid"            # X25519 and ML-KEM-768 together; there is no other one
# ring_bits = 24                      # 32 or 64 for very unequal sites: finer, but messages are a third longer or more.
                                      # 16 for sites that count alike: a third shorter, rounded at random
# weight_cap = 16384                  # the power of two above the largest site's number of samples
# report_metrics = true               # training loss and hit counts are part of the masked sum
# clip_margin = 8
# movement_window = 5                 # a tensor's step is cut to movement_factor x the median of so many steps; 0: off
# movement_factor = 2
# groups = 3                          # sums of so many groups, combined by a median; see docs/consortium.md
# combine = "median"                  # or "trimmed-mean"
# secrets = {}                        # site = "<64 hex digits>" for each site, as `site-agent draw` prints it
# clip_exponents = { "blocks.0.*" = 3 }

[audit]
# mode = "auto"                       # covered up to 20 sites, sampled above; see docs/consortium.md
# chunks_per_site = 1
# strict = false                      # true: do not train on a model whose sum has not been checked
# vote_drop = 0.05                    # sites vote against a model that is worse than the one before by more than this
# max_rounds_unwitnessed = 3
# witnesses = []                      # keys of a regulator or an ethics board: `privacy-audit witness-key` makes one
# ml_dsa = false                      # true: ML-DSA-65 signatures too on manifests and log heads; there is no way back

[timing]                              # seconds
# train = 3600
# message = 30
# upload = 60
# secret_ttl = 86400
# manifest_days = 90                  # days; publish again before: sites send nothing under an expired manifest

[processing]                          # auditors compare the privacy logs with these
# purposes = ["model training"]       # what sites may open their data for
# legal_bases = []                    # empty: any that a site states
# packages = []                       # digests of the software that may run, as agent.start logs them; empty: any
# schemas = []                        # the same for the wire schema

# [scores]                            # which round is best, by scores inside the masked sum; see docs/consortium.md
# sites = ["graz", "linz"]            # hospitals that consent, with share_scores = true in their policies
# figure = "bacc"                     # or "auc" or "loss", on each hospital's validation images
# patience = 0                        # models that may be no better before the run ends; 0: it never does
# least_gain = 0.0

# [privacy]                           # differential privacy at every site; a site may be stricter, never less strict
# epsilon = 8
# delta = 0.00001                     # at most 0.001, and at most one in least_patients
# clip = 1
# noise_floor = 0.8
# unit = "patient"
# least_patients = 1000               # optional; a public number that no site is below
"""
