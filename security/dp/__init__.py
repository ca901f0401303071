"""Differential privacy without torch: noise, sampling, accounting, and the ledger that stops at the cap."""
