"""This package computes the decoder on a CPU, with C++ kernels that are built at first use, and flash attention.
Its functions must agree with plain torch, which is used without a compiler. Begin with `native.py`.
"""
