"""Headway on one GPU: engine, trainer, weight updates in flight and the whole asynchronous loop, in one command.

    python benchmarks/gpu.py --sizes 0.6 4 --limit-s 570 --output gpu.txt      # on a machine with an NVIDIA GPU
    python benchmarks/gpu.py --device cpu --quick                              # does it work at all? Seconds

Needs torch, numpy, safetensors, tokenizers, jinja2, typer, rich, xxhash and, beside those, msgspec and pydantic;
`gpu_wheels.sh` fetches wheels of the latter two for a machine without a network. transformers is measured against
where it is installed. Models are Qwen3's sizes with random weights, made on the device: nothing is downloaded.

Parts, each in a process of its own with its share of the time, so that one that fails (out of memory, a missing
package) is reported with its cause and the others go on:

    model         makes the model folder that all others load
    engine        tokens/s at 1, 16, 64 and 256 concurrent; decoding alone against the bandwidth limit: concurrent x
                  (measured copy bandwidth / (bytes of the weights + bytes of the KV read in a step))
    transformers  its padded ``generate`` and, a part of its own, its ``continuous`` batching on the same load: beside
                  `tokens_per_s` of engine, prompts included, the peer's start and one unmeasured round excluded
    trainer       model FLOP/s of training steps (bfloat16 products, packed) on sequences of 128 and of 2,048 tokens,
                  against the measured peak of matrix products
    update        seconds per GB to publish, fetch and apply weights while 64 requests run, by update mode
    loop          the asynchronous system, generator and trainer on the same GPU, forced log-normal lengths; budgets
                  2 and 0

The last line is one JSON object: per size and part what it found, or "failed" with the cause.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
SIZES = ("0.6", "1.7", "4", "tiny")
# part -> most seconds it may take; what an earlier one leaves, a later one may use
PARTS = {
    **{"model": 90, "engine": 90, "transformers generate": 60, "transformers continuous": 60},
    **{"trainer": 90, "update": 60, "loop": 300},
}
RESULT, SHOWN = "RESULT ", "SHOWN "  # how lines of gpu_parts.py begin that are not noise
LEAST_S = 10.0  # a part isn't started with less than this left


class Report:
    """Prints, and keeps what was printed in a file."""

    def __init__(self, output: Path | None) -> None:
        self._file: TextIO | None = output.open("w", encoding="utf-8") if output else None

    def line(self, text: str) -> None:
        print(text, flush=True)
        if self._file is not None:
            self._file.write(text + "\n")
            self._file.flush()  # what is known survives a kill


def machine(device: str) -> str:
    """The device and the host, in a line."""
    cores = len(os.sched_getaffinity(0))
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus: list[str] = []
    if device == "cuda" and shutil.which(query[0]):
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()[:1]
    return "; ".join([*gpus, f"{cores} cores", f"Python {sys.version.split()[0]}"])


def run_part(part: str, settings: dict[str, Any], limit_s: float, report: Report) -> dict[str, Any]:
    """Run one part in its own process; what it found, and "failed" with the cause if it didn't end well."""
    command = [sys.executable, str(HERE / "gpu_parts.py"), part, json.dumps(settings | {"limit_s": limit_s})]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    found: dict[str, Any] = {}
    tail: list[str] = []
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    # with the workers it has started, which hold its output open
    killer = threading.Timer(limit_s, lambda: os.killpg(process.pid, signal.SIGKILL))
    killer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(RESULT):
            found |= json.loads(line.removeprefix(RESULT))
        elif line.startswith(SHOWN):
            report.line("  " + line.removeprefix(SHOWN).rstrip())
        elif line.strip():
            tail = [*tail[-30:], line.rstrip()]
    code = process.wait()
    killer.cancel()
    seconds = time.monotonic() - started
    if code:
        late = seconds >= limit_s
        found["failed"] = f"stopped after its {limit_s:.0f} s" if late else cause(tail, code)
        report.line(f"  failed: {found['failed']}")
        for line in tail[-15:]:
            report.line(f"    | {line}")
    report.line(f"  ({part}: {seconds:.0f} s)")
    return found


def cause(tail: Sequence[str], code: int) -> str:
    """The line that names the error: the last one that looks like an exception, else the last."""
    named = [line for line in tail if ("Error" in line or "Exception" in line) and not line.startswith(" ")]
    return (named or list(tail) or [f"exit code {code}"])[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6"], help="billions of parameters")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=570.0, help="for everything; what doesn't fit is left out")
    parser.add_argument("--quick", action="store_true", help="a tiny model and tiny loads")
    parser.add_argument("--output", type=Path, help="also write what is printed to this file")
    parser.add_argument("--folder", type=Path, help="for the models and runs; default: a temporary one")
    arguments = parser.parse_args()
    sizes = ["tiny"] if arguments.quick else arguments.sizes
    report = Report(arguments.output)
    folder = Path(tempfile.mkdtemp(prefix="headway-gpu-", dir=arguments.folder))
    deadline = time.monotonic() + arguments.limit_s
    result: dict[str, Any] = {"machine": machine(arguments.device), "device": arguments.device}
    report.line(result["machine"])
    try:
        for size in sizes:
            found = result[size] = {}
            settings = {
                "device": arguments.device,
                "size": size,
                "quick": arguments.quick,
                "folder": str(folder / size),
            }
            for part in ["model", *(part for part in arguments.parts if part != "model")]:
                left_s = deadline - time.monotonic()
                report.line(f"\n{size}: {part}")
                if left_s < LEAST_S:
                    found[part] = {"failed": f"not started: {left_s:.0f} s left of {arguments.limit_s:.0f}"}
                    report.line(f"  {found[part]['failed']}")
                    continue
                found[part] = run_part(part, settings, min(PARTS[part], left_s), report)
                if part == "model" and "failed" in found[part]:
                    break  # nothing else can run
            shutil.rmtree(folder / size, ignore_errors=True)
        report.line(json.dumps(result))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
