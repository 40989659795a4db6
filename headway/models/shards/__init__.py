"""This package reads and writes the rows of a model's tensors that one rank holds, in files of safetensors.
No rank ever holds a whole model for it, and nothing here communicates: ranks write their rows into the same files.
Begin with `shard.py`; `row_map.py` finds the rows of a model folder's tensors in the parameters.
"""
