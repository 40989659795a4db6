"""The quickstart: tasks, a random model, a supervised cold start, asynchronous RL, a report. About 8 minutes.

    python examples/arithmetic/quickstart.py --seed 0

Runs each step by the command a user would type, prints it, and skips what an earlier run of the same seed has done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(*command: str) -> None:
    """Print and run one command; end with its exit code when it fails."""
    print("\n$ " + " ".join(command), flush=True)
    arguments = ["-m", "headway.cli.main"] if command[0] == "headway" else []
    code = subprocess.run([sys.executable, *arguments, *command[1:]]).returncode
    if code:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of tasks, model, cold start and RL")
    parser.add_argument("--directory", type=Path, help="default: runs/arithmetic-SEED")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="that generates (docs/vllm.md)")
    parser.add_argument("--cold-start-only", action="store_true", help="stop before RL")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, given to `headway train`")
    arguments, extra = parser.parse_known_args()
    folder: Path = arguments.directory or Path(f"runs/arithmetic-{arguments.seed}")
    config = os.path.relpath(HERE / "experiment.toml")

    tasks, initial, warm, rl = folder / "tasks", folder / "init", folder / "sft", folder / "rl"
    paths = [f"--tasks.{name}.path={tasks}/{name}.jsonl" for name in ("train", "validation", "test")]
    seed = f"--run.seed={arguments.seed}"
    # vLLM has a fixed cost a step that a model as small as this one does not repay: it gets the time for as many steps
    engine = ("--generator.engine=vllm", "--run.time_limit_s=600") if arguments.engine == "vllm" else ()
    if not (tasks / "test.jsonl").exists():
        run("python", str(HERE / "make_tasks.py"), str(tasks), "--seed", str(arguments.seed))
    if not initial.exists():
        run(
            "headway",
            "init-model",
            str(initial),
            "--texts",
            f"{tasks}/sft.jsonl",
            "--character-level",
            "--seed",
            str(arguments.seed),
            *(("--heads", "3", "--kv-heads", "1") if arguments.engine == "vllm" else ()),  # of 32 dimensions
        )
    if not warm.exists():
        run(
            "headway",
            "sft",
            config,
            f"--model.path={initial}",
            f"--sft.data={tasks}/sft.jsonl",
            f"--sft.output={warm}",
            *paths,
            seed,
        )
    if arguments.cold_start_only:
        return
    done = (rl / "summary.json").exists() and json.loads((rl / "summary.json").read_text())["finished"]
    if done:
        print(f"\n{rl} holds a finished run; remove {folder} to start anew.")
    else:
        resume = ["--resume"] if (rl / "config.json").exists() else []
        run(
            "headway",
            "train",
            config,
            *resume,
            f"--model.path={warm}",
            f"--run.directory={rl}",
            *paths,
            seed,
            *engine,
            *extra,
            *arguments.overrides,
        )
    run("headway", "report", str(rl))


if __name__ == "__main__":
    main()
