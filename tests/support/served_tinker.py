"""`headway serve-tinker` with its real workers, as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import warm_programs


def write_settings(folder: Path, model: str | Path, slots: int = 8, **tinker: Any) -> Path:
    """``folder/tinker.toml``, with its store beside it."""
    tinker = {"store": str(folder / "store"), **tinker}
    keys = "\n".join(f"{name} = {json.dumps(value)}" for name, value in tinker.items())
    file = folder / "tinker.toml"
    file.write_text(
        f'[model]\npath = "{model}"\n[generator]\ndevices = ["cpu:0"]\nslots = {slots}\n'
        f'[trainer]\ndevices = ["cpu:1"]\n[endpoint]\naddress = "127.0.0.1:0"\n[tinker]\n{keys}\n'
    )
    return file


@contextmanager
def service(file: Path, *overrides: str, cwd: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command and its address. Its output is in the file ``output`` beside the settings, from its end on."""
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": cwd}
    command = ["serve-tinker", str(file), *overrides]
    process = warm_programs.start(warm_programs.HEADWAY, *command, environment=dict(os.environ), **outputs)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        address = ""
        for line in process.stdout:
            lines.append(line)
            if line.startswith("export TINKER_BASE_URL="):
                address = line.strip().partition("=")[2]
            if line.startswith("export TINKER_API_KEY="):
                yield process, address
                return
        raise AssertionError("".join(lines))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        (file.parent / "output").write_text("".join(lines) + output)
