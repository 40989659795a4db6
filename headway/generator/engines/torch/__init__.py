"""The torch engine samples from headway's own decoders: continuous batching over slots, weight updates in flight.

It owns the slots' KV cache, the forward steps over them and the native decode step. Requests and their order are the
base classes' (`slot_engine.py`, `generator/engines/engine.py`). Begin reading at `engine.py`, then
`model_runner.py`.
"""
