"""Policies that act in vectorised simulators: `headway train` of an experiment with ``[simulator]``."""
