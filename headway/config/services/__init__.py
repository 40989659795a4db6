"""Sections that a service reads of several kinds of experiments. Begin with ``policy_sections.py``."""
