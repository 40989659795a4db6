"""This engine samples from any model that Hugging Face's transformers loads, by the model's own forward pass and cache.

It shares slots, updates and sampling with the torch engine (`generator/engines/torch/slot_engine.py`). It may be
imported only where such a model is built, since it needs transformers. Begin reading at `engine.py`.
"""
