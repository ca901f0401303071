"""A federation on this machine, with real keys, processes and TLS: for the demo, the tests and the benchmarks.

Benchmarks and tests import it; the shipped packages never do.
"""
