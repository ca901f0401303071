"""The commented `federation.toml` that `consortium init` writes."""

from __future__ import annotations

from typing import Final

PLAN: Final = """\
# What this federation trains, and under which rules. `consortium publish` signs it into the manifest.
# Every key is explained in docs/consortium.md. Keys behind a `#` show their defaults.

run = "run-1"                         # (required) a new model or method needs a new run id

[model]
initial = "initial.safetensors"       # (required) the model everybody starts from; relative to this folder
# architecture = "efficientnet_b0"    # these three are taken from the file's metadata where it has them
# code_digest = "<64 hex digits>"
# classes = 8
personal = []                         # patterns of tensors that never leave a site, such as "head.*"

[training]
method = "fednpr-per"                 # taken from the file's metadata where it has it, like the settings below
rounds = 80                           # (required)
steps = 50                            # (required) optimiser steps of a site in one round; the clips follow from it
# config_hashes = []                  # training configurations that sites may be asked to run; metadata may hold them
# weights = "samples"                 # or "bucketed", "uniform": what a site's size gives away
# local_statistics = false            # true keeps batch-normalisation statistics at the sites

[training.settings]
learning_rate = 0.001                 # (required)

[aggregation]
# colluders = 1                       # sites that may side with the coordinator; default: fewer than a third
# least_survivors = 3
# single_history = true               # every round holds more than half of the sites
# allow_two_sites = false             # only together with [privacy]
# ring_bits = 24                      # 32 or 64 for very unequal sites: finer, and a third or more longer on the wire
# weight_cap = 16384                  # the power of two above the largest site's number of samples
# report_metrics = true               # loss and hits travel inside the masked sum
# clip_margin = 8
# clip_exponents = { "blocks.0.*" = 3 }

[audit]
# mode = "auto"                       # covered up to 20 sites, sampled above; only covered stops a lying coordinator
# chunks_per_site = 1
# strict = false                      # true: do not even train on a model whose sum has not been checked
# max_rounds_unwitnessed = 3

[timing]                              # seconds
# train = 3600
# message = 30
# upload = 60
# secret_ttl = 86400

# [privacy]                           # differential privacy at every site; a site may be stricter, never laxer
# epsilon = 8
# delta = 0.00001
# clip = 1
# noise_floor = 0.8
# unit = "patient"
"""
