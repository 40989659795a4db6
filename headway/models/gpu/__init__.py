"""Owns what a GPU computes the decoder with: fused operators, their Triton kernels, and attention of packs by flash
kernels. It imports Triton only where tensors are on a GPU. Begin with `operators.py`."""
