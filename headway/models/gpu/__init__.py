"""Owns fused operators and attention of packs by flash kernels, which GPUs compute with and CPUs define, and what the
backward computes again. It imports Triton only where tensors are on a GPU. Begin with `operators.py`."""
