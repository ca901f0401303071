"""What is deployed predicts as the methods do, and an ONNX file that gives other numbers is not let pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from lazaret.errors import LocalProtocolError, VerificationFailed
from npr.config import TrainConfig
from npr.data.dataset import Samples
from npr.data.sources import open_dataset
from npr.deployed import Deployed, check_onnx, difference, write_onnx
from npr.federation import Federation
from npr.methods import registry
from npr.methods.regulariser import Regulariser
from npr.methods.site import Site
from npr.metrics import with_temperature
from npr.model import ModelSpec, SplitModel, normalisation

Toy = Callable[..., Federation]


def deployed(federation: Federation, temperature: float = 1.0) -> Deployed:
    """The first site's own predictor."""
    site, method = federation.sites[1], federation.method
    mean, std = normalisation(federation.spec)
    return Deployed(
        method=method,
        model=site.model,
        kind=method.reports[0],
        mean=mean,
        std=std,
        temperature=temperature,
        present=site.prior.present.float() if method.config.predict_present_only else None,
        prototypes=Regulariser.predicting(site, site.model),
    )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fednpr-per", {}),
        ("fednpr-per", {"predict": "head"}),
        ("fednpr-per", {"predict": "prototype"}),
        ("fednpr-per", {"predict": "both", "predict_mix": 0.3, "predict_present_only": True}),
        ("fedrod", {}),
        ("moon", {}),
        ("fednpr", {}),
    ],
)
def test_it_predicts_as_the_method_does(toy: Toy, method: str, settings: dict[str, Any]) -> None:
    federation = toy(method, **settings)
    federation.run_round()
    site, samples = federation.sites[1], federation.dataset.sites[1].test
    kind = federation.method.reports[0]
    expected = federation.method.predictor(site, site.model, kind)(samples)
    module = deployed(federation)
    found, features = module.predict(np.asarray(samples.images))
    assert found == pytest.approx(expected, abs=1e-6)
    assert features.shape[0] == len(samples)
    warm, _ = deployed(federation, 2.5).predict(np.asarray(samples.images))
    assert warm == pytest.approx(with_temperature(expected, 2.5), abs=1e-6)
    assert module.holds_prototypes == (method == "fednpr-per" and settings.get("predict") != "head")


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_several_labels_are_predicted_and_exported_as_by_the_method(share: float) -> None:
    """A network that is only a mean of colours; the site has no image with the third label, and all have the fourth."""
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    labels = np.stack([draws.integers(0, 2, 24), draws.integers(0, 2, 24), np.zeros(24), np.ones(24)], 1)
    ids = tuple(map(str, range(24)))
    samples = Samples(
        images=images, labels=labels.astype(np.int64), ids=ids, units=ids, unit_kind="image", num_classes=4
    )
    config = TrainConfig(method="fedper", labels="many", predict="both", predict_mix=share)
    method = registry.build(config)
    extractor = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 6))
    model = SplitModel(extractor, torch.nn.Linear(6, 4))
    normal: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.1, 0.1, 0.1)}
    site = Site(name="graz", train=samples, model=model, config=config, seed=0, **normal)
    prototypes = Regulariser.predicting(site, model)
    assert set(prototypes.owners.tolist()) == {0, 1, 2, 3, 4, 7}
    module = Deployed(method=method, model=model, kind="personal", prototypes=prototypes, **normal)
    expected = method.predictor(site, model, "personal")(samples)
    assert module.predict(images)[0] == pytest.approx(expected, abs=1e-6)
    if share == 1.0:
        assert (expected[:, 2] == 0).all() and (expected[:, 3] == 1).all()
    if share == 0.3:
        content = write_onnx(module, ("probabilities", "features"), images, {})
        assert check_onnx(content, module, images, where="here")["images"] == 24


def test_prediction_by_prototypes_needs_them(toy: Toy) -> None:
    federation = toy("fednpr-per", predict="prototype")
    mean, std = normalisation(federation.spec)
    with pytest.raises(LocalProtocolError, match="there are none"):
        Deployed(method=federation.method, model=federation.sites[0].model, kind="personal", mean=mean, std=std)


@pytest.fixture(scope="module")
def trained() -> tuple[Deployed, np.ndarray]:
    """A small EfficientNet after some epochs on drawn lesions, and 64 of those."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dataset = open_dataset("generated:balanced=12,sites=1", fold="fold", image_size=64)
    spec = ModelSpec(num_classes=8, architecture="test_efficientnet", image_size=64)
    config = TrainConfig(method="fedper", batch_size=16, learning_rate=3e-3, local_epochs=4)
    federation = Federation(dataset=dataset, spec=spec, config=config, seed=0)
    start = federation.model.state_dict()["head.weight"].clone()
    federation.run_round()
    site = federation.sites[0]
    assert not torch.equal(site.model.state_dict()["head.weight"], start)
    mean, std = normalisation(spec)
    module = Deployed(
        method=federation.method, model=site.model, kind="personal", mean=mean, std=std, temperature=1.7
    )
    torch.set_num_threads(before)
    return module, dataset.sites[0].train.images[:64]


@pytest.fixture(scope="module")
def exported(trained: tuple[Deployed, np.ndarray]) -> bytes:
    module, images = trained
    return write_onnx(module, ("probabilities", "features"), images, {"classes": ["é", "b"]})


def test_onnx_agrees_with_torch_on_64_images(trained: tuple[Deployed, np.ndarray], exported: bytes) -> None:
    module, images = trained
    assert len(images) == 64
    assert check_onnx(exported, module, images, where="here")["absolute_difference"] < 1e-4
    assert check_onnx(exported, module, images[:5], where="here", batch=1)["images"] == 5


def test_a_changed_weight_is_found(trained: tuple[Deployed, np.ndarray], exported: bytes) -> None:
    """One of two thousand weights of the last layer, by a twentieth."""
    module, images = trained
    model = onnx.load_model_from_string(exported)
    head = next(w for w in model.graph.initializer if list(w.dims) in ([8, 256], [256, 8]))
    values = onnx.numpy_helper.to_array(head).copy()
    values.flat[0] += 0.05
    head.CopyFrom(onnx.numpy_helper.from_array(values, head.name))
    with pytest.raises(VerificationFailed, match="differs from torch"):
        check_onnx(model.SerializeToString(), module, images, where="here")


def test_another_training_step_is_found_too(trained: tuple[Deployed, np.ndarray], exported: bytes) -> None:
    module, images = trained
    other = trained[0].model.head.bias
    kept = other.detach().clone()
    try:
        with torch.no_grad():
            other += 0.01 * torch.arange(8)
        with pytest.raises(VerificationFailed, match="differs from torch"):
            check_onnx(exported, module, images, where="here")
    finally:
        with torch.no_grad():
            other.copy_(kept)


def test_the_file_says_what_it_is_and_nothing_of_this_machine(exported: bytes) -> None:
    noted = {prop.key: prop.value for prop in onnx.load_model_from_string(exported).metadata_props}
    assert json.loads(noted["lazaret"]) == {"classes": ["é", "b"]}
    assert b"site-packages" not in exported and b".py" not in exported


def test_a_file_that_is_no_onnx_is_refused(trained: tuple[Deployed, np.ndarray]) -> None:
    with pytest.raises(VerificationFailed, match="cannot open"):
        check_onnx(b"nonsense", *trained, where="here")


def test_numbers_that_are_not_there_are_no_agreement() -> None:
    good = np.ones((2, 3), dtype=np.float32)
    assert difference(good, good).share == 0.0
    assert np.isnan(difference(np.full_like(good, np.nan), good).share)
    assert difference(good[:1], good).share == float("inf")
    assert difference(good * 1.01, good).relative == pytest.approx(0.01, rel=1e-3)


def test_a_network_with_tiny_numbers_is_compared_too() -> None:
    """Near zero the step of single precision counts; what is larger than that is still found."""
    tiny = np.full((2, 3), 1e-9, dtype=np.float32)
    off = tiny + np.float32(3e-9)
    assert difference(off, tiny).relative > 1 and difference(off, tiny).share < 1
    assert difference(tiny + np.float32(1e-5), tiny).share > 1
    assert difference(np.ones((1, 2)) + 2e-4, np.ones((1, 2))).share > 1


USED = """
import os, pathlib, sys, time
import numpy as np, onnx, torch
from npr.deployed import check_onnx
node = onnx.helper.make_node("Identity", ["images"], ["out"])
ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in ("images", "out")]
graph = onnx.helper.make_graph([node], "same", ends[:1], ends[1:])
model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
if "twin" in sys.argv:
    import onnxruntime
check_onnx(model.SerializeToString(), torch.nn.Identity(), np.ones((2, 2), dtype=np.float32), where="here")
end = time.monotonic() + (60 if "twin" in sys.argv else 1)
while time.monotonic() < end and not any(pathlib.Path.home().rglob("deviceid")):
    time.sleep(0.1)
os._exit(0)  # it waits for its own sending otherwise, which takes minutes where there is no network
"""


@pytest.mark.parametrize("twin", [False, True], ids=["as shipped", "the twin: imported elsewhere"])
def test_onnx_runtime_reports_to_nobody(twin: bool, tmp_path: Path) -> None:
    """Where its telemetry is on, it gives this machine a name and keeps a data base of what it will send."""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-c", USED, *(["twin"] if twin else [])]
    isolated = ["unshare", "--map-root-user", "--net"]  # it would really send
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace here, and the twin would report to the network")
    done = subprocess.run([*isolated, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    named = any(tmp_path.rglob("deviceid"))
    if twin and not named:
        pytest.skip("this build of ONNX Runtime does not report here, so there is nothing to stop")
    assert named is twin
