"""This package runs architectures of Hugging Face's transformers behind `PackedModel`.
It includes PEFT adapters and prompts with pictures. `configuration.py`, `prompts.py` and `pixels.py` may not import
torch or transformers. Begin with `model.py`.
"""
