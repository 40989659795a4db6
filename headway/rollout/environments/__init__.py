"""The built-in environments: Python tool, code tests, repairs, kernels, games, dialogues, Harbor and OpenEnv.

Each extends `rollout/environment.py:Environment` and runs in a worker of `rollout/hosting`. They see text, never
tokens, and run the policy's code only in sandboxes or kernel services. Begin with `python_tool.py`, the shortest.
"""
