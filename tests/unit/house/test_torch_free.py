"""Packages without tensors load no torch, whichever of their modules is imported."""

from __future__ import annotations

import subprocess
import sys

from code_figures import FILES, PACKAGE

WITH_TORCH = {"generator", "models", "trainer", "weights", "services", "cli"}  # the last two import these lazily
SKIPPED = (
    "headway.telemetry.exporters.trackio",  # imports a package that the environment may lack
    "headway.embodied.learner",  # the trainer of simulators' policies, which its worker imports lazily
    "headway.embodied.tokens.learner",  # ... and that of token policies
    "headway.embodied.tokens.policy",
)


def test_packages_without_tensors_load_no_torch():
    parts = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in FILES if file.parent != PACKAGE]
    modules = [".".join(part) for part in parts if part[1] not in WITH_TORCH and part[-1] != "__init__"]
    modules = [module for module in modules if module not in SKIPPED and ".kernels.guest." not in module]
    assert len(modules) > 250
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
