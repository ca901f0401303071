"""Training does not load torch's compiler, and computes what it computes with it; who compiles still can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
STEPS = """
import sys, torch
from hashlib import sha256
told = sha256()
for kind, more in ((torch.optim.Adam, {}), (torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.01, **more)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert torch.is_grad_enabled() and all(weight.requires_grad for weight in model.parameters())
    for tensor in model.state_dict().values():
        told.update(tensor.numpy().tobytes())
print(told.hexdigest(), "torch._dynamo" in sys.modules)
"""
COMPILES = """
import torch
from torchvision.ops import roi_align  # whose question is asked now
assert torch.compile(lambda value: 2 * value, backend="eager")(torch.ones(2)).tolist() == [2, 2]
assert roi_align.__globals__["is_compile_supported"]("cpu") in (True, False)
"""


def told(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_optimizers_compute_the_same_without_the_compiler() -> None:
    """It takes as long to load as the rest of torch, in every process that sees images."""
    after, loaded = told("import site_agent.trainer.orders\n" + STEPS)
    before, loaded_before = told(STEPS)
    assert after == before
    assert (loaded, loaded_before) == ("False", "True")


def test_the_compiler_is_there_for_who_asks() -> None:
    told("import npr.model\n" + COMPILES)
