"""Choosing a device and a precision, smaller memory, float16 and bfloat16; on the processor, which is what is here."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from lazaret.errors import ConfigError
from npr import depthwise, device
from npr.config import DeviceSettings
from npr.data.loader import Batch
from npr.device import PROCESSOR, Device, open_device, self_test, to_host
from npr.federation import Federation
from npr.model import ModelSpec, SplitModel
from npr.training import Descent

Toy = Callable[..., Federation]
WITHOUT_STATISTICS = ModelSpec(num_classes=4, architecture="test_efficientnet_ln", image_size=32)


def on(toy: Toy, device: Device, method: str = "fednpr", **train: Any) -> Federation:
    plain = toy(method, **train)
    return Federation(dataset=plain.dataset, spec=plain.spec, config=plain.config, seed=1, device=device)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])


# Which device.


def test_without_a_card_auto_is_the_processor_in_float32_and_says_why() -> None:
    chosen = open_device(DeviceSettings())
    assert (chosen.place.type, chosen.precision, chosen.is_card) == ("cpu", "float32", False)
    assert str(chosen) == "processor, float32 (no graphics card was found)"
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("wanted", ["cuda", "cuda:3", "xpu", "mps"])
def test_a_card_that_is_not_there_is_one_clear_error(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"no device '{wanted}' here") as caught:
        open_device(DeviceSettings(device=wanted))
    assert "device" in str(caught.value.where) and "cpu" in str(caught.value.hint)


@pytest.mark.parametrize("wrong", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_a_name_of_no_device_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError):
        DeviceSettings(device=wrong)


class Card:
    """A module of torch for one kind of card, of which `count` are there."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, place: torch.device) -> str:
        return "Accelerator"


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_module", lambda place: Card(1 if place.type == "xpu" else 0))
    monkeypatch.setitem(depthwise._BY_OFFSET, "xpu", False)


def test_auto_takes_the_first_card_that_passes(one_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "self_test", lambda place: "")
    chosen = open_device(DeviceSettings())
    assert (chosen.place, chosen.precision) == (torch.device("xpu", 0), "bfloat16")
    assert str(chosen).startswith("Accelerator (xpu:0), bfloat16")


def test_auto_leaves_a_card_that_computes_wrongly(one_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "self_test", lambda place: "a convolution differs")
    chosen = open_device(DeviceSettings())
    assert chosen.place.type == "cpu" and "xpu:0 does not pass its test: a convolution differs" in chosen.reason
    with pytest.raises(ConfigError, match="does not pass its test"):
        open_device(DeviceSettings(device="xpu"))


def test_each_process_of_a_machine_takes_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_module", lambda place: Card(2))
    monkeypatch.setattr(device, "self_test", lambda place: "")
    monkeypatch.setitem(depthwise._BY_OFFSET, "xpu", False)
    assert open_device(DeviceSettings(device="xpu"), rank=1).place == torch.device("xpu", 1)
    with pytest.raises(ConfigError, match="no device"):
        open_device(DeviceSettings(device="xpu"), rank=2)


def test_the_self_test_passes_here_and_finds_a_device_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test(torch.device("cpu")) == ""
    convolved, calls = device._convolved, []

    def faulty(images: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, gradient = convolved(images, weight)
        calls.append(images)
        return output, gradient * (1.01 if len(calls) == 2 else 1.0)  # the second call is the card's

    monkeypatch.setattr(device, "_convolved", faulty)
    assert "differs from the processor's by 0.01" in self_test(torch.device("cpu"))


def test_a_device_that_gives_no_numbers_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    convolved, calls = device._convolved, []

    def broken(images: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(images)
        found = convolved(images, weight)
        return found if len(calls) == 1 else tuple(part * torch.nan for part in found)

    monkeypatch.setattr(device, "_convolved", broken)
    assert self_test(torch.device("cpu"))


# Differential privacy.


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_differential_privacy_is_float32(precision: Any) -> None:
    assert open_device(DeviceSettings(), private=True).precision == "float32"
    with pytest.raises(ConfigError, match="needs float32"):
        open_device(DeviceSettings(precision=precision), private=True)


def test_differential_privacy_clips_in_one_pass() -> None:
    with pytest.raises(ConfigError, match="cannot be computed twice"):
        open_device(DeviceSettings(checkpointing=True), private=True)


def test_differential_privacy_needs_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_module", lambda place: Card(1 if place.type == "mps" else 0))
    monkeypatch.setattr(device, "self_test", lambda place: "")
    monkeypatch.setitem(depthwise._BY_OFFSET, "mps", False)
    assert open_device(DeviceSettings()).place.type == "mps"
    assert open_device(DeviceSettings(), private=True).place.type == "cpu"
    with pytest.raises(ConfigError, match="double precision"):
        open_device(DeviceSettings(device="mps"), private=True)


# Less memory, the same result.


@pytest.mark.parametrize("size", [1, 3, 5])
def test_micro_batches_equal_the_whole_batch_without_batch_statistics(toy: Toy, size: int) -> None:
    settings = {"spec": WITHOUT_STATISTICS, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.05}
    whole, parts = on(toy, PROCESSOR, **settings), on(toy, Device(micro_batch=size), **settings)
    one, other = whole.run_round(), parts.run_round()
    assert float((weights(whole.model) - weights(parts.model)).abs().max()) < 1e-5
    assert abs(one.loss - other.loss) < 1e-5 and one.sites["a"].hits == other.sites["a"].hits


def test_micro_batches_change_what_batch_statistics_see(toy: Toy) -> None:
    whole, parts = on(toy, PROCESSOR), on(toy, Device(micro_batch=4))
    whole.run_round(), parts.run_round()
    assert float((weights(whole.model) - weights(parts.model)).abs().max()) > 1e-5, "as docs/devices.md says"


def test_a_method_that_sums_over_batches_is_not_split(toy: Toy) -> None:
    with pytest.raises(ConfigError, match="cannot be shared or split"):
        on(toy, Device(micro_batch=4), "balancefl").run_round()


def test_a_batch_is_cut_into_parts_of_nearly_equal_length() -> None:
    batch = Batch(torch.arange(7.0)[:, None], torch.arange(7), torch.arange(7), 7)
    parts = batch.parts(3)
    assert [len(part) for part in parts] == [3, 2, 2] and all(part.whole == 7 for part in parts)
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
    assert batch.parts(None) == batch.parts(7) == [batch]


def test_computing_activations_again_changes_nothing(toy: Toy) -> None:
    plain, again = on(toy, PROCESSOR), on(toy, Device(checkpointing=True))
    used = {"calls": 0}
    block = again.sites[0].model.extractor.blocks[1][0]  # type: ignore[index, union-attr]
    block.register_forward_hook(lambda *_: used.__setitem__("calls", used["calls"] + 1))
    plain.run_round(), again.run_round()
    assert used["calls"] >= 2 * plain.sites[0].config.local_epochs
    assert torch.equal(weights(plain.sites[0].model), weights(again.sites[0].model)), "running statistics too"


def test_running_statistics_would_move_twice_without_the_care_taken(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, again = on(toy, PROCESSOR), on(toy, Device(checkpointing=True))
    monkeypatch.setattr(Descent, "backward", lambda self, loss: loss.backward())
    plain.run_round(), again.run_round()
    assert not torch.equal(weights(plain.sites[0].model), weights(again.sites[0].model))


class SmallExtractor(nn.Module):
    """With a forward of its own: torch does not compile that of its own containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
def test_a_compiled_network_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, images = SplitModel(SmallExtractor(), nn.Linear(4, 2)), torch.randn(4, 3, 8, 8)
    plain, names = copy.deepcopy(model), list(model.state_dict())
    compiled = open_device(DeviceSettings(compiled=True)).placed(model)
    with torch.profiler.profile() as seen:
        compiled(images).sum().backward()
    plain(images).sum().backward()
    assert any("Compiled" in event.key for event in seen.key_averages()), "it was compiled"
    assert list(compiled.state_dict()) == names
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)


def test_where_a_network_cannot_be_compiled_it_is_said_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="per-patient gradients"):
        open_device(DeviceSettings(compiled=True), private=True)
    with pytest.raises(ConfigError, match="checkpointing is on"):
        open_device(DeviceSettings(compiled=True, checkpointing=True))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="'no-such-compiler', which is not here"):
        open_device(DeviceSettings(compiled=True))


def test_a_network_without_the_switch_is_one_clear_error() -> None:
    model = SplitModel(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="cannot compute its activations again"):
        Device(checkpointing=True).placed(model)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
def test_too_little_memory_names_the_batch_and_the_key(error: BaseException) -> None:
    with pytest.raises(ConfigError, match="a batch of 64 images does not fit") as caught, PROCESSOR.memory_for(64):
        raise error
    assert "micro_batch = 32" in str(caught.value.hint) and "checkpointing" in str(caught.value.hint)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="mat1"), PROCESSOR.memory_for(64):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_no_more_images_than_micro_batch_are_ever_at_once_in_the_network(toy: Toy) -> None:
    """Also where they are only read: for prototypes, evaluation and scores."""

    def most(device: Device) -> int:
        federation, seen = on(toy, device), []
        for site in federation.sites:
            site.model.extractor.register_forward_pre_hook(lambda _, images: seen.append(len(images[0])))
        federation.run_round()
        federation.evaluate("global")
        return max(seen)

    assert most(Device(micro_batch=3)) == 3 < most(PROCESSOR)


def test_too_little_memory_where_images_are_only_read(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = on(toy, PROCESSOR)
    site = federation.sites[0]
    monkeypatch.setattr(type(site.model), "features", _too_large)
    with pytest.raises(ConfigError, match=r"a batch of \d+ images does not fit the memory of processor") as caught:
        site.training_features(site.model)
    assert "micro_batch = " in str(caught.value.hint)


def _too_large(self: nn.Module, images: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_free_memory_of_a_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_memory", lambda self: (2**30, 8 * 2**30))
    with pytest.raises(ConfigError, match=r"1\.0 of 8\.0 GiB are free"), PROCESSOR.memory_for(64):
        raise torch.OutOfMemoryError


def test_the_driver_is_read_from_the_system(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "version"
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n")
    monkeypatch.setattr(device, "_DRIVER_FILE", told)
    assert device.driver_version() == "550.54.14"
    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "none")
    assert device.driver_version() == ""


# Mixed precision. In a process of its own: some processors end it with an illegal instruction.

ROUNDS = """
import json, sys
import torch
torch.set_num_threads(1)
from tests.unit.npr.conftest import SPEC, make_dataset
from npr.config import DeviceSettings, TrainConfig
from npr.device import open_device
from npr.federation import Federation
config = TrainConfig(method="fednpr-per", batch_size=8, optimizer="sgd", learning_rate=0.01)
for precision in ("float32", "bfloat16", "float16"):
    device = open_device(DeviceSettings(device="cpu", precision=precision))
    federation = Federation(dataset=make_dataset(), spec=SPEC, config=config, seed=1, device=device)
    start = torch.cat([p.detach().flatten() for p in federation.model.parameters()])
    report = federation.run_round()
    moved = torch.cat([p.detach().flatten() for p in federation.model.parameters()])
    site = federation.sites[0]
    found = dict(
        moved=(moved - start).tolist(), loss=report.loss, scores=federation.evaluate("personal")[0].scores.tolist(),
        dtype=str(moved.dtype), features=str(site.model.features(torch.zeros(2, 3, 32, 32)).dtype),
        inside=str(site.model.extractor_dtype), scaled=site.descent.scaler is not None,
        kept="scale/float16" in site.memory(),
    )
    site.remember(site.memory())
    print(json.dumps([precision, found]), flush=True)
"""


@pytest.fixture(scope="module")
def rounds() -> dict[str, Any]:
    """What each precision gave, and under "end" how the process ended."""
    root, environment = Path(__file__).parents[3], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode <= 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines()) | {"end": -done.returncode}


# How far a round on eight images a step may be from that in float32: cosine of the two updates, their lengths, training
# loss, probabilities. bfloat16 has 8 bits, float16 has 11; seen for bfloat16: 0.91 and 0.12.
DISTANCE = {"bfloat16": (0.8, 0.25, 0.1, 0.15), "float16": (0.99, 0.05, 0.02, 0.05)}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_round_in_mixed_precision(precision: str, rounds: dict[str, Any]) -> None:
    if precision not in rounds:
        pytest.skip(f"this processor ended the process with signal {rounds['end']}")
    full, half = rounds["float32"], rounds[precision]
    assert (half["dtype"], half["features"], half["inside"]) == ("torch.float32", "torch.float32", f"torch.{precision}")
    assert half["scaled"] == half["kept"] == (precision == "float16")
    one, other = np.array(full["moved"]), np.array(half["moved"])
    assert not np.array_equal(one, other), "another precision was really used"
    least, length, loss, scores = DISTANCE[precision]
    cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
    assert cosine > least and abs(np.linalg.norm(other) / np.linalg.norm(one) - 1) < length
    assert abs(full["loss"] - half["loss"]) < loss
    assert np.abs(np.array(full["scores"]) - np.array(half["scores"])).max() < scores


def test_without_scaling_small_gradients_of_float16_are_lost_and_with_it_not() -> None:
    def step(descent: Descent) -> float:
        weight = torch.zeros(1, requires_grad=True)
        # In float16 a gradient of 1e-8 is zero; multiplied by 1024 it is not.
        descent.backward((weight.half().float() * 1e-8).sum())
        descent.step(torch.optim.SGD([weight], lr=1.0))
        return -float(to_host(weight))

    assert step(Descent(Device(precision="bfloat16"))) == 0.0
    assert step(Descent(Device(precision="float16"))) == pytest.approx(1e-8, rel=0.01)


def test_an_overflow_leaves_the_step_out_and_lowers_the_scale() -> None:
    descent = Descent(Device(precision="float16"))
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    descent.backward((weight * torch.inf).sum())
    descent.step(optimizer)
    assert to_host(weight).tolist() == [1.0] and descent.scale().tolist()[0] == 512.0
    other = Descent(Device(precision="float16"))
    other.rescale(descent.scale())
    assert other.scale().tolist() == descent.scale().tolist()


# Reproducible.


def test_deterministic_is_asked_of_torch_and_taken_back() -> None:
    try:
        assert open_device(DeviceSettings(deterministic=True)).deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        open_device(DeviceSettings())
    assert not torch.are_deterministic_algorithms_enabled()


def test_rounds_run_where_only_deterministic_operations_may(toy: Toy) -> None:
    try:
        found = open_device(DeviceSettings(deterministic=True))
        for name in ("fednpr-per", "moon+npr"):
            assert np.isfinite(on(toy, found, name).run_round().loss)
    finally:
        open_device(DeviceSettings())
