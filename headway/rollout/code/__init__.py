"""Tests of programs: their forms in data sets, comparison of outputs, hidden tests and repository files.

This package only parses and compares. Programs run in the sandbox, through `rollout/environments`, and expected values
never enter it. Begin with `code_tests.py`; `hidden_tests.py` explains the threat model.
"""
