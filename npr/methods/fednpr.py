"""FedNPR and FedNPR-Per: federated training with non-parametric regularisation, the paper's method on one page.

Sites differ in which diagnoses they have and how often. A model that is averaged over them learns a head that prefers
the common classes, and features that each site moves in its own direction. FedNPR changes the loss at the sites against
both; what is exchanged stays one vector and its mean.

For an image with features f and class y, at a site with n_c images of class c (z: logits of the head; u = f / |f|):

    L     = L_sup + lambda L_npr                                       (eq. 5)      `losses.regularised`
    L_sup = -log softmax(z + log(n_c / n))_y                           balanced     `losses.balanced_softmax`
    L_npr = -log softmax(s / tau)_y,  s_c = max_k <u, p_ck>            (eq. 3)      `losses.npr_loss`

- L_sup shifts the logits by the log of the site's class frequencies while it trains, and predicts without the shift:
  rare diagnoses count as much as common ones. A class that the site does not have has frequency 0 and is left out, so
  that its row of the head does not move there (Ren et al. 2020).
- L_npr needs no parameter of its own, hence the name. It draws the features of an image to the nearest prototype of its
  class and away from those of the other classes that the site has. It trains the extractor alone.

A class has K prototypes p_c1 ... p_cK, unit vectors at the site, because one diagnosis has several appearances. They
come from the site's own features of the class by turns of two steps (`prototypes.make_prototypes`):

    Q   = argmax <Q, S> + eps H(Q), S_jk = <u_j, p_ck>                 (eq. 1)      `prototypes.balanced_plan`
    p_k = sum_j Q_jk u_j, brought to length 1                          (eq. 2)      `prototypes._centres`

Every p_k gets an equal share of the features (rows of Q sum to 1/n, columns to 1/K), so that no prototype takes all of
them. Prototypes are made, used and kept at the site: `Method.contribution` reads the shared weights alone.

One round, in the order of the calls:

1. The site loads the mean of the round before (`Federation.run_round` in the laboratory, `Trainer.train` at a
   hospital).
2. `Regulariser.begin_round` makes the prototypes from the model that the round starts from, in one pass.
3. Every step of `Method.epochs` computes the features once: `Method.supervised` gives L_sup, `Regulariser.add` adds
   lambda L_npr. The prototypes do not change meanwhile.
4. `Method.contribution` gives the vector of the shared groups, weighted with the number of images. Their mean is the
   next model.

The two methods differ from FedAvg and FedPer in the regulariser alone (`npr=True` below), which any other method can
carry too: `fedprox+npr`, `moon+npr` and so on. That is what makes a comparison of pairs fair. docs/methods.md has every
option, what the paper leaves open, and the same formulas for images with several labels.
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
