"""Import torchvision and timm also beside a CPU build of torch, and without torch's compiler.

The torchvision wheel brings compiled detection operators. When they cannot be loaded, importing torchvision stops at
"operator torchvision::nms does not exist", although nothing here detects anything. Declaring the two missing schemas
lets the import go through; calling them would still fail, loudly.

Torch's compiler (`torch._dynamo`) takes as long to load as the rest of torch, and some seventy megabytes, in every
process that sees images. Nothing here is compiled while it trains. Yet three places load it: a detection operator that
may ask it a question, models of timm that tell it to leave a method alone, and every optimizer, for the same reason. So
they are given what does not need it, and it is loaded when somebody really compiles (`site-agent export`). Import this
module before timm.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

_SCHEMAS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# A library object that is collected takes its declarations with it, so it must live as long as the process.
_declared: list[Any] = []
_ASKED = "torch._dynamo.utils"


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


@contextmanager
def _compiler_not_loaded() -> Iterator[None]:
    """In here, whoever imports the one function that torchvision wants gets one that asks when it is called. A method
    that the compiler is to leave alone stays as it is."""
    if _ASKED in sys.modules:
        yield
        return

    def disable(method: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        del recursive, reason
        return (lambda given: given) if method is None else method

    def is_compile_supported(device: str) -> bool:
        return bool(importlib.import_module(_ASKED).is_compile_supported(device))

    later: Any = ModuleType(_ASKED)
    later.is_compile_supported = is_compile_supported
    sys.modules[_ASKED] = later
    before, torch.compiler.disable = torch.compiler.disable, disable
    try:
        yield
    finally:
        torch.compiler.disable = before
        del sys.modules[_ASKED]


def _optimizers_without_compiler() -> None:
    """Those that `npr.config` offers. A step tells the compiler where to break, and turns gradients off: here only the
    latter. Other methods ask for a form of themselves that is not compiled, which torch keeps: they are that form."""
    for method in vars(Optimizer).values():
        code, plain = getattr(method, "__code__", None), getattr(method, "__wrapped__", None)
        if code is not None and plain is not None and code.co_filename == torch._compile.__file__:
            plain.__dynamo_disable = plain
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        step: Any = kind.__dict__.get("step")
        if step is not None and step.__code__.co_name == "_use_grad":
            kind.step = torch.no_grad()(step.__wrapped__)  # type: ignore[method-assign]


with _compiler_not_loaded():
    _import_torchvision()
    importlib.import_module("timm")
_optimizers_without_compiler()
