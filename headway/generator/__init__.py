"""The generator samples the tokens of rollouts: engines, their router, and the OpenAI-compatible endpoint.

It owns everything from a request's arrival to its tokens, and the recording of calls that agents make over HTTP. It
may import records, config, runtime, telemetry, control, tokens, models and weights, but no trainer and no rollout.
Begin reading at `client.py` (the pool), then `service.py` (a replica's process) and `engines/engine.py`.
"""
