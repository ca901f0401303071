"""Loaded before every test module: TLS 1.2 is switched off before any of them imports grpc."""

import protos.tls  # noqa: F401  # imported for what it does to the environment
