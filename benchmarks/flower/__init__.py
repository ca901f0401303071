"""Flower on the same vector: a real deployment over TLS in an environment of its own, and one SecAgg+ round."""
