"""A bundle's configuration is data: names of classes are never run by those who open it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazaret.errors import ConfigError
from npr import deployed
from npr.deployed import bundle_files
from site_agent.trainer.predict import decoding_for

ABOUT: dict[str, Any] = {
    "federation": "lesions",
    "run": "run-1",
    "round": 3,
    "architecture": "test_efficientnet",
    "method": "fedavg",
    "classes": ["nevus", "bcc"],
    "input": {"shape": ["batch", 32, 32, 1]},
}
CONTENTS = {"model.onnx": b"onnx", "model.safetensors": b"tensors", "MODEL_CARD.md": b"card", "model.json": b"{}"}


def test_files_are_where_monai_documents_them() -> None:
    found = bundle_files(CONTENTS, ABOUT, output="probabilities")
    assert found["models/model.onnx"] == b"onnx" and found["docs/README.md"] == b"card"
    about = json.loads(found["configs/metadata.json"])
    needed = ("version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version", "task")
    needed += ("description", "authors", "copyright", "network_data_format")
    assert all(about[name] for name in needed)
    assert about["network_data_format"]["inputs"]["image"]["num_channels"] == 1
    assert about["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": "nevus", "1": "bcc"}
    features = json.loads(bundle_files(CONTENTS, ABOUT, output="features")["configs/metadata.json"])
    assert features["task"] == "image features"


@pytest.mark.parametrize("source", ["generated:", "csv:table.csv", "fed-isic:folder"])
def test_a_site_that_prepares_images_in_another_way_has_no_bundle(source: str) -> None:
    about = ABOUT | {"input": {**ABOUT["input"], "decoding": decoding_for(source, 32, 3).settings}}
    if source.startswith("fed-isic"):
        with pytest.raises(ConfigError, match="in another way than this site"):
            bundle_files(CONTENTS, about, output="probabilities")
    else:
        assert bundle_files(CONTENTS, about, output="probabilities")


RUNS = ABOUT | {"classes": ["nevus", "$'ra' + 'n'", "grade #1"]}


@pytest.mark.parametrize("name", ["$'ra' + 'n'", "@bundle_root", "%file.json", "grade #1"])
def test_a_name_that_monai_would_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="would not take"):
        bundle_files(CONTENTS, ABOUT | {"classes": ["nevus", name]}, output="probabilities")


def test_without_the_check_monai_runs_the_name_of_a_class_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = pytest.importorskip("monai.bundle", reason="the extra [monai] is not installed")
    monkeypatch.setattr(deployed, "_check_names", lambda classes: None)
    config = tmp_path / "inference.json"
    config.write_bytes(bundle_files(CONTENTS, RUNS, output="probabilities")["configs/inference.json"])
    parser = bundle.ConfigParser()
    parser.read_config(str(config))
    assert parser.get_parsed_content("classes") == ["nevus", "ran", "grade ::1"]
