"""This package owns model architectures, their sizes, adapters, loading, weight tying and `headway init-model`.
It may import the base packages and `tokens`, and contains no training or sampling. Modules whose first line ends
with "torch-free" don't import torch. Begin with `packed_model.py`, the interface of a model, and `decoder.py`.
"""
