"""Losses of examples/minimal_loop.py on an experiment, as JSON: ``python minimal_losses.py EXAMPLES EXPERIMENT``."""

from __future__ import annotations

import asyncio
import json
import sys

from headway.config.load import load_experiment

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from minimal_loop import minimal_loop  # pyright: ignore[reportMissingImports]

    reports = asyncio.run(minimal_loop(load_experiment(sys.argv[2], [])))
    print(json.dumps([report.metrics["loss"] for report in reports]))
