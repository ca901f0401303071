"""Stress for `benchmarks.fuzz`, `chaos`, `crowd` and `soak`: parties that misbehave, bad links, and what is checked.

The shipped packages never import it. All parties are processes with the shipped code, real keys and TLS; whatever is
random follows from `--seed`.
"""
