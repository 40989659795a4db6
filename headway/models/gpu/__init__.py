"""Owns what GPUs compute decoders with and CPUs define: fused operators, attention of packs by flash kernels, kernels
of a decoding step, and what the backward computes again. It imports Triton only where tensors are on a GPU. Begin with
`operators.py`.
"""
