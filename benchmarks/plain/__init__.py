"""What the secure aggregation is compared with: the same vector as plain float32 over TLS, and its mean back."""
