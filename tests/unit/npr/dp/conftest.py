"""Prepares torchvision before a test module here imports timm."""

from npr import _torchvision  # noqa: F401
