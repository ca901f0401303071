"""Prepares torchvision before a test module here imports timm."""

from npr import backbones  # noqa: F401
