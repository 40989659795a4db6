"""This package computes the contents of `headway watch`: a module for each view, and its rollouts.

It reads runs as they grow, and writes nothing but its cache in the user's folder. It has no HTTP: the routes are in
``services/watch``. Begin with ``watched_runs.py`` (watched runs and their readers), then the module of a view.
"""
