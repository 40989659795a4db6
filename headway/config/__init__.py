"""The experiment file: validated schemas of all its sections, overrides, and checks between keys.

The package owns every configuration key with its default and its limits; docs/configuration.md is written from its
comments. It may import records alone, and neither torch nor any engine. Begin reading with ``schema.py``, then
``load.py``.
"""
