"""Runs a benchmark's parts one after the other, and keeps what is finished."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def run_parts(
    parts: Mapping[str, Callable[[argparse.Namespace], Report]], arguments: argparse.Namespace
) -> dict[str, Report]:
    """Return the reports of ``arguments.parts``, in that order. Those in the JSON file ``arguments.keep`` aren't run
    again; each new one is added to it."""
    keep: Path | None = arguments.keep
    done: dict[str, Report] = json.loads(keep.read_text(encoding="utf-8")) if keep is not None and keep.exists() else {}
    for name in arguments.parts:
        left = [part for part in arguments.parts if part not in done]
        print(f"remaining parts: {', '.join(left) or 'none'}", flush=True)
        if name in done:
            continue
        started = time.monotonic()
        done[name] = parts[name](arguments)
        print(f"{name} took {time.monotonic() - started:.0f} s", flush=True)
        if keep is not None:
            keep.write_text(json.dumps(done), encoding="utf-8")
    return {name: done[name] for name in arguments.parts}
