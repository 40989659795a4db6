"""Operators for GPUs: each has a plain torch body, which is the reference, and a Triton body; begin with
`decode_operators.py`. It imports no engine and no trainer.
"""
