"""The commented `site.toml` that `site-agent init` writes."""

from __future__ import annotations

import json

_TEMPLATE = """\
# This hospital's part in a federation. What all sites share stands in the consortium's signed manifest; here is what
# only this machine knows, and what this hospital permits. Keys behind a `#` show their defaults. Relative paths start
# at this file's folder.

[site]
identity = {identity}                 # keys, certificates and manifest; nobody else may read it
state = {state}                       # what must survive a restart, and the privacy log
initial_model = {initial_model}       # (required) the safetensors file of the consortium; checked by its SHA-256
# threads = 4                         # processor threads for training; default: all
# ready_slot = 600                    # seconds; an update is announced only at multiples of this after the order, so
                                      # that the time does not tell how much data is here. Default: 1, 2, 4, ... seconds
                                      # after it, which tells the time that training takes to a factor of two
# worker_wait = 120                   # seconds; how long training in several processes waits for one of them

[coordinator]
address = {address}                   # (required) host:port; this agent only ever dials out
# proxy = "http://proxy.example:3128" # an HTTP CONNECT proxy, if the hospital's network has one
# least_wait = 1                      # seconds before the first new try after a lost connection; doubles each time
# most_wait = 60

[logging]
# json = false                        # one JSON object a line on stderr; `--log-format` overrides it

[data]
source = {source}                     # (required) csv:FILE, folders:DIR, dicom:DIR, fed-isic:DIR, npz:PATH or generated
# site = "graz"                       # which site of the source is ours, where it holds several; default: our own id
# fold = 0                            # test images: a fold's number, or the name of a split that came with the data
# folds = 5
# validation = 0.1                    # share of the training patients held out to choose the best personal model
# seed = 0                            # of the folds, not of training
# class_names = ["nevus", "melanoma"] # the federation's classes in its order, for sources that learn them from labels
# purpose = "model training"          # these two go into the privacy log when the data are opened
# legal_basis = ""

[privacy]                             # where the manifest asks for differential privacy
# population = "patients"             # whose budget is spent; one ledger for everything that holds the same patients
# ledger = "ledger"                   # folder of the ledger; it outlives runs, so back it up
# anchor = "ledger-anchor"            # folder of its newest head, best on another disk
# cap = 8.0                           # the most that all runs may cost; default: the manifest's epsilon
# noise = 1.2                         # over the clip; default: the manifest's floor. `site-agent check` proposes one
# metrics_noise = 10.0                # book a local validation in every round; default: validation is off
# micro_batch = 64                    # images at once under differential privacy

[metrics]
# listen = "127.0.0.1:7481"           # figures for a Prometheus on this machine; no other address is permitted

[policy]                              # what this hospital permits; the coordinator cannot override it
# methods = ["fednpr-per"]            # default: whatever the manifest names
# architectures = ["efficientnet_b0"]
# least_cohort = 3                    # refuse to hide among fewer sites than this
# most_rounds = 80
# most_bytes_per_round = 100_000_000
# hours = "20:00-06:00"               # local time of day in which training may begin
# require_privacy = false             # refuse federations without differential privacy
# most_epsilon = 8.0
# require_covered_audit = false       # refuse federations whose sums are only sampled
# required_classes = ["melanoma"]     # refuse to train while one of these has no training image here
# share_metrics = true                # put the training loss and hits into the masked sum; false sends zeros

# [policy.settings]                   # bounds on what the manifest may set
# learning_rate = {{ most = 0.01 }}
# local_epochs = {{ most = 5 }}
"""


def site_toml(*, identity: str, state: str, initial_model: str, address: str, source: str) -> str:
    """The file, with this site's values in it."""
    told = {
        "identity": identity,
        "state": state,
        "initial_model": initial_model,
        "address": address,
        "source": source,
    }
    return _TEMPLATE.format(**{name: json.dumps(value, ensure_ascii=False) for name, value in told.items()})
