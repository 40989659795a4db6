"""Policies that act in tokens: a language model reads coded observations and answers with letters that are actions.
Begin with ``policy.py``; ``learner.py`` trains it by the service of other models."""
