"""This package has the Triton kernels of decoders on GPUs. Each has a plain torch body beside the operator that calls
it, which is its reference. Begin with `decode_kernels.py`.
"""
