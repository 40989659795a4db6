"""The engines sample tokens in a replica's process: torch, transformers' models, vLLM, and a vLLM server.

They implement the interface in `engine.py`. transformers and vLLM are imported only where their engine is built. An
engine may not import the router or the endpoint. Begin reading at `engine.py`, then `select.py`.
"""
