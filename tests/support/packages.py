"""Packages that a module's tests need."""

from __future__ import annotations

import importlib.util

import pytest


def needs(name: str, reason: str = "") -> None:
    """Skip the module where the package isn't installed. Unlike `pytest.importorskip` this doesn't import it: every
    worker of pytest-xdist collects all modules, and some packages take seconds."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(reason or f"{name} isn't installed", allow_module_level=True)
