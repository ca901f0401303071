"""Import torchvision (and so timm) also beside a CPU build of torch.

The torchvision wheel brings compiled detection operators. When they cannot be loaded, importing torchvision stops at
"operator torchvision::nms does not exist", although nothing here detects anything. Declaring the two missing schemas
lets the import go through; calling them would still fail, loudly. Import this module before timm.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

_SCHEMAS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# A library object that is collected takes its declarations with it, so it must live as long as the process.
_declared: list[Any] = []


def _import_torchvision() -> None:
    declare: Any = torch.library.Library
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
            del sys.modules[name]
        library = declare("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            library.define(schema + _SIGNATURE)
        _declared.append(library)
        importlib.import_module("torchvision")


_import_torchvision()
