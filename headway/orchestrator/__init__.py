"""Runs and supervises training: wires the actors together and drives the four loops, evaluation and resume.

Owns admission, verification, batches, publishing and the ledger's records of a run. It uses the actors through their
clients and Protocols alone, never imports torch, and takes its decisions from `control`. It may not import planner,
services, cli and embodied, and of report only what a model card needs. Begin with run.py, then train_loop.py.
"""
