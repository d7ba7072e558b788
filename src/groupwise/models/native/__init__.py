"""Fused loops in C for bf16 and fp32 on CPUs (``kernels.c``), compiled at the first use where there is a C compiler; PyTorch does without them."""
