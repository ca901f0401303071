"""Mechanisms that read images: exact clipping, DP-SGD, private counts and prototypes, and their empirical audit."""
