"""The figures the FedNPR paper publishes, in percent, as (mean, standard deviation over five repetitions).

They are facts, kept as data so that `npr-lab table --paper` can set ours beside them. Each cell is
(ISIC bACC, ISIC bAUC, ICH bACC, ICH bAUC). The paper evaluates every site's locally updated model (or personal
model) on its own test images and takes the mean over sites at the round that is best on those test images; our column
is the last round unless it says otherwise, which makes ours the lower of the two by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Figure = tuple[float, float]
Dataset = Literal["isic", "ich"]


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One printed row, and which of our variants stands beside it (method, and the options that were changed)."""

    label: str
    isic: tuple[Figure, Figure]
    ich: tuple[Figure, Figure]
    method: str
    options: tuple[tuple[str, bool | int | float | str], ...] = ()

    def figures(self, dataset: Dataset) -> tuple[Figure, Figure]:
        return self.isic if dataset == "isic" else self.ich


@dataclass(frozen=True, slots=True)
class PaperTable:
    name: str
    title: str
    rows: tuple[PaperRow, ...]


def _row(
    label: str, cells: str, method: str, options: tuple[tuple[str, bool | int | float | str], ...] = ()
) -> PaperRow:
    """`cells` are four "mean/sd" in the order of the printed columns."""
    numbers = [(float(mean), float(sd)) for mean, sd in (cell.split("/") for cell in cells.split())]
    first, second, third, fourth = numbers
    return PaperRow(label, (first, second), (third, fourth), method, options)


_FULL = "76.2/0.9 91.8/0.5 72.1/0.3 90.7/0.5"

# Without the supervised loss the head learns nothing, so the prediction comes from the nearest prototype.
_PROTOTYPES_ONLY = (("supervision", "none"), ("predict", "prototype"))

TABLES = (
    PaperTable("A", "Main comparison", (
        _row("Local", "70.0/0.7 88.3/1.2 60.7/0.8 89.0/0.5", "local"),
        _row("FedAvg", "69.5/0.6 91.3/0.7 59.8/0.4 84.8/0.2", "fedavg"),
        _row("FedProx", "70.0/1.1 90.2/0.2 64.8/0.5 89.4/0.4", "fedprox"),
        _row("MOON", "69.5/1.0 90.5/0.8 61.5/0.6 88.4/0.6", "moon"),
        _row("CReFF", "67.6/1.3 89.6/1.2 60.8/0.2 89.0/0.4", "creff"),
        _row("FedRS", "70.2/2.2 90.3/0.3 62.8/0.7 83.6/0.3", "fedrs"),
        _row("FedLC", "67.8/0.9 89.3/0.9 63.7/0.7 86.1/0.4", "fedlc"),
        _row("BalanceFL", "66.4/1.0 88.2/0.4 58.2/0.7 87.6/0.2", "balancefl"),
        _row("FedRep", "69.8/1.3 88.9/0.5 63.4/0.5 89.3/0.4", "fedrep"),
        _row("FedRoD", "66.1/0.8 90.5/1.5 64.7/0.5 89.8/0.4", "fedrod"),
        _row("FedBABU", "72.1/1.6 90.5/1.5 64.4/0.5 89.0/0.5", "fedbabu"),
        _row("FedNPR", "72.9/0.6 91.5/0.7 65.4/0.8 87.5/0.5", "fednpr"),
        _row("FedNPR-Per", _FULL, "fednpr-per"),
    )),
    PaperTable("B", "Components of FedNPR-Per", (
        _row("prototypes K=1, no BSM", "57.4/1.1 83.2/1.7 58.5/2.9 82.0/1.4", "fednpr-per",
             (*_PROTOTYPES_ONLY, ("clusters", 1))),
        _row("prototypes K>1, no BSM", "60.4/2.3 83.5/1.3 60.7/1.8 83.7/1.6", "fednpr-per", _PROTOTYPES_ONLY),
        _row("BSM + prototypes K=1", "73.3/0.1 91.4/0.9 70.8/0.6 88.8/0.3", "fednpr-per", (("clusters", 1),)),
        _row("BSM + prototypes K>1", _FULL, "fednpr-per"),
    )),
    PaperTable("C", "Number of prototypes K of FedNPR-Per", (
        _row("K=1", "73.3/0.1 91.4/0.9 70.8/0.6 88.8/0.3", "fednpr-per", (("clusters", 1),)),
        _row("K=2", "74.8/0.9 91.5/0.5 72.1/0.3 90.7/0.5", "fednpr-per", (("clusters", 2),)),
        _row("K=4", "76.2/0.9 91.8/0.5 70.6/0.3 89.4/0.7", "fednpr-per", (("clusters", 4),)),
        _row("K=8", "74.5/0.9 91.4/0.5 70.5/0.9 88.7/0.7", "fednpr-per", (("clusters", 8),)),
    )),
    PaperTable("D", "Weight lambda of FedNPR-Per", (
        _row("lambda=0.01", "71.8/0.6 91.9/0.3 70.5/2.1 89.4/0.5", "fednpr-per", (("lambda_npr", 0.01),)),
        _row("lambda=0.05", "72.7/0.8 90.9/0.3 72.1/0.3 90.7/0.5", "fednpr-per", (("lambda_npr", 0.05),)),
        _row("lambda=0.1", "76.2/0.9 91.8/0.5 70.5/0.5 90.5/0.4", "fednpr-per", (("lambda_npr", 0.1),)),
        _row("lambda=1", "73.3/0.6 92.1/0.5 69.2/1.1 88.5/1.3", "fednpr-per", (("lambda_npr", 1),)),
    )),
)

# Table E prints means and gains without deviations: (ISIC bACC, ISIC bAUC, ICH bACC, ICH bAUC), then the four gains.
TABLE_E: tuple[tuple[str, str, tuple[float, float, float, float], tuple[float, float, float, float]], ...] = (
    ("FedAvg + NPR", "fednpr", (72.9, 91.5, 65.4, 87.5), (3.4, 0.2, 5.6, 2.7)),
    ("FedBABU + NPR", "fedbabu+npr", (73.7, 90.8, 71.7, 90.3), (1.6, 0.3, 7.3, 1.3)),
    ("FedRep + NPR", "fedrep+npr", (70.8, 90.4, 70.4, 90.2), (1.0, 1.5, 7.0, 0.9)),
    ("FedRoD + NPR", "fedrod+npr", (67.3, 91.4, 67.1, 91.9), (1.2, 0.9, 2.4, 2.1)),
)
