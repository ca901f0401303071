"""What the secure burst is compared with: the same vector as plain float32 over the same TLS, and its mean back."""
