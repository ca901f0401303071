"""Storms for the fuzzer, the chaos run, the crowd and the soak: parties that misbehave, bad links, and what is watched.

For `benchmarks.fuzz`, `chaos`, `crowd` and `soak`; the shipped packages never import it.
All parties are processes with the shipped code, real keys and TLS; whatever is random follows from `--seed`.
"""
