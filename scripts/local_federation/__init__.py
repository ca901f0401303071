"""A whole federation on this machine, with real keys, processes and TLS: for the demo, the tests and the benchmark."""
