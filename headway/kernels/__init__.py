"""This package owns kernel tasks, their evaluation, faults, rewards, devices, and the client of kernel services.
It may import the base packages, `sandbox`, `tasks`, `control/estimates.py` and `control/summaries.py`; the client,
prompts and rewards stay torch-free. Candidates are untrusted: no source runs in the evaluator's process. Begin with
`evaluator.py`.
"""
