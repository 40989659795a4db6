"""The vLLM engines sample with vLLM in the replica's process, or with a running `vllm serve` over HTTP.

Both prove, by probes against the trainer's forward pass, that vLLM computes with the published weights. vLLM may be
imported only inside functions and in `worker.py`. Begin reading at `base_engine.py`, then `engine.py`.
"""
