"""The built-in engine: continuous batching over the weights that are trained."""
