"""The training loop, and one run from its settings to its final model."""
