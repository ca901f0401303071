"""Class counts of the two benchmarks, recounted from their split files; generated data and tests use them."""

from __future__ import annotations

import numpy as np

ISIC_CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
ISIC_SITES = ("bcn", "vidir_molemax", "vidir_modern", "rosendahl", "msk4", "vienna_dias")

# Sites x classes of Fed-ISIC2019 (Ogier du Terrail et al., 2022) in the order of its centre numbers.
ISIC_TRAIN = np.array(
    [
        [2279, 3363, 2245, 606, 923, 97, 87, 330],
        [20, 2977, 2, 0, 96, 23, 45, 0],
        [533, 1470, 174, 20, 379, 40, 64, 11],
        [276, 649, 223, 86, 406, 20, 3, 144],
        [166, 349, 0, 0, 140, 0, 0, 0],
        [58, 276, 5, 0, 6, 4, 2, 0],
    ]
)
ISIC_TEST = np.array(
    [
        [578, 843, 564, 131, 215, 27, 24, 101],
        [4, 743, 0, 0, 28, 7, 9, 0],
        [147, 362, 37, 1, 96, 11, 18, 0],
        [66, 154, 73, 23, 84, 10, 0, 42],
        [49, 66, 0, 0, 49, 0, 0, 0],
        [9, 74, 0, 0, 4, 0, 1, 0],
    ]
)

# Alphabetical, as in the RSNA challenge; the split file itself holds only numbers.
ICH_CLASSES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")

# Sites x classes of the FedNPR paper's ten-site partition of RSNA-ICH.
ICH_TRAIN = np.array(
    [
        [0, 0, 1112, 2245, 4033],
        [88, 5522, 0, 1926, 0],
        [89, 1122, 2339, 0, 7627],
        [0, 2430, 0, 3574, 2944],
        [132, 518, 0, 930, 1828],
        [269, 0, 0, 1034, 1834],
        [538, 928, 2662, 0, 0],
        [9, 502, 0, 0, 2869],
        [69, 62, 0, 1635, 957],
        [4, 62, 1017, 429, 1033],
    ]
)
ICH_TEST = np.array(
    [
        [0, 0, 278, 561, 1009],
        [22, 1381, 0, 481, 0],
        [22, 281, 585, 0, 1907],
        [0, 608, 0, 893, 736],
        [33, 129, 0, 233, 457],
        [67, 0, 0, 259, 459],
        [135, 232, 666, 0, 0],
        [2, 125, 0, 0, 718],
        [17, 15, 0, 409, 240],
        [1, 15, 255, 108, 258],
    ]
)
# The paper's Dirichlet concentration per class, in the order of ICH_CLASSES, and its chance of dropping a class.
ICH_ALPHA = (0.5, 5.0, 10.0, 30.0, 50.0)
ICH_MISSING = 0.3
