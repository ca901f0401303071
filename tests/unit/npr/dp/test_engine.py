"""Both engines have the gradients of autograd, or the model is refused before anything is booked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from lazaret.errors import PolicyViolation
from npr.backbones import MONAI_PREFIX
from npr.dp import engine as engines
from npr.dp.engine import TOLERANCE, OpacusGradient, check_exact, clipped_sum, largest_error, resolved
from npr.model import ModelSpec, SplitModel, build_model
from security.dp.planner import Engine

PAGE = Path(__file__).parents[4] / "docs" / "dp-models.md"
# Family, the model of it that is tried, and the size of its images.
FAMILIES = (
    ("EfficientNet", "efficientnet_b0", 64),
    ("EfficientNet-Lite", "tf_efficientnet_lite0", 64),
    ("MobileNetV3", "mobilenetv3_small_050", 64),
    ("ResNet", "resnet18", 64),
    ("RegNet", "regnetx_002", 64),
    ("DenseNet", "densenet121", 64),
    ("MLP-Mixer", "mixer_s32_224", 224),
    ("NF-ResNet", "nf_resnet50", 64),
    ("NFNet", "eca_nfnet_l0", 64),
    ("ViT", "vit_tiny_patch16_224", 224),
    ("DeiT", "deit_tiny_patch16_224", 224),
    ("CaiT", "cait_xxs24_224", 224),
    ("XCiT", "xcit_nano_12_p16_224", 224),
    ("MobileViT", "mobilevit_xxs", 64),
    ("Swin", "swin_tiny_patch4_window7_224", 224),
    ("ConvNeXt", "convnext_atto", 64),
    ("PoolFormer", "poolformer_s12", 64),
    ("ResMLP", "resmlp_12_224", 224),
    ("CoaT", "coat_tiny", 64),
    ("EdgeNeXt", "edgenext_xx_small", 64),
    ("ResNet of MONAI", "monai:resnet10", 64),
    ("SE-ResNet of MONAI", "monai:seresnet50", 64),
    ("DenseNet of MONAI", "monai:densenet121", 64),
)
SMALL = ("EfficientNet", "MobileNetV3", "XCiT", "PoolFormer", "ConvNeXt", "ResNet of MONAI")


def model_of(architecture: str, size: int) -> SplitModel:
    if architecture.startswith(MONAI_PREFIX):
        pytest.importorskip("monai", reason="the extra [monai] is not installed")
    return build_model(ModelSpec(architecture=architecture, num_classes=3, image_size=size, norm="group"))


def row(family: str, architecture: str, size: int) -> str:
    """A row of the page: what trains it, or why it is refused. Errors are shown as a power of ten."""
    model = model_of(architecture, size)
    try:
        engine = check_exact(model, "auto", channels=3, image_size=size)
    except PolicyViolation as refused:
        reason = re.sub(r"[^A-Za-z0-9 ,.;()_-]", "", refused.message)
        wrong = re.search(r"opacus has gradient norms that differ from autograd by ([0-9.e-]+)", reason)
        why = "norms of Opacus differ from autograd" if wrong else "Opacus has no gradients for one of its layers"
        return f"| {family} | `{architecture}` | refused | {why} |"
    error = largest_error(model, engine, channels=3, image_size=size)
    assert error <= TOLERANCE
    return f"| {family} | `{architecture}` | {engine} | norms equal to autograd (1e-4) |"


@pytest.mark.parametrize("family", [entry for entry in FAMILIES if entry[0] in SMALL], ids=lambda entry: entry[0])
def test_the_page_says_what_happens(family: tuple[str, str, int]) -> None:
    assert row(*family) in PAGE.read_text()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_page_is_made_here() -> None:
    """Writes the table between the markers of the page; a difference shows in version control."""
    rows = [row(*family) for family in FAMILIES]
    text = PAGE.read_text()
    head, rest = text.split("<!-- table -->\n")[0], text.split("<!-- end -->")[1]
    lines = ["| family | model tried | engine | finding |", "|---|---|---|---|", *rows]
    written = f"{head}<!-- table -->\n" + "\n".join(lines) + f"\n<!-- end -->{rest}"
    PAGE.write_text(written)
    assert written == text


def test_auto_takes_the_fast_engine_where_it_has_every_formula() -> None:
    assert resolved(model_of("test_efficientnet", 32), "auto") == "fast"
    vit = model_of("test_vit", 32)
    assert resolved(vit, "auto") == "opacus"
    with pytest.raises(PolicyViolation, match="engine fast cannot train"):
        check_exact(vit, "fast", channels=3, image_size=32)


@pytest.mark.parametrize(("architecture", "engine"), [("test_efficientnet", "fast"), ("test_vit", "opacus")])
def test_each_record_is_clipped_by_itself(architecture: str, engine: Engine) -> None:
    """The sum over a batch is the sum of the clipped gradients of autograd, one by one; NaN records are left out."""
    model = model_of(architecture, 32).train().double()
    images, labels = torch.randn(5, 3, 32, 32).double(), torch.tensor([0, 1, 2, 0, 1])
    images[3] = torch.nan
    clipped = clipped_sum(model, clip=0.7, engine=engine)
    norms = clipped.add(lambda: functional.cross_entropy(model(images), labels, reduction="none"))
    assert norms.isfinite().tolist() == [True, True, True, False, True]
    expected = torch.zeros_like(clipped.sum)
    for n in (0, 1, 2, 4):
        loss = functional.cross_entropy(model(images[n : n + 1]), labels[n : n + 1])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, clipped.parameters)])
        assert float(norms[n]) == pytest.approx(float(gradient.norm()), rel=TOLERANCE)
        expected += gradient * min(1.0, 0.7 / (float(gradient.norm()) * 1.001))
    assert torch.allclose(clipped.sum, expected, atol=1e-9, rtol=1e-6)


def test_opacus_leaves_nothing_behind() -> None:
    model = model_of("test_vit", 32).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clipped = OpacusGradient(model, clip=1.0)
    for _ in range(2):
        clipped.add(lambda: model(torch.randn(2, 3, 32, 32)).sum(1))
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert len(clipped.add(lambda: torch.zeros(0))) == 0


class MixesRecords(nn.Module):
    """A layer that subtracts the mean over the batch, as a careless normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 8 * 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        out: torch.Tensor = self.layer(flat - flat.mean(0))
        return out


def test_a_model_that_mixes_records_is_found_by_the_comparison() -> None:
    with pytest.raises(PolicyViolation, match="differ from autograd"):
        check_exact(MixesRecords(), "auto", channels=3, image_size=8)


def test_a_model_that_mixes_records_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison it would be trained, with a clip that bounds nothing."""
    monkeypatch.setattr(engines, "TOLERANCE", float("inf"))
    assert check_exact(MixesRecords(), "auto", channels=3, image_size=8) == "fast"
