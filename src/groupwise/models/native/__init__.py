"""Fused loops in C for models on CPUs (``kernels.c``), compiled at the first use where there is a C compiler; PyTorch does without them."""
