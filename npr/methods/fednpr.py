"""FedNPR and FedNPR-Per: federated training with non-parametric regularisation (docs/methods.md).

A site's loss is L_sup + lambda L_npr (paper eq. 5). L_sup is balanced softmax: logits are shifted by the log of the
site's class frequencies, so that rare diagnoses count (`npr/losses.py`, `balanced_softmax`). L_npr draws each feature
vector to the nearest prototype of its own class and away from those of the others (`npr/losses.py`, `npr_loss`).

Prototypes are K unit vectors per class. At the start of a round the site clusters its own features, with equal shares
for the sub-clusters of a class (`npr/prototypes.py`, `npr/prototypes.py`). They are made, used and kept at the site:
nothing on them can be sent, and `Method.contribution` reads the shared weights alone.

One round at a site, in the order of the calls:

1. `begin_round`: `Regulariser.begin_round` makes the prototypes from the model that the round starts from.
2. every step: `Method.supervised` computes L_sup, `Regulariser.add` adds lambda L_npr.
3. `end_round`: with `prototype_source = "epoch"` the features of the last epoch become the next prototypes.

The two methods differ from FedAvg and FedPer in the regulariser alone (`npr=True` below), which any other method can
carry too: `fedprox+npr`, `moon+npr` and so on. That is what makes a comparison of pairs fair.
"""

from __future__ import annotations

from npr.methods.fedavg import FedAvg
from npr.methods.fedper import FedPer
from npr.methods.registry import register


@register("fednpr", "FedAvg with non-parametric regularisation of the extractor", npr=True, aliases=("fedavg+npr",))
class FedNPR(FedAvg):
    """One model for all sites: extractor and head are averaged."""


@register("fednpr-per", "FedNPR with the head kept at the site", npr=True, predict="both")
class FedNPRPer(FedPer):
    """The extractor is averaged, the head stays at the site.

    At a site, `predict = "auto"` means head and prototypes together for it, and the head for every other method. The
    laboratory ignores both: it scores every method by the same predictors (npr/lab/predictors.py).
    """
