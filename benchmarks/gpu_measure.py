"""Headway on one GPU, measured step by step in fifteen minutes: kernels, decoding, training, weights, whole runs.

    python benchmarks/gpu_measure.py --out OUT --limit-s 320 --only facts kernels step engine trainer publish
    python benchmarks/gpu_measure.py --device cpu --quick --out OUT     # do all steps work? A minute, without a GPU
    python benchmarks/gpu_measure.py --collect OUT                      # into benchmarks/results/gpu-CARD.txt

Each step is a process with a limit of its own (`STEPS`); most valuable first, so that what doesn't fit into
``--limit-s`` is worth least. Its line of JSON is appended to OUT/results.jsonl as soon as it ends: ``status`` is "ran",
"failed" or "not run", the latter two with ``why``; ``measured`` has the numbers, also those from before a failure;
``lacking`` has the parts of a step that were not run, each with its reason. Later calls append, e.g. ``--only`` what
failed. The numbers of a step under way are in OUT/unfinished.json. The last line is a summary: "failed", as is the exit
code (1), if any step failed or none ran.

``--called-at``: seconds since 1970 at which a machine was asked for; `facts` says how long it took to get here.
``--plant-fault``: breaks what a step measures, to see that it fails. Random weights are made on the device: nothing is
downloaded. `gpu_carry.sh` makes what a machine without a network lacks.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.parts.gpu_results import area_digests, collect, commit_of  # noqa: E402
from headway.kernels.device_queries import query_gpus  # noqa: E402


class Step(NamedTuple):
    """A row of the table of steps."""

    limit_s: float
    measures: str


STEPS = {
    "facts": Step(20, "the card and its ceilings: copy bandwidth, bfloat16 product; versions; time to get here"),
    "kernels": Step(60, "every kernel and its gradient against float64, and its time against that of its bytes"),
    "step": Step(45, "the decoding step: against float64, an update, offloading; graphs against operators; launches"),
    "engine": Step(75, "tokens/s at 1, 16, 64 and 256 requests against the limit of bandwidth; table of one step"),
    "trainer": Step(100, "gradients against float64; model FLOP/s against the peak; table of one step"),
    "publish": Step(30, "seconds per GB to publish, fetch and apply weights while requests run"),
    "vllm": Step(110, "vLLM in this process: its probe, the engine's loads, an update under load"),
    "loop": Step(100, "the asynchronous run on one GPU, budgets 2 and 0; idle share of the GPU"),
    "tests": Step(90, "tests/gpu: whole runs, killed and resumed"),
    "nccl": Step(15, "a process group of one rank"),
}
NEEDED = {"vllm": {"vllm": " (benchmarks/gpu_carry.sh vllm)"}, "tests": {"pytest": "", "pytest_timeout": ""}}
CPU_LIMIT_S = 300.0  # of any step on a CPU, which others may keep busy
LEAST_S = 5.0  # a step isn't started with less than this remaining
GIVEN, LACKING, NOT_RUN = "GIVEN ", "LACKING ", "NOT RUN "  # how lines of a step's process begin that aren't noise
MODEL_BYTES = 24e9  # model folders and published weights: in shared memory where it has this much free


class Journal:
    """Appends lines to OUT/results.jsonl, each durable before the next step starts."""

    def __init__(self, folder: Path, common: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines, self._unfinished, self._common = folder / "results.jsonl", folder / "unfinished.json", common

    def append(self, line: dict[str, Any]) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | self._common) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._unfinished.unlink(missing_ok=True)

    def note_unfinished(self, line: dict[str, Any]) -> None:
        self._unfinished.write_text(json.dumps(line | self._common) + "\n", encoding="utf-8")


def run_step(name: str, settings: dict[str, Any], limit_s: float, journal: Journal) -> dict[str, Any]:
    """Run a step in its process, and return its line."""
    command = [sys.executable, "-m", "benchmarks.parts.gpu_steps", name, json.dumps(settings | {"limit_s": limit_s})]
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    measured, lacking = dict[str, Any](), dict[str, str]()
    line: dict[str, Any] = {"step": name, "status": "ran", "limit_s": round(limit_s, 1)}
    tail: list[str] = []
    started = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes) as process:
        # With the workers that it has started, which hold its output open.
        killer = threading.Timer(limit_s, lambda: os.killpg(process.pid, signal.SIGKILL))
        killer.start()
        for text in process.stdout or ():
            if text.startswith(GIVEN):
                measured |= json.loads(text.removeprefix(GIVEN))
                journal.note_unfinished(line | {"status": "failed", "why": "unfinished", "measured": measured})
            elif text.startswith(LACKING):
                lacking |= json.loads(text.removeprefix(LACKING))
            elif text.startswith(NOT_RUN):
                line |= {"status": "not run", "why": text.removeprefix(NOT_RUN).strip()}
            elif text.strip():
                tail = [*tail[-30:], text.rstrip()]
        code = process.wait()
        killer.cancel()
    seconds = time.monotonic() - started
    if code:
        why = f"stopped at its limit of {limit_s:.0f} s" if seconds >= limit_s else cause(tail, code)
        line |= {"status": "failed", "why": why, "tail": tail[-15:]}
    return line | {"seconds": round(seconds, 1), "measured": measured, "lacking": lacking}


def cause(tail: Sequence[str], code: int) -> str:
    """The line that names the error: the last one that looks like an exception, else the last."""
    named = [line for line in tail if ("Error" in line or "Exception" in line) and not line.startswith(" ")]
    return (named or list(tail) or [f"exit code {code}"])[-1][:300]


def summary(lines: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The last line: which steps ran, failed, and were not run; failed if any did, or none ran."""
    by_status: dict[str, dict[str, str]] = {"ran": {}, "failed": {}, "not run": {}}
    for line in lines:
        by_status[line["status"]][line["step"]] = line.get("why", "")
        for part, why in line.get("lacking", {}).items():
            by_status["not run"][f"{line['step']}: {part}"] = why
    return {
        "step": "summary",
        "status": "ran" if by_status["ran"] and not by_status["failed"] else "failed",
        "ran": list(by_status["ran"]),
        "failed": by_status["failed"],
        "not_run": by_status["not run"],
        "seconds": round(seconds, 1),
    }


def reason_not_to_run(name: str, device: str, has_gpu: bool) -> str:
    """Why a step can't be run on this machine; "" if it can."""
    if device == "cuda" and not has_gpu:
        return "this machine's drivers list no GPU"
    if name == "tests" and device == "cpu":
        return "tests/gpu needs a GPU"
    for package, how in NEEDED.get(name, {}).items():
        if importlib.util.find_spec(package) is None:
            return f"{package} isn't installed{how}"
    return ""


def measure(arguments: argparse.Namespace, called_at: float | None) -> int:
    """Run the chosen steps; the exit code."""
    started, began_at = time.monotonic(), time.time()
    gpus = query_gpus() if arguments.device == "cuda" else ()
    card = gpus[0].model if gpus else "CPU"
    journal = Journal(
        arguments.out,
        {
            "card": card,
            "commit": commit_of(ROOT),
            "date": time.strftime("%Y-%m-%d", time.gmtime(began_at)),
            "quick": arguments.quick,
            "code": area_digests(ROOT),
        },
    )
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > MODEL_BYTES
    folder = Path(tempfile.mkdtemp(prefix="headway-gpu-", dir=arguments.folder or (shared if roomy else None)))
    settings = {
        "device": arguments.device,
        "quick": arguments.quick,
        "folder": str(folder),
        "start_s": None if called_at is None else round(began_at - called_at, 1),
    }
    lines: list[dict[str, Any]] = []
    try:
        for name in (name for name in STEPS if name in arguments.only and name not in arguments.skip):
            remaining_s = arguments.limit_s - (time.monotonic() - started)
            if reason := reason_not_to_run(name, arguments.device, bool(gpus)):
                line = {"step": name, "status": "not run", "why": reason}
            elif remaining_s < LEAST_S:
                line = {
                    "step": name,
                    "status": "not run",
                    "why": f"{remaining_s:.0f} s of {arguments.limit_s:.0f} remain",
                }
            else:
                limit_s = CPU_LIMIT_S if arguments.device == "cpu" else STEPS[name].limit_s
                fault = {"fault": name in arguments.plant_fault}
                line = run_step(name, settings | fault, min(limit_s, remaining_s), journal)
            journal.append(line)
            lines.append(line)
            display(line)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for slot in shared.glob(f"*{folder.name}*"):  # published weights of a step that was killed
            slot.unlink(missing_ok=True)
    last = summary(lines, time.monotonic() - started)
    journal.append(last)
    print(json.dumps(last), flush=True)
    return int(last["status"] == "failed")


def display(line: dict[str, Any]) -> None:
    """Print a step's line for people."""
    seconds = f", {line['seconds']} s of {line['limit_s']}" if "seconds" in line else ""
    print(f"{line['step']}: {line['status']}{seconds}{': ' + line['why'] if 'why' in line else ''}", flush=True)
    for name, numbers in line.get("measured", {}).items():
        print(f"    {name}: {json.dumps(numbers)[:400]}", flush=True)
    for text in line.get("tail", ()):
        print(f"    | {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models and loads: whether the steps work")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--skip", nargs="+", choices=list(STEPS), default=[])
    limit_s = sum(step.limit_s for step in STEPS.values())
    parser.add_argument("--limit-s", type=float, default=limit_s, help=f"for all steps together; default {limit_s:.0f}")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="folder of results.jsonl; default build/gpu"
    )
    parser.add_argument("--folder", type=Path, help="for models and runs; default: shared memory or a temporary folder")
    parser.add_argument("--called-at", type=float, help="seconds since 1970")
    parser.add_argument("--plant-fault", nargs="+", choices=list(STEPS), default=[])
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="write FOLDER's results and measure nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where --collect writes")
    arguments = parser.parse_args()
    if arguments.collect is None:
        return measure(arguments, arguments.called_at)
    try:
        print(collect(arguments.collect, arguments.results, ROOT))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
