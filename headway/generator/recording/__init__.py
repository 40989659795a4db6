"""This package records the model calls of each rollout, token-exact, as a tree of answers, and authorises callers.

It owns keys, sessions and the training sequences made from calls. It may import neither HTTP code nor engines: a
session samples through an injected callable. Begin reading at `recorder.py`, then `sessions.py`.
"""
