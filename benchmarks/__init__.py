"""Measurements beside the tests; nothing here is in the distribution."""
