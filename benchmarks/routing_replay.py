"""Does routing replay repair what noise in an engine's routers does? A mixture's quickstart, three times.

    python benchmarks/routing_replay.py --noise 0.05 --seconds 330

The quickstart's tasks and cold start with a mixture of experts, then its RL: with an exact engine, with noise in the
engine's routers and no replay, and with the same noise and replay. The noise is added to what the routers read, so many
root mean squares of it, in generator processes alone. Prints a line for each run and, as the last line, one JSON
object: solve rates on the held-out test before and after, their standard error, and the means over the steps of
`experts_disagree`, `experts_disagree_replayed` and `mismatch_k3`. Limits: two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headway.records.ledger import EvaluationRecord, StepRecord
from headway.telemetry.ledger import read_ledger

RUNS = {"exact": (False, "auto"), "noise": (True, "off"), "noise, replayed": (True, "on")}
NAMES = ("experts_disagree", "experts_disagree_replayed", "mismatch_k3")
_NOISE = """\
import torch
from headway.models import decoder

exact = decoder.route

def noisy(hidden_nd, *rest):
    if torch.is_inference_mode_enabled():  # in engines alone
        scale = {noise} * hidden_nd.float().pow(2).mean(-1, keepdim=True).sqrt()
        hidden_nd = hidden_nd + (scale * torch.randn_like(hidden_nd, dtype=torch.float32)).to(hidden_nd.dtype)
    return exact(hidden_nd, *rest)

decoder.route = noisy
"""


def headway(*words: object, log: Path, path: Path | None = None) -> None:
    """Run a command; ``path``: of a sitecustomize.py that all its processes import."""
    others = os.environ.get("PYTHONPATH", "")
    environment = os.environ | ({} if path is None else {"PYTHONPATH": f"{path}{os.pathsep}{others}"})
    command = [sys.executable, "-m", "headway.cli.main", *map(str, words)]
    with log.open("a") as output:
        subprocess.run(command, check=True, env=environment, stdout=output, stderr=subprocess.STDOUT)


def prepared(folder: Path, seed: int) -> None:
    """The quickstart's files, tasks, a mixture and its cold start, unless they are there."""
    if not (folder / "sft").exists():
        folder.mkdir(parents=True, exist_ok=True)
        templates = Path(__file__).parents[1] / "headway" / "templates" / "quickstart"
        for file in templates.iterdir():
            shutil.copy(file, folder / file.name)
        tasks = (sys.executable, folder / "make_tasks.py", folder / "tasks", "--seed", str(seed))
        subprocess.run(tasks, check=True, stdout=subprocess.DEVNULL)
        sizes = ("--family", "qwen3_moe", "--intermediate", 96, "--texts", folder / "tasks" / "sft.jsonl")
        log = folder / "log"
        headway("init-model", folder / "init", *sizes, "--character-level", "--seed", seed, log=log)
        headway("quickstart", folder, "--seed", seed, "--cold-start-only", log=log)


def measured(folder: Path, name: str, noise: float, seconds: float, extra: list[str]) -> dict[str, Any]:
    """One run of RL from the cold start."""
    noisy, replay = RUNS[name]
    run = folder / name.replace(", ", "-")
    shutil.rmtree(run, ignore_errors=True)
    splits = [f"--tasks.{split}.path={folder}/tasks/{split}.jsonl" for split in ("train", "validation", "test")]
    words = ["train", folder / "experiment.toml", "--quiet", f"--model.path={folder}/sft", f"--run.directory={run}"]
    keys = [f"--algorithm.routing_replay={replay}", f"--run.time_limit_s={seconds:g}", *splits, *extra]
    keys += ["--generator.probe_every_updates=0"] * noisy  # else the agreement check refuses the run, and is right
    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "sitecustomize.py").write_text(_NOISE.format(noise=noise))
        headway(*words, *keys, log=folder / "log", path=Path(site) if noisy else None)
    lines = read_ledger(run)
    steps = [line.metrics for line in lines if isinstance(line, StepRecord)]
    tests = {line.phase: line for line in lines if isinstance(line, EvaluationRecord) and line.split == "test"}
    found: dict[str, Any] = {"run": name, "steps": len(steps)}
    for phase in ("before", "after"):
        found[phase] = round(tests[phase].solve_rate, 4)
    found["standard_error"] = round(tests["after"].standard_error, 4)
    for metric in NAMES:
        values = [metrics[metric] for metrics in steps if metric in metrics]
        found[metric] = round(sum(values) / len(values), 6) if values else None
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark-routing-replay"))
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--seed", type=int, default=0)
    arguments, extra = parser.parse_known_args()
    folder = arguments.directory.absolute()
    print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.2f}", flush=True)
    prepared(folder, arguments.seed)
    runs = [measured(folder, name, arguments.noise, arguments.seconds, extra) for name in RUNS]
    print(json.dumps({"noise": arguments.noise, "runs": runs}))


if __name__ == "__main__":
    main()
