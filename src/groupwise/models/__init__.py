"""Models: loading, saving, the embedded default, and per-token log-probabilities."""
